"""Sizes of operators: against plain singular values, and against pairs that try to exceed them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_networks import NETWORKS, network
from torch import nn
from transformers.activations import ACT2FN

from nohair.lab import anatomy, operators

every_network = pytest.mark.parametrize("name", NETWORKS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def size(matrix: torch.Tensor) -> float:
    return float(np.linalg.svd(matrix.numpy(), compute_uv=False)[0])


# Matrices


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7), (1, 6), (6, 1)])
def test_norm_is_the_largest_singular_value(shape: tuple[int, int]) -> None:
    stack = random(4, *shape)
    expected = [size(one) for one in stack]
    np.testing.assert_allclose(operators.norm(stack), expected, rtol=1e-12)
    assert float(operators.norm(stack[0])) == pytest.approx(expected[0], rel=1e-12)


def test_norm_of_nothing_is_zero() -> None:
    np.testing.assert_array_equal(operators.norm(torch.zeros(2, 3, 4)), 0)


def test_norm_is_taken_in_double_precision_whatever_the_weights_are_in() -> None:
    weight = random(6, 8).to(torch.bfloat16)
    assert float(operators.norm(weight)) == pytest.approx(size(weight.double()), rel=1e-12)


def test_norm_of_weights_in_training_is_a_plain_number() -> None:
    assert operators.norm(nn.Linear(3, 4).weight) > 0


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_product_norm_is_that_of_the_product_made(heads: int, key_heads: int) -> None:
    """Grouped queries: heads that stand side by side share one value matrix."""
    writer, value = random(heads, 20, 5), random(key_heads, 5, 20, seed=1)
    expected = [size(writer[h] @ value[h * key_heads // heads]) for h in range(heads)]
    np.testing.assert_allclose(operators.product_norm(writer, value), expected, rtol=1e-12)


def test_product_norm_of_heads_wider_than_the_stream() -> None:
    writer, value = random(2, 6, 10), random(2, 10, 6, seed=1)
    expected = [size(writer[h] @ value[h]) for h in range(2)]
    np.testing.assert_allclose(operators.product_norm(writer, value), expected, rtol=1e-12)


def test_longest_row_and_lengths_of_a_bias() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.0, -6.0], [1.0, 1.0]])
    assert operators.largest_row(weight) == 6
    np.testing.assert_allclose(operators.lengths(weight, 3), [5, 6, np.sqrt(2)])
    np.testing.assert_array_equal(operators.lengths(None, 3), [0, 0, 0])


# Norms


def every_norm(model: Any) -> list[nn.Module]:
    found = [norm for named in anatomy.norms(model) for norm in named.values()]
    return [*dict.fromkeys(found), anatomy.final_norm(model)]


def spread(kind: str, x: torch.Tensor) -> torch.Tensor:
    """What the theorem calls r: rms, or deviation."""
    return (x - x.mean(-1, keepdim=True) * (kind == "LayerNorm")).square().mean(-1).sqrt()


@every_network
def test_no_norm_stretches_a_pair_above_the_floor_more_than_it_may(name: str) -> None:
    """Pairs near and far, states of all sizes, among them many at the floor itself."""
    model = network(name, dtype=torch.float64)
    kind = anatomy.describe(model.config).family.norm
    generator = torch.Generator().manual_seed(0)
    for norm in every_norm(model):
        width = len(anatomy.gain(model, norm)[0])
        x = torch.randn(4000, width, generator=generator, dtype=torch.float64)
        step = torch.randn(4000, width, generator=generator, dtype=torch.float64)
        x *= torch.logspace(-3, 1, 4000, dtype=torch.float64)[:, None]
        y = x + step * x.norm(dim=-1, keepdim=True) * torch.logspace(-3, 0, 50).repeat(80)[:, None]
        for floor in (1e-3, 0.03, 1.0):
            # those below are blown up to the floor
            a, b = (z * (floor / spread(kind, z)).clamp(min=1)[:, None] for z in (x, y))
            allowed = operators.lipschitz_of_norm(model, norm, floor)
            stretch = (norm(a) - norm(b)).norm(dim=-1) / (a - b).norm(dim=-1)
            # Gemma's norms compute in float32: near pairs lose digits there
            slack = 1e-3 if name.startswith("gemma") else 1e-9
            assert float(stretch.max()) <= allowed * (1 + slack)
            assert float(stretch.max()) > 0.3 * allowed, "the pairs try too little"


@pytest.mark.parametrize("floor", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "opt"])
def test_bound_of_a_norm_is_reached(name: str, floor: float) -> None:
    """By two states at the floor that differ across themselves, along the largest gain."""
    model = network(name, dtype=torch.float64)
    kind = anatomy.describe(model.config).family.norm
    norm: Any = anatomy.norms(model)[1]["mlp"]
    gain, _, _ = anatomy.gain(model, norm)
    width, first = len(gain), int(gain.abs().argmax())
    along = torch.zeros(width, dtype=torch.float64)
    along[first] = 1
    if kind == "LayerNorm":  # no constant part, which the norm would take away
        norm.weight[:] = gain[first]
        along -= along.mean()
    across = random(width)
    across -= across.mean() * (kind == "LayerNorm")
    across -= across @ along / (along @ along) * along
    across *= floor / spread(kind, across)
    step = 1e-4 * floor * along
    reached = (norm(across + step) - norm(across - step)).norm() / (2 * step).norm()
    assert float(reached) == pytest.approx(
        operators.lipschitz_of_norm(model, norm, floor), rel=1e-6
    )


def test_norm_without_epsilon_has_no_bound_at_zero() -> None:
    for epsilon, bounded in ((0.0, False), (1e-6, True)):
        model = network("llama", rms_norm_eps=epsilon)
        found = operators.lipschitz_of_norm(model, anatomy.final_norm(model), 0.0)
        assert np.isfinite(found) == bounded


@every_network
def test_nothing_that_leaves_a_norm_is_larger_than_it_can_be(name: str) -> None:
    model = network(name, dtype=torch.float64)
    for norm in every_norm(model):
        gain, bias, _ = anatomy.gain(model, norm)
        width = len(gain)
        allowed = operators.largest_output(model, norm, width)
        spikes = 1e3 * torch.cat([torch.eye(width), -torch.eye(width)]).double()
        found = norm(torch.cat([spikes, 1e3 * random(2000, width)])).norm(dim=-1)
        assert float(found.max()) <= allowed * (1 + 1e-6)
        if bias is None:  # a spike on the largest gain, and nothing else
            assert float(found.max()) == pytest.approx(allowed, rel=1e-5)


def test_bias_adds_its_whole_length_to_what_leaves_a_norm() -> None:
    """Reached where the bias points along the state."""
    model = network("gpt2", dtype=torch.float64)
    norm: Any = anatomy.norms(model)[0]["attention"]
    signs = torch.tensor([1.0, -1.0] * 16, dtype=torch.float64)
    norm.weight[:], norm.bias[:] = 2, 3 * signs
    allowed = operators.largest_output(model, norm, 32)
    assert allowed == pytest.approx(np.sqrt(32) * 5)
    assert float(norm(1e3 * signs).norm()) == pytest.approx(allowed, rel=1e-6)


# Activations and MLPs


@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("relu", 1.0),
        ("gelu", 1.12890),  # at sqrt(2): Phi(sqrt 2) + sqrt 2 phi(sqrt 2)
        ("gelu_new", 1.12901),
        ("gelu_pytorch_tanh", 1.12901),
        ("silu", 1.09984),
    ],
)
def test_steepest_slopes_of_the_activations(name: str, slope: float) -> None:
    steepest, largest = operators.activation_range(ACT2FN[name], -10, 10)
    assert steepest == pytest.approx(slope, abs=2e-4)
    assert steepest >= slope - 1e-5
    assert largest == pytest.approx(10, rel=1e-3)


def test_steepest_slope_of_gelu_is_where_calculus_puts_it() -> None:
    at = np.sqrt(2)
    x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    ACT2FN["gelu"](x).sum().backward()
    assert x.grad is not None
    assert operators.activation_range(ACT2FN["gelu"], 0, 2)[0] == pytest.approx(
        float(x.grad), rel=2e-4
    )


@pytest.mark.parametrize("name", ["gelu", "silu", "gelu_new", "relu"])
@pytest.mark.parametrize("reach", [1.0, 30.0, 1000.0, 20000.0])
def test_no_slope_within_the_range_is_steeper_however_wide_it_is(name: str, reach: float) -> None:
    """Trained networks have pre-activations in the thousands; a bump may not be stepped over."""
    steepest, largest = operators.activation_range(ACT2FN[name], -reach, 0.7 * reach)
    x = torch.linspace(-min(reach, 8), 0.7 * min(reach, 8), 400_001, dtype=torch.float64)
    y = ACT2FN[name](x)
    assert steepest >= float((y.diff() / x.diff()).abs().max()) * (1 - 1e-9)
    assert largest >= float(y.abs().max()) * (1 - 1e-6)


def test_slope_and_size_are_those_of_the_range_alone() -> None:
    steepest, largest = operators.activation_range(ACT2FN["gelu"], -3.0, -2.0)
    assert steepest < 0.1
    assert largest == pytest.approx(0.0455, abs=1e-3)
    assert operators.activation_range(ACT2FN["relu"], -3.0, -2.0) == (0, 0)


def mlp(family: anatomy.Family, block: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a block's MLP writes, and what its readers read."""
    read = [block.get_submodule(path)(x) for path in family.readers]
    hidden = block.get_submodule(family.activation)(read[0])
    hidden = hidden * read[1] if len(read) == 2 else hidden
    return block.get_submodule(family.residual_writers[1])(hidden), *read


