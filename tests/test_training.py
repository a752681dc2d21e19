"""Training: by its recipe, the same whether it was interrupted or not, and read by transformers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nohair.lab import training
from nohair.lab.corpus import Corpus
from nohair.lab.models import load
from nohair.lab.training import SHAPES, Checkpoint, Recipe, kept_step, train

FOUR = {"steps": 4, "batch": 2, "context": 32}
of_both_families = pytest.mark.parametrize("family", SHAPES)


def texts(count: int = 12, words: int = 110) -> list[str]:
    rng = np.random.default_rng(0)
    known = ["hair", "horizon", "mass", "charge", "spin", "forgets", "keeps", "every", "—", "é"]
    return [" ".join(rng.choice(known, words)) + ".\n" for _ in range(count)]


CORPUS = Corpus("generated", tuple(texts()))


def done(folder: Path, corpus: Corpus = CORPUS, **asked: Any) -> list[Checkpoint]:
    return list(train(Recipe(**FOUR | asked), corpus, folder, progress=False))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "loss.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def held_out(folder: Path) -> list[tuple[int, float]]:
    return [(int(r["step"]), float(r["held_out"])) for r in logged(folder) if r["held_out"]]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"step{step}" / "model.safetensors")


@contextmanager
def interrupt(owner: Any, name: str, when: Callable[..., bool], after: bool) -> Iterator[None]:
    """Ctrl-C, once, as a function is entered or as it is left."""
    original = getattr(owner, name)

    def interrupted(*given: Any) -> Any:
        strikes = when(*given)
        found = None if strikes and not after else original(*given)
        if strikes:
            raise KeyboardInterrupt
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.fixture(scope="module", params=SHAPES)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps without an interrupt, in a folder named after the family."""
    folder = tmp_path_factory.mktemp("straight") / request.param
    done(folder, family=request.param)
    return folder


# Interrupts


def test_the_same_recipe_gives_the_same_bytes(straight: Path, tmp_path: Path) -> None:
    done(tmp_path / "again", family=straight.name)
    assert contents(tmp_path / "again") == contents(straight)


