"""Random networks are drawn anew from one recipe, and the recipe is the one that was drawn."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from nohair.errors import Refused
from nohair.lab import anatomy, distances, ensemble, models, texts, twins
from nohair.theory import untrained

SMALL: dict[str, Any] = {"prompt_tokens": [4, 8], "horizon": 40, "seeds": 2, "prompts": 3}


@pytest.fixture(scope="module")
def measured() -> Any:
    return ensemble.measure("smoke", **SMALL)


def test_each_draw_is_the_measurement_of_that_seed(measured: Any) -> None:
    subject = models.load("smoke", twin="init", seed=1)
    given = texts.prompts(subject, 3, 8, kind="random", seed=1)
    shared = texts.continuations(subject, 1, 40, "random", seed=1)
    record = distances.measure(subject, given, shared, floor=False)
    blocks = record.distance[:-1].astype(float)
    expected = np.sqrt((blocks**2).mean(("continuation", "pair")))
    np.testing.assert_allclose(measured.distance.sel(seed=1, prompt_tokens=8), expected, rtol=1e-12)


def test_every_draw_is_another_network(measured: Any) -> None:
    assert dict(measured.distance.sizes) == {"seed": 2, "prompt_tokens": 2, "layer": 2, "t": 40}
    first, second = measured.distance
    assert not np.allclose(first, second, rtol=1e-3)


def test_redrawing_is_loading_with_another_seed() -> None:
    first = models.load("smoke", twin="config", seed=0)
    again, loaded = models.redraw(first, 5), models.load("smoke", twin="config", seed=5)
    for a, b in zip(again.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad
    assert again.provenance == loaded.provenance
    assert not again.model.training


def test_trained_weights_cannot_be_redrawn() -> None:
    subject = models.load("smoke", twin="init")
    trained = models.Subject(**(vars(subject) | {"provenance": {"twin": None}}))
    with pytest.raises(Refused, match="twin None has no recipe"):
        models.redraw(trained, 1)


@pytest.mark.parametrize(
    ("preset", "twin", "name", "sizes"),
    [
        ("gpt2-6", "init", "gpt2", {}),
        ("gpt2-6", "config", "gpt2", {}),
        ("neox-6", "init", "neox", {}),
        ("neox-6", "config", "neox-config", {}),
        ("llama-6", "init", "llama", {"mlp_width": 1408}),
        ("qwen3-4", "init", "qwen3", {"mlp_width": 1408}),
        ("gemma2-4", "init", "gemma2", {"mlp_width": 1408}),
        ("gemma3-4", "config", "gemma3", {"mlp_width": 1408}),
    ],
)
def test_the_lab_and_the_theory_mean_the_same_recipe(
    preset: str, twin: str, name: str, sizes: dict[str, int]
) -> None:
    recipe = twins.recipe(models.load(preset, twin=twin).model, twin)
    assert recipe == asdict(untrained.named(name, 512, **sizes))


@pytest.mark.parametrize("preset", ["gpt2-6", "neox-6", "llama-6"])
@pytest.mark.parametrize("twin", ["init", "config"])
def test_weights_have_the_variances_of_their_recipe(preset: str, twin: str) -> None:
    """Within five standard errors of a variance, sqrt(2/n) of it."""
    model = models.load(preset, twin=twin).model
    stated = untrained.Initialisation(**twins.recipe(model, twin))
    layers = len(anatomy.blocks(model))
    for read, _, value, writer in anatomy.projections(model):
        for weight, expected in (
            (read.weight, stated.std**2),
            (value.weight, stated.std**2),
            (writer, stated.writing(layers)),
        ):
            allowed = 5 * (2 / weight.numel()) ** 0.5
            assert float(weight.var()) == pytest.approx(expected, rel=allowed)
    embedding = model.get_input_embeddings().weight
    assert float(embedding.var()) == pytest.approx(stated.embedding, rel=1e-2)


def test_the_recipe_predicts_what_is_measured() -> None:
    """Width 512, four draws: the mean over draws scatters by less than one percent in D there.

    What the tolerance allows beside that is the width: corrections of order 1/width per block.
    """
    record = ensemble.measure("gpt2-6", prompt_tokens=[8], horizon=64, seeds=4, prompts=4)
    init = untrained.Initialisation(**record.recipe)
    predicted = untrained.distance(init, 6, 8, np.arange(1, 65))
    found = np.sqrt((record.distance[:, 0] ** 2).mean("seed"))
    ratio = (found / predicted).mean("t")
    np.testing.assert_allclose(ratio, 1, atol=0.05)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_tokens": []}, r"prompt_tokens = \[\]"),
        ({"seeds": 0}, "seeds = 0"),
        ({"prompts": 1}, "1 prompt"),
        ({"horizon": 5000}, "512 positions"),
        ({"twin": "permuted"}, "permute"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        ensemble.measure("smoke", **(SMALL | change))


def test_random_prompts_are_ordinary_tokens_and_differ_from_the_continuation() -> None:
    subject = models.load("smoke")
    rows = texts.prompts(subject, 3, 16, kind="random", seed=2).ids
    assert rows.shape == (3, 16)
    assert not set(rows.flat) & set(subject.tokenizer.all_special_ids)
    assert len({tuple(row) for row in rows}) == 3
    shared = texts.continuations(subject, 1, 16, "random", seed=2).ids
    assert not (rows == shared).all(axis=1).any()
    more = texts.prompts(subject, 5, 16, kind="random", seed=2).ids
    np.testing.assert_array_equal(more[:3], rows)


def test_another_kind_of_prompt_is_refused() -> None:
    with pytest.raises(Refused, match="'shuffled' is unknown; choose text, random"):
        texts.prompts(models.load("smoke"), 2, 4, kind="shuffled")