@every_network
def test_no_mlp_stretches_a_pair_more_than_it_may(name: str) -> None:
    """Both of a pair within what was seen; along random directions and the steepest one."""
    model = network(name, dtype=torch.float64)
    family = anatomy.describe(model.config).family
    for layer, block in enumerate(anatomy.blocks(model)):
        for scale in (0.1, 1.0, 4.0):
            x = scale * random(1500, 32, seed=layer)
            steep = torch.linalg.svd(anatomy.matrix(block.get_submodule(family.readers[0]))).Vh[0]
            step = random(1500, 32, seed=7)
            step[::2] = steep
            y = x + 0.01 * scale * step
            (ours, *read), (others, *others_read) = (mlp(family, block, z) for z in (x, y))
            both = torch.cat([read[0], others_read[0]])
            up = 0.0 if len(read) == 1 else float(torch.cat([read[1], others_read[1]]).abs().max())
            allowed = operators.lipschitz_of_mlp(
                family, block, float(both.min()), float(both.max()), up
            )
            stretch = (ours - others).norm(dim=-1) / (x - y).norm(dim=-1)
            assert float(stretch.max()) <= allowed
            assert float(stretch.max()) > 0.01 * allowed, "the pairs try too little"


def plant(block: Any, family: anatomy.Family, *matrices: torch.Tensor) -> None:
    """Put matrices (out, in) into the readers and the writer of an MLP, and no bias."""
    for path, matrix in zip((*family.readers, family.residual_writers[1]), matrices, strict=True):
        module = block.get_submodule(path)
        anatomy.matrix(module)[:] = matrix
        if module.bias is not None:
            module.bias.zero_()


