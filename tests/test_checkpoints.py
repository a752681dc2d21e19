"""Checkpoints of one run: in order, each its own; their loss, and that it fell."""

from __future__ import annotations

from itertools import islice
from math import log, nan
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refusal
from tiny_networks import VOCABULARY, byte_tokenizer, network, rows, subject, wrap

from nohair.lab import checkpoints
from nohair.lab.checkpoints import check_learning, fingerprint, loss
from nohair.lab.models import Subject

TEXTS = rows(3, 17, seed=2, kind="text")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 3 as `nohair train` leaves them; the weights of step 3 are those of step 1."""
    folder = tmp_path_factory.mktemp("run")
    byte_tokenizer(bos=True).save_pretrained(folder)
    (folder / "recipe.json").write_text("{}")
    for step, seed in enumerate((0, 1, 2, 1)):
        network("llama", seed).save_pretrained(folder / f"step{step}")
    return folder


def each(run: Path, *steps: int) -> list[tuple[int, Subject]]:
    return list(checkpoints.each(str(run), steps, device="cpu"))


# A row of subjects


def test_each_step_comes_in_its_turn_with_its_own_weights(run: Path) -> None:
    found = each(run, 0, 1, 2)
    assert [step for step, _ in found] == [0, 1, 2]
    for seed, whom in found:
        expected = network("llama", seed).state_dict()
        assert all(torch.equal(w, expected[name]) for name, w in whom.model.state_dict().items())
        assert whom.bos == 0
        assert whom.provenance["revision"] == f"step{seed}"


def test_a_step_is_loaded_when_it_is_asked_for(run: Path) -> None:
    """What is wrong later on does not keep the first step back."""
    ((step, _),) = islice(checkpoints.each(str(run), (0, 99), device="cpu"), 1)
    assert step == 0
    assert "step99" in refusal(lambda: each(run, 0, 99))


def test_each_step_has_the_precision_that_was_asked_for(run: Path) -> None:
    for _, whom in checkpoints.each(str(run), (0, 2), dtype="bfloat16", device="cpu"):
        assert whom.model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "at least 2 steps"),
        ((1,), "steps = [1]"),
        ((1, 0), "0 comes after 1"),
        ((0, 2, 2), "2 comes after 2"),
        ((0, 2, 1), "1 comes after 2"),
    ],
)
def test_steps_that_are_no_course_are_refused(run: Path, steps: list[int], said: str) -> None:
    assert said in refusal(lambda: each(run, *steps))


def test_two_steps_with_the_same_weights_are_refused_by_their_names(run: Path) -> None:
    said = refusal(lambda: each(run, 0, 1, 2, 3))
    assert "steps 1 and 3 have the same weights" in said
    assert str(run) in said


# What tells weights apart


def test_fingerprint_is_that_of_the_weights(run: Path) -> None:
    model = network("gpt2")
    first = fingerprint(model)
    assert fingerprint(network("gpt2")) == first
    assert fingerprint(network("gpt2", seed=1)) != first
    assert fingerprint(network("gpt2", dtype=torch.bfloat16)) != first
    (_, one), (_, again) = each(run, 0, 2)[0], each(run, 0, 1)[0]
    assert one.model is not again.model
    assert fingerprint(one.model) == fingerprint(again.model) == fingerprint(network("llama"))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama tied", "opt"])
def test_fingerprint_sees_the_least_change_of_any_weight(name: str) -> None:
    model = network(name)
    seen = {fingerprint(model)}
    for weight in model.parameters():
        value = weight.view(-1)[-1:]
        value.copy_(torch.nextafter(value, torch.full_like(value, np.inf)))
        seen.add(fingerprint(model))
    assert len(seen) == 1 + len(list(model.parameters()))


def test_fingerprint_reads_values_that_do_not_lie_in_a_row() -> None:
    model, other = network("llama"), network("llama")
    weight = other.lm_head.weight
    weight.data = weight.T.contiguous().T
    assert not weight.is_contiguous()
    assert fingerprint(other) == fingerprint(model)


# Loss


@pytest.mark.parametrize("bos", [None, 0])
@torch.no_grad()
def test_loss_is_the_cross_entropy_of_what_comes_next(bos: int | None) -> None:
    whom = subject("gpt_neox", bos=bos)
    head = [] if bos is None else [bos]
    surprises = []
    for row in TEXTS.ids:
        ids = np.array([*head, *row])
        logits = whom.model(torch.tensor(ids[None])).logits[0].double().numpy()
        likelihood = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        surprises += [-log(likelihood[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    assert len(surprises) == TEXTS.ids.size - (bos is None) * len(TEXTS.ids)
    assert loss(whom, TEXTS) == pytest.approx(np.mean(surprises), rel=1e-5)  # float32 against 64


def test_a_network_that_knows_nothing_loses_the_logarithm_of_its_vocabulary() -> None:
    model = network("llama")
    model.lm_head.weight.zero_()
    assert loss(wrap(model), TEXTS) == pytest.approx(log(VOCABULARY), rel=1e-6)


def test_training_is_seen_by_its_first_and_last_loss() -> None:
    check_learning({0: 7.6, 64: 7.9, 512: 4.1})


@pytest.mark.parametrize("last", [7.6, 7.7, nan])
def test_steps_that_learned_nothing_are_refused(last: float) -> None:
    said = refusal(lambda: check_learning({1: 7.6, 64: 4.1, 512: last}))
    assert f"7.600 at step 1 and {last:.3f} at step 512" in said