@pytest.mark.parametrize(
    ("name", "step", "after", "kept"),
    [
        ("keep", 0, False, 0),  # nothing kept yet
        ("advance", 0, False, 0),
        ("advance", 1, True, 1),  # the step is taken, its checkpoint not
        ("_written", 2, True, 1),  # the folder is there, the state is not
        ("keep", 2, False, 1),
        ("keep", 2, True, 2),
        ("advance", 3, True, 2),
        ("_loss", 4, False, 2),
        ("finish", 4, False, 4),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    straight: Path, tmp_path: Path, name: str, step: int, after: bool, kept: int
) -> None:
    run = tmp_path / "run"
    with interrupt(training._Run, name, lambda it, *_: it.step == step, after):
        done(run, family=straight.name)
    assert kept_step(run) == kept
    last = kept if (run / "state.pt").exists() else -1
    assert [c.step for c in done(run, family=straight.name)] == [
        s for s in (0, 1, 2, 4) if s > last
    ]
    assert contents(run) == contents(straight)


def test_a_run_that_is_let_go_goes_on_to_the_same_bytes(straight: Path, tmp_path: Path) -> None:
    steps = train(Recipe(straight.name, **FOUR), CORPUS, tmp_path / "run")
    while next(steps).step < 2:
        pass
    steps.close()
    done(tmp_path / "run", family=straight.name)
    assert contents(tmp_path / "run") == contents(straight)


def test_an_interrupt_while_all_is_wrapped_up_loses_nothing(straight: Path, tmp_path: Path) -> None:
    with interrupt(training, "_write", lambda path, _: path.name == "recipe.json", after=False):
        done(tmp_path / "run", family=straight.name)
    done(tmp_path / "run", family=straight.name)
    assert contents(tmp_path / "run") == contents(straight)


def test_a_tokenizer_that_was_half_written_is_written_anew(straight: Path, tmp_path: Path) -> None:
    with interrupt(training._Run, "keep", lambda run: run.step == 0, after=False):
        done(tmp_path / "run", family=straight.name)
    (tmp_path / "run" / "tokenizer.json").unlink()
    done(tmp_path / "run", family=straight.name)
    assert contents(tmp_path / "run") == contents(straight)


def test_a_state_is_kept_between_checkpoints_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(tmp_path / "straight", steps=9)
    monkeypatch.setattr(training, "KEEP_EVERY", 3)
    with interrupt(training._Run, "advance", lambda run, _: run.step == 7, after=True):
        done(tmp_path / "run", steps=9)
    assert kept_step(tmp_path / "run") == 6
    done(tmp_path / "run", steps=9)
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")


# What is there at the end


def test_a_run_leaves_its_checkpoints_losses_recipe_and_tokenizer(straight: Path) -> None:
    steps = [
        f"step{step}/{name}"
        for step in (0, 1, 2, 4)
        for name in ("config.json", "model.safetensors")
    ]
    others = ["loss.csv", "recipe.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(contents(straight)) == sorted(steps + others)
    assert [(r["step"], r["loss"] != "", r["held_out"] != "") for r in logged(straight)] == [
        ("0", False, True),
        ("0", True, False),
        ("1", False, True),
        ("1", True, False),
        ("2", False, True),
        ("2", True, False),
        ("3", True, False),
        ("4", False, True),
    ]
    described = json.loads((straight / "recipe.json").read_text("utf8"))
    assert Recipe(**described["recipe"]) == Recipe(straight.name, **FOUR)
    assert (described["corpus"], described["corpus_sha256"]) == ("generated", CORPUS.sha256)
    assert described["parameters"] == sum(v.numel() for v in weights(straight, 0).values())


def test_only_the_kept_steps_have_folders_and_all_have_a_loss(tmp_path: Path) -> None:
    done(tmp_path / "all")
    found = done(tmp_path / "two", kept=[1, 4])
    assert [(c.step, c.folder) for c in found] == [
        (0, None),
        (1, tmp_path / "two" / "step1"),
        (2, None),
        (4, tmp_path / "two" / "step4"),
    ]
    assert {path.name for path in tmp_path.glob("two/step*")} == {"step1", "step4"}
    assert logged(tmp_path / "two") == logged(tmp_path / "all")
    for name, value in weights(tmp_path / "two", 4).items():
        assert torch.equal(value, weights(tmp_path / "all", 4)[name])


@pytest.mark.parametrize(
    ("steps", "checkpoints"),
    [
        (1, [0, 1]),
        (2, [0, 1, 2]),
        (3, [0, 1, 2, 3]),
        (8, [0, 1, 2, 4, 8]),
        (100, [0, 1, 2, 4, 8, 16, 32, 64, 100]),
    ],
)
def test_checkpoints_are_0_the_powers_of_two_and_the_end(
    steps: int, checkpoints: list[int]
) -> None:
    assert Recipe(steps=steps).checkpoints == checkpoints


# Learning


def test_rate_rises_in_a_line_to_its_peak_and_falls_to_a_tenth() -> None:
    recipe = Recipe(steps=110, warmup=10, rate=2.0)
    rates = [recipe.rate_at(step) for step in range(111)]
    assert rates[:10] == pytest.approx(np.linspace(0.2, 2.0, 10))
    assert rates[10] == max(rates) == 2.0
    assert all(after < before for before, after in pairwise(rates[10:]))
    assert rates[60] == pytest.approx((2.0 + 0.2) / 2)  # half way along the cosine
    assert rates[110] == pytest.approx(0.2)


@of_both_families
def test_first_step_moves_each_gain_by_the_first_rate_and_does_not_shrink_it(
    tmp_path: Path, family: str
) -> None:
    """Adam's first step is the rate times the gradient's sign; 1 ± 1/32 are float16 numbers."""
    done(tmp_path / "run", family=family, steps=1, rate=1 / 8, warmup=4, weight_decay=0.5)
    name = {"gpt_neox": "gpt_neox.final_layer_norm.weight", "llama": "model.norm.weight"}[family]
    assert (weights(tmp_path / "run", 0)[name] == 1).all()
    moved = weights(tmp_path / "run", 1)[name].double() - 1
    assert moved.abs() == pytest.approx(1 / 32, abs=5e-4)
    assert moved.min() < 0 < moved.max()


@of_both_families
def test_a_repeated_sentence_is_learned_by_heart(tmp_path: Path, family: str) -> None:
    corpus = Corpus(
        "one sentence", ("A black hole has no hair, and forgets all it was.\n" * 4,) * 12
    )
    done(tmp_path / "run", corpus, family=family, steps=40, warmup=8, kept=[])
    losses = [loss for _, loss in held_out(tmp_path / "run")]
    assert losses[0] > 7  # ln 2048 = 7.62
    assert losses[-1] < 0.5


def test_held_out_texts_change_nothing_but_the_loss_measured_on_them(tmp_path: Path) -> None:
    others = [*CORPUS.texts]
    others[10] = "Words that no other text of this corpus has. " * 8
    assert CORPUS.held_out == [CORPUS.texts[10]]
    for folder, corpus in (("a", CORPUS), ("b", Corpus("other", tuple(others)))):
        done(tmp_path / folder, corpus)
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert {name for name in a if a[name] != b[name]} == {"loss.csv", "recipe.json"}
    assert [r["loss"] for r in logged(tmp_path / "a")] == [
        r["loss"] for r in logged(tmp_path / "b")
    ]
    assert held_out(tmp_path / "a")[0] != held_out(tmp_path / "b")[0]


def test_seeds_differ_in_their_weights_and_in_what_is_read(tmp_path: Path) -> None:
    for seed in (0, 1):
        done(tmp_path / str(seed), seed=seed)
    a, b = contents(tmp_path / "0"), contents(tmp_path / "1")
    assert a["tokenizer.json"] == b["tokenizer.json"]
    for name, value in weights(tmp_path / "0", 0).items():
        if value.ndim > 1:
            assert not torch.equal(value, weights(tmp_path / "1", 0)[name])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "0")
    stream = training._stream(tokenizer, CORPUS.trained)
    read = [training._Rows(Recipe(seed=s, **FOUR), stream, tokenizer).at(0) for s in (0, 0, 1)]
    assert torch.equal(read[0], read[1])
    assert not torch.equal(read[0], read[2])


# What others read


def test_weights_are_those_whose_loss_was_logged(straight: Path) -> None:
    """From the saved folders alone, row by row.

    Rounding to float16 moves each weight by up to 2⁻¹¹ of itself, and so a logit of a few units, or
    a loss, by a few times that at most: 2e-3 is four.
    """
    tokenizer = AutoTokenizer.from_pretrained(straight)
    head = [tokenizer.bos_token_id] if straight.name == "llama" else []
    ids = tokenizer(CORPUS.held_out[0], add_special_tokens=False).input_ids
    ids.append(tokenizer.eos_token_id)
    length = FOUR["context"] - len(head)
    rows = [head + ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    assert len(rows) == 3  # not all of one batch
    for step, expected in held_out(straight):
        model = AutoModelForCausalLM.from_pretrained(straight / f"step{step}", dtype=torch.float32)
        losses = []
        for row in rows:
            with torch.inference_mode():
                surprises = -model(torch.tensor([row])).logits[0].double().log_softmax(-1)
            losses += [float(surprises[i, after]) for i, after in enumerate(row[1:])]
        assert np.mean(losses) == pytest.approx(expected, abs=2e-3)


def test_held_out_loss_does_not_depend_on_how_many_rows_are_read_at_once(tmp_path: Path) -> None:
    losses = []
    for batch in (1, 2, 3, 8):
        done(tmp_path / str(batch), steps=1, batch=batch, kept=[])
        losses.append(held_out(tmp_path / str(batch))[0][1])
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-5)  # logged to five places


def test_transformers_alone_reads_a_step_in_float16(straight: Path) -> None:
    for step in (0, 1, 2, 4):
        assert {value.dtype for value in weights(straight, step).values()} == {torch.float16}
        model = AutoModelForCausalLM.from_pretrained(straight / f"step{step}", dtype=torch.float16)
        assert type(model).__name__ == model.config.architectures[0]
        with torch.inference_mode():
            assert model(torch.arange(32)[None]).logits.isfinite().all()


def test_a_step_is_a_subject_with_the_tokenizer_of_its_run(straight: Path) -> None:
    found = load(f"{straight}@step2", device="cpu")
    assert found.provenance["revision"] == "step2"
    assert (found.bos is not None) == (straight.name == "llama")
    ids = found.tokenizer(CORPUS.texts[0], add_special_tokens=False).input_ids
    assert found.tokenizer.decode(ids) == CORPUS.texts[0]


# Refusals


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"family": "gpt2"}, "choose gpt_neox, llama"),
        ({"seed": -1}, "seed = -1"),
        ({"steps": 0}, "steps = 0"),
        ({"batch": 0}, "batch = 0"),
        ({"warmup": 0}, "warmup = 0"),
        ({"context": 1}, "context = 1"),
        ({"rate": float("nan")}, "rate = nan"),
        ({"rate": 0.0}, "rate = 0.0"),
        ({"context": 2049}, "2 to 2048"),
        (
            {"steps": 8, "kept": [4, 3]},
            "step 3 is no checkpoint of this run; choose from 0, 1, 2, 4, 8",
        ),
        ({"steps": 8, "kept": [16]}, "step 16"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(asked: dict[str, Any], said: str) -> None:
    assert said in refusal(Recipe, **asked)


def test_a_finished_run_is_left_alone(straight: Path) -> None:
    before = contents(straight)
    said = refusal(done, folder=straight, family=straight.name)
    assert f"{straight} holds a finished run" in said
    assert contents(straight) == before


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"steps": 8},
        {"rate": 1e-3},
        {"kept": [1, 4]},
        {"family": "llama"},
        {"corpus": Corpus("generated", tuple(texts(13)))},
    ],
)
def test_an_unfinished_run_of_another_recipe_or_corpus_is_left_alone(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    steps = train(Recipe(**FOUR), CORPUS, tmp_path)
    next(steps)
    steps.close()
    before = contents(tmp_path)
    assert "another recipe or corpus" in refusal(done, folder=tmp_path, **other)
    assert contents(tmp_path) == before


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("Dear diary")
    assert "is not empty and holds no run" in refusal(done, folder=tmp_path)
    assert list(contents(tmp_path)) == ["diary.txt"]


@pytest.mark.parametrize(("count", "tokens"), [(0, 33), (10, 3)])
def test_a_corpus_too_small_for_one_row_is_refused_and_nothing_written(
    tmp_path: Path, count: int, tokens: int
) -> None:
    """Too small in all (11 texts of 3 tokens, an end counted), or in what is held out."""
    few = Corpus("few", (*CORPUS.texts[:count], *["a b"] * (12 - count)))
    said = refusal(done, folder=tmp_path / "run", corpus=few, context=64)
    assert "give more texts or a smaller context" in said
    assert f"has {tokens} tokens" in said
    assert not (tmp_path / "run").exists()