def test_bound_of_a_plain_mlp_is_reached() -> None:
    """ReLU with both its matrices largest along one axis, where it is open."""
    model = network("opt", dtype=torch.float64)
    family, block = anatomy.FAMILIES["opt"], anatomy.blocks(model)[0]
    read, write = torch.zeros(64, 32), torch.zeros(32, 64)
    read[0, 0], read[1, 1], write[0, 0] = 3, 2, 5
    plant(block, family, read, write)
    x, y = torch.zeros(2, 32, dtype=torch.float64)
    x[0], y[0] = 1, 2
    moved = float((mlp(family, block, x)[0] - mlp(family, block, y)[0]).norm())
    allowed = operators.lipschitz_of_mlp(family, block, 0.0, 6.0, 0.0)
    assert moved == pytest.approx(15)
    assert allowed == pytest.approx(15, rel=2e-4)


def test_steepest_slope_counts_in_a_plain_mlp() -> None:
    """GELU at sqrt(2), where it rises faster than its input; and on a range that leaves it out."""
    model = network("gpt2", dtype=torch.float64)
    family, block = anatomy.FAMILIES["gpt2"], anatomy.blocks(model)[0]
    read, write = torch.zeros(128, 32), torch.zeros(32, 128)
    read[0, 0], write[0, 0] = 3, 5
    plant(block, family, read, write)
    x, y = torch.zeros(2, 32, dtype=torch.float64)
    x[0], y[0] = (np.sqrt(2) - 1e-4) / 3, (np.sqrt(2) + 1e-4) / 3
    moved = float((mlp(family, block, x)[0] - mlp(family, block, y)[0]).norm() / (x - y).norm())
    assert moved == pytest.approx(15 * 1.129, rel=1e-3)
    assert operators.lipschitz_of_mlp(family, block, 0.0, 3.0, 0.0) == pytest.approx(
        moved, rel=1e-3
    )
    assert operators.lipschitz_of_mlp(family, block, -9.0, -3.0, 0.0) < 0.02 * moved


def test_bound_of_a_gated_mlp_is_reached() -> None:
    """Gate far open, where SiLU is a line of slope one; both factors move together."""
    model = network("llama", dtype=torch.float64)
    family, block = anatomy.FAMILIES["llama"], anatomy.blocks(model)[0]
    gate, up, down = torch.zeros(48, 32), torch.zeros(48, 32), torch.zeros(32, 48)
    gate[0, 0], up[0, 0], down[0, 0] = 2, 3, 5
    plant(block, family, gate, up, down)
    x, y = torch.zeros(2, 32, dtype=torch.float64)
    x[0], y[0] = 50, 50.001
    moved = float((mlp(family, block, x)[0] - mlp(family, block, y)[0]).norm()) / 0.001
    # d/dx of 5 (2x)(3x) at 50; gate up to 100, its partner up to 150
    allowed = operators.lipschitz_of_mlp(family, block, 99.0, 100.002, 150.003)
    assert moved == pytest.approx(5 * 2 * 3 * 2 * 50, rel=1e-4)
    assert allowed == pytest.approx(moved, rel=1e-3)


def test_sides_of_a_gated_mlp_count_each_by_itself() -> None:
    """Gate alone, with its partner held; and the partner alone, with the gate held."""
    model = network("llama", dtype=torch.float64)
    family, block = anatomy.FAMILIES["llama"], anatomy.blocks(model)[0]
    one, none, down = torch.zeros(48, 32), torch.zeros(48, 32), torch.zeros(32, 48)
    one[0, 0], down[0, 0] = 2, 5
    plant(block, family, one, none, down)
    assert operators.lipschitz_of_mlp(family, block, 50, 60, 7) == pytest.approx(70, rel=1e-3)
    plant(block, family, none, one, down)
    assert operators.lipschitz_of_mlp(family, block, 50, 60, 7) == pytest.approx(600, rel=1e-3)
