"""Untrained counterparts: what they are drawn from, and what they keep."""

from __future__ import annotations

from copy import deepcopy
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from tiny_networks import NETWORKS, config, network
from torch import nn
from transformers.pytorch_utils import Conv1D

from nohair.errors import Refused
from nohair.lab import anatomy, twins

WIDTH, LAYERS = 32, 3

# (of every matrix, of the two that write into the residual stream), as the families published it
PUBLISHED = {
    "gpt2": (0.02, 0.02 / sqrt(2 * LAYERS)),
    "gpt_neox": (sqrt(2 / (5 * WIDTH)), 2 / (LAYERS * sqrt(WIDTH))),
    "opt": (0.006, 0.006 / sqrt(2 * LAYERS)),
}
FLAT = (0.02, 0.02)

every_network = pytest.mark.parametrize("name", NETWORKS)


def fresh(name: str, twin: str = "init", seed: int = 0, **changes: Any) -> Any:
    return twins.fresh(config(name, **changes), twin, seed, torch.float32)


def matrices(model: Any) -> dict[str, torch.Tensor]:
    kinds = (nn.Linear, Conv1D, nn.Embedding)
    return {p: m.weight.detach() for p, m in model.named_modules() if isinstance(m, kinds)}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {path: value.detach().clone() for path, value in model.named_parameters()}


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@every_network
def test_init_draws_every_matrix_as_its_family_published(name: str) -> None:
    std, residual_std = PUBLISHED.get(name.split()[0], FLAT)
    model = fresh(name)
    writers = anatomy.describe(model.config).family.residual_writers
    seen = 0
    for path, weight in matrices(model).items():
        writes = path.endswith(writers)
        seen += writes
        expected = residual_std if writes else std
        n = weight.numel()
        # of n normal draws, the standard deviation is known to std / sqrt(2n) and the mean to
        # std / sqrt(n): five of each, and chance fails once in a million
        assert abs(float(weight.std()) - expected) < 5 * expected / sqrt(2 * n), path
        assert abs(float(weight.mean())) < 5 * expected / sqrt(n), path
    assert seen == 2 * LAYERS


def test_published_recipes_follow_depth_and_width() -> None:
    wide = fresh("gpt_neox", hidden_size=64, num_hidden_layers=6)
    writer, reader = (
        matrices(wide)[f"gpt_neox.layers.5.mlp.{path}"]
        for path in ("dense_4h_to_h", "dense_h_to_4h")
    )
    assert float(writer.std()) == pytest.approx(2 / (6 * 8), rel=0.05)  # 4,096 draws: 1 % is a std
    assert float(reader.std()) == pytest.approx(sqrt(2 / 320), rel=0.05)
    deep = fresh("gpt2", num_hidden_layers=8)
    writer = matrices(deep)["transformer.h.7.mlp.c_proj"]
    assert float(writer.std()) == pytest.approx(0.005, rel=0.05)


@pytest.mark.parametrize("twin", ["init", "config"])
@every_network
def test_norms_start_at_one_and_biases_at_zero(name: str, twin: str) -> None:
    model = fresh(name, twin)
    shape = anatomy.describe(model.config)
    for path, value in model.named_parameters():
        if path.endswith("bias"):
            assert not value.any(), path
    states = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    if shape.family.norm == "LayerNorm":
        states = states - states.mean(dim=-1, keepdim=True)
    expected = states / states.square().mean(dim=-1, keepdim=True).sqrt()
    first = anatomy.blocks(model)[0]
    for norm in [*map(first.get_submodule, shape.family.norms), anatomy.final_norm(model)]:
        # the norms' epsilon, up to 1e-5 beside a mean square near one
        torch.testing.assert_close(norm(states), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("twin", ["init", "config"])
def test_seed_decides_the_weights_and_nothing_else_does(twin: str) -> None:
    torch.manual_seed(123)
    one = fresh("llama", twin, seed=1)
    torch.manual_seed(321)
    again = fresh("llama", twin, seed=1)
    other = fresh("llama", twin, seed=2)
    assert same(one, again)
    assert not any(
        torch.equal(a, b)
        for a, b in zip(matrices(one).values(), matrices(other).values(), strict=True)
    )


@pytest.mark.parametrize("twin", ["init", "config"])
def test_global_random_state_is_left_alone(twin: str) -> None:
    before = torch.random.get_rng_state()
    fresh("gpt2", twin)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_config_twin_follows_the_range_of_the_configuration() -> None:
    model = fresh("llama", "config", initializer_range=0.1)
    assert float(matrices(model)["model.layers.0.mlp.up_proj"].std()) == pytest.approx(0.1, rel=0.1)


def test_given_configuration_is_neither_changed_nor_shared() -> None:
    given = config("llama")
    given.quantization_config = {"quant_method": "gguf"}
    before = deepcopy(given.to_dict())
    one = twins.fresh(given, "init", 0, torch.float32)
    other = twins.fresh(given, "init", 1, torch.float32)
    assert given.to_dict() == before
    assert one.config is not other.config
    setting = other.config._attn_implementation
    one.set_attn_implementation("eager")
    assert other.config._attn_implementation == setting != "eager"


def test_weights_have_the_type_asked_for() -> None:
    exact = fresh("llama")
    half = twins.fresh(config("llama"), "init", 0, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    for a, b in zip(exact.parameters(), half.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


@every_network
def test_permuted_keeps_entries_and_vectors_and_loses_their_order(name: str) -> None:
    model = network(name)
    before = weights(model)
    twins.permute(model, seed=0)
    for path, value in weights(model).items():
        if value.ndim < 2:
            assert torch.equal(value, before[path]), path
            continue
        assert torch.equal(value.flatten().sort().values, before[path].flatten().sort().values)
        # a shuffled entry keeps its value with a chance of about 1 / 1000
        assert (value == before[path]).float().mean() < 0.05, path
        assert abs(np.corrcoef(value.flatten(), before[path].flatten())[0, 1]) < 0.15, path


@every_network
def test_permuted_is_decided_by_its_seed(name: str) -> None:
    one, again, other = network(name), network(name), network(name)
    state = torch.random.get_rng_state()
    twins.permute(one, seed=3)
    twins.permute(again, seed=3)
    twins.permute(other, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same(one, again)
    assert not same(one, other)


@pytest.mark.parametrize("name", ["gpt2", "llama tied", "gemma2", "opt"])
def test_tied_weights_stay_tied(name: str) -> None:
    permuted = network(name)
    assert permuted.config.tie_word_embeddings
    twins.permute(permuted, seed=0)
    for model in (permuted, fresh(name), fresh(name, "config")):
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert head.data_ptr() == table.data_ptr()


@pytest.mark.parametrize("twin", ["untrained", "", "INIT"])
def test_unknown_twin_is_refused(twin: str) -> None:
    with pytest.raises(Refused, match=f"'{twin}' does not exist; choose init, config, permuted"):
        twins.check(twin)
    twins.check(None)
