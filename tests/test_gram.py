"""Covariances carried through random blocks: worked cases, explicit sums, and linear nets."""

from __future__ import annotations

import json
from fractions import Fraction
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nohair.theory import gram, untrained
from nohair.theory.gram import ALIKE, APART, Block, Cells, propagate
from nohair.theory.kernels import kernel

pytestmark = pytest.mark.filterwarnings("error")

Array = NDArray[np.float64]

# Worked out in rational arithmetic or to twelve digits, independently of the code; see test_relay.
VALUES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("theory_values.json").read_text("utf8")
)
FINE = pytest.mark.parametrize("fine", [True, False])


def each(kind: str) -> Any:
    """One test per value of this kind in the file."""
    found = [value for value in VALUES if value["kind"] == kind]
    names = ["-".join(str(v.get(k)) for k in ("case", "preset", "s2") if k in v) for v in found]
    return pytest.mark.parametrize("value", found, ids=names)


def block_of(value: dict[str, Any]) -> Block:
    """The block that a worked case describes."""

    def number(name: str) -> float:
        return float(Fraction(str(value[name])))

    activation = {"lin": "linear"}.get(value["activation"], value["activation"])
    return Block(
        attention=number("A2"),
        mlp=number("B2"),
        hidden=lambda u: kernel(activation, number("preact_var"), u),
        logit=number("s2"),
        parallel=value["residual"] == "parallel",
        epsilon=number("eps"),
    )


def two_prompts(cells: Cells, embedding: float, position: float) -> list[Array]:
    """Covariances of one run and across two, no token twice but in the shared text."""
    own = np.full(len(cells.sizes), embedding + position)
    return [
        cells.covariance(0.0, own),
        cells.covariance(0.0, np.where(cells.prompt, position, own)),
    ]


def linear(u: Array) -> Array:
    return u


@FINE
@each("gram")
def test_worked_cases(value: dict[str, Any], fine: bool) -> None:
    """Twelve digits of D² and of the variance of the last position, after every layer.

    Cells are of one position each up to 40, so the grid is exact here.
    """
    cells = Cells(value["P"], value["T"], fine=fine)
    start = [float(Fraction(value[name])) for name in ("sigma_e2", "sigma_p2")]
    layers = propagate(block_of(value), value["L"], cells, two_prompts(cells, *start))
    for layer, expected in value["D2_over_d"].items():
        t = np.array(list(map(int, expected)))
        found = next(layers)[~cells.prompt][t - 1]
        np.testing.assert_allclose(found, list(map(float, expected.values())), rtol=5e-12)
        # what it carries from block to block, seen where it rests
        run = layers.gi_frame.f_locals["grams"][0]  # type: ignore[attr-defined]
        assert run[-1][-1] == pytest.approx(float(value["sigma2_last"][layer]), rel=5e-12)
    assert next(layers, None) is None


@each("gram_alpha")
def test_worked_exponents(value: dict[str, Any]) -> None:
    """On the points that they were found with; six digits."""
    cells = Cells(value["P"], value["T"], fine=True)
    start = two_prompts(cells, value["sigma_e2"], value["sigma_p2"])
    first, last = value["window"]
    t = np.unique(np.geomspace(first, last, 49).round()).astype(int)
    layers = propagate(block_of(value), len(value["alpha"]), cells, start)
    for square, alpha in zip(layers, value["alpha"].values(), strict=True):
        curve = square[~cells.prompt][t - 1]
        found = -np.polyfit(np.log(t), np.log(curve) / 2, 1)[0]
        assert found == pytest.approx(alpha, abs=6e-7)


# Cells


@pytest.mark.parametrize(("prompt_tokens", "horizon"), [(1, 1), (8, 40), (39, 41), (300, 5000)])
def test_cells_cover_every_position(prompt_tokens: int, horizon: int) -> None:
    fine = Cells(prompt_tokens, horizon, fine=True)
    assert fine.sizes.tolist() == [1] * (prompt_tokens + horizon)
    assert fine.middle.tolist() == list(range(1, prompt_tokens + horizon + 1))
    assert fine.prompt.sum() == prompt_tokens
    cells = Cells(prompt_tokens, horizon, fine=False)
    prompt, text = cells.sizes[cells.prompt], cells.sizes[~cells.prompt]
    assert prompt.sum() == prompt_tokens
    # the continuation ends where a middle has passed the horizon, and not a cell later
    middle = cells.middle[~cells.prompt] - prompt_tokens
    assert middle[-1] >= horizon
    assert len(middle) == 1 or middle[-2] < horizon
    for sizes in (prompt, text):
        assert (sizes[:40] == 1).all()
        done = np.cumsum(sizes) - sizes
        assert (sizes <= np.maximum(1, 0.04 * done)).all()
    edges = np.concatenate([[0], np.cumsum(cells.sizes)])
    np.testing.assert_allclose(cells.middle, (edges[:-1] + edges[1:] + 1) / 2)


def test_cells_reach_far_with_few() -> None:
    assert len(Cells(1000, 10**9, fine=False).sizes) < 650


def test_mean_of_single_positions_is_the_product_of_matrices() -> None:
    cells = Cells(4, 9, fine=True)
    raw = np.random.default_rng(0).standard_normal((13, 13))
    matrix = raw @ raw.T
    own = np.random.default_rng(1).exponential(size=13)
    average = np.tril(np.ones((13, 13))) / np.arange(1, 14)[:, None]
    full = matrix.copy()
    np.fill_diagonal(full, own)
    given = np.concatenate([matrix, own[None]])
    found = cells.mean(given)
    expected = average @ full @ average.T
    np.testing.assert_allclose(found[:-1], expected, rtol=1e-12)
    np.testing.assert_allclose(found[-1], expected.diagonal(), rtol=1e-12)


def test_mean_over_cells_is_exact_for_what_is_constant_in_them() -> None:
    """Position by position, read at the middles of cells of odd size."""
    cells = Cells(5, 200, fine=False)
    count, sizes = len(cells.sizes), cells.sizes.astype(int)
    assert sizes.max() >= 7
    rng = np.random.default_rng(2)
    raw = rng.standard_normal((count, count))
    matrix, own = raw @ raw.T, rng.exponential(size=count)
    where = np.repeat(np.arange(count), sizes)
    full = matrix[np.ix_(where, where)]
    np.fill_diagonal(full, own[where])
    average = np.tril(np.ones_like(full)) / np.arange(1, len(full) + 1)[:, None]
    expected = average @ full @ average.T
    odd = np.flatnonzero(sizes % 2)
    at = cells.middle[odd].astype(int) - 1
    found = cells.mean(np.concatenate([matrix, own[None]]))
    np.testing.assert_allclose(
        found[np.ix_(odd, odd)], expected[np.ix_(at, at)], rtol=1e-11, atol=1e-13
    )
    np.testing.assert_allclose(found[-1][odd], expected[at, at], rtol=1e-11)


def test_covariance_is_a_matrix_and_its_diagonal() -> None:
    cells = Cells(2, 3, fine=True)
    own = np.arange(5.0)
    found = cells.covariance(0.25, own)
    assert found.shape == (6, 5)
    assert (found[:-1] == 0.25).all()
    assert (found[-1] == own).all()


@pytest.mark.parametrize("name", ["gpt2", "neox", "qwen3", "gemma2"])
def test_grid_against_all_positions(name: str) -> None:
    """Exponents within .0005 and distances within 0.6 %, as the docstring has it."""
    init = untrained.named(name, 512)
    t = np.unique(np.geomspace(16, 800, 49).round())
    full = untrained.distance(init, 4, 50, t, form="full", collisions=0.001)
    grid = untrained.distance(init, 4, 50, t, form="grid", collisions=0.001)
    np.testing.assert_allclose(grid, full, rtol=0.006)
    slopes = [-np.polyfit(np.log(t), np.log(curve).T, 1)[0] for curve in (full, grid)]
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=0, atol=5e-4)


# What a block does


@pytest.mark.parametrize("gain", [0.3, 1.5])
@pytest.mark.parametrize("parallel", [False, True])
def test_linear_net_without_norms_is_the_incoherent_relay(gain: float, parallel: bool) -> None:
    """An epsilon that dwarfs every variance makes the norms one constant, and the net linear.

    Attention alone; then with a linear MLP that multiplies every covariance by 1 + b.
    """
    huge, layers = 1e12, 4
    cells = Cells(6, 25, fine=True)
    expected = 2 * untrained.incoherent(25, layers, 6, gain) ** 2
    alone = Block(gain**2 * huge, 0.0, linear, parallel=parallel, epsilon=huge)
    found = list(propagate(alone, layers, cells, two_prompts(cells, 1.0, 0.5)))
    np.testing.assert_allclose([one[~cells.prompt] for one in found], expected, rtol=1e-10)
    if not parallel:
        both = Block(gain**2 * huge, 0.7 * huge, linear, epsilon=huge)
        found = list(propagate(both, layers, cells, two_prompts(cells, 1.0, 0.5)))
        grown = expected * 1.7 ** np.arange(1, layers + 1)[:, None]
        np.testing.assert_allclose(
            [one[~cells.prompt] for one in found], grown, rtol=1e-9
        )  # covariances of 700 beside 1e12


def test_linear_net_against_draws() -> None:
    """Attention and a linear MLP with weights drawn at random: within four standard errors."""
    rng = np.random.default_rng(0)
    width, prompt_tokens, horizon, draws, huge = 48, 4, 12, 400, 1e12
    length = prompt_tokens + horizon
    average = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    squares = np.empty((draws, 3, horizon))
    for draw in range(draws):
        text = rng.standard_normal((horizon, width))
        runs = [np.concatenate([rng.standard_normal((prompt_tokens, width)), text]) for _ in "ab"]
        for layer in range(3):
            w, up, down = rng.standard_normal((3, width, width)) / np.sqrt(width)
            for i, x in enumerate(runs):
                read = x + 0.8 * average @ x @ w
                runs[i] = read + 0.5 * read @ up @ down
            gap = (runs[0] - runs[1])[prompt_tokens:]
            squares[draw, layer] = (gap**2).sum(axis=1) / width
    cells = Cells(prompt_tokens, horizon, fine=True)
    block = Block(0.64 * huge, 0.25 * huge, linear, epsilon=huge)
    expected = list(propagate(block, 3, cells, two_prompts(cells, 1.0, 0.0)))
    error = squares.std(axis=0) / np.sqrt(draws)
    gap = squares.mean(axis=0) - [one[prompt_tokens:] for one in expected]
    assert (np.abs(gap) < 4 * error).all()
    assert (error < 0.05 * squares.mean(axis=0)).all()  # so that four of them say something


@pytest.mark.parametrize("logit", [0.01, 0.2, 0.25])
@pytest.mark.parametrize("common", [0.0, 0.3])
def test_softmax_concentrates_attention(logit: float, common: float) -> None:
    """Keys alike but for themselves: weights e^x of independent logits x, and sum of squares e^v/n.

    With correlation c of the keys, v = s²(1 - c), and the average's variance is
    c + (1 - c) e^v / n up to terms of order 1/n²; the series stops at s⁴ and leaves out c s⁴/2.
    """
    cells = Cells(1, 3000, fine=False)
    u = cells.covariance(common, np.ones(len(cells.sizes)))
    even, found = (gram._attended(u, cells, s)[-1][-1] for s in (0.0, logit))
    n, spread = cells.middle[-1], logit * (1 - common)
    expected = (1 - common) * (exp(spread) - 1) / n
    left_out = common * spread**2 / 2 / n + spread**3 / 6 / n
    assert even == pytest.approx(common + (1 - common) / n, rel=1e-12)
    assert found - even == pytest.approx(expected, rel=3e-3, abs=1.25 * left_out)


def test_large_logits_take_more_terms() -> None:
    """With independent keys and s² = 1 (normalised queries and keys) the sum is e, to 8 terms."""
    cells = Cells(1, 3000, fine=False)
    u = cells.covariance(0.0, np.ones(len(cells.sizes)))
    found = gram._attended(u, cells, 1.0)[-1][-1] * cells.middle[-1]
    assert found == pytest.approx(exp(1), rel=1e-3)


def test_attention_of_early_positions_is_written_out() -> None:
    """The double sum of the docstring, entry by entry, for a matrix of no symmetry but its own."""
    cells, s = Cells(2, 4, fine=True), 0.2
    raw = np.random.default_rng(4).standard_normal((6, 9))
    raw /= np.linalg.norm(raw, axis=1, keepdims=True)
    u = raw @ raw.T
    average = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    b = average @ u @ average.T
    expected = b + s * u * (average @ u**2 @ average.T - b * b)
    cubes = average @ u**3 @ average.T - 2 * b * (average @ u**2 @ average.T) + b**3
    expected += s**2 / 2 * u**2 * cubes
    found = gram._attended(np.concatenate([u, u.diagonal()[None]]), cells, s)
    np.testing.assert_allclose(found[:-1], expected, rtol=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_post_norm_fixes_what_each_part_adds(epsilon: float) -> None:
    """To one, less epsilon; the size of the weights drops out where epsilon is zero."""
    cells = Cells(3, 10, fine=True)
    relu = lambda u: kernel("relu", 1.0, u)  # noqa: E731
    block = Block(0.5, 2.0, relu, post_norm=True, epsilon=epsilon)
    layers = propagate(block, 3, cells, two_prompts(cells, 1.0, 0.0))
    found = []
    for layer, square in enumerate(layers, 1):
        run = layers.gi_frame.f_locals["grams"][0]  # type: ignore[attr-defined]
        if not epsilon:
            np.testing.assert_allclose(run[-1], 1 + 2 * layer, rtol=1e-12)
        else:
            assert (run[-1] < 1 + 2 * layer).all()
        found.append(square)
    if not epsilon:
        other = Block(7.0, 0.1, relu, post_norm=True)
        again = list(propagate(other, 3, cells, two_prompts(cells, 1.0, 0.0)))
        np.testing.assert_allclose(again, found, rtol=1e-12)
    # the first position reads itself alone: its attention adds 0.5 k, normalised
    first = Block(0.5, 0.0, relu, post_norm=False, epsilon=epsilon)
    only = propagate(first, 1, cells, two_prompts(cells, 1.0, 0.0))
    next(only)
    run = only.gi_frame.f_locals["grams"][0]  # type: ignore[attr-defined]
    assert run[-1][0] == pytest.approx(1 + 0.5 / (1 + epsilon), rel=1e-12)


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_two_runs_apart_are_the_two_runs_alike(post_norm: bool, parallel: bool) -> None:
    """Where both have the same covariance within; and the order of the runs does not matter."""
    cells = Cells(4, 12, fine=True)
    block = Block(
        0.5,
        1.0,
        lambda u: kernel("gelu", 0.5, u),
        logit=0.1,
        parallel=parallel,
        post_norm=post_norm,
        epsilon=0.01,
    )
    within, across = two_prompts(cells, 1.0, 0.2)
    alike = list(propagate(block, 3, cells, [within, across], ALIKE))
    apart = list(propagate(block, 3, cells, [within, within, across], APART))
    np.testing.assert_allclose(apart, alike, rtol=1e-12)
    other = cells.covariance(0.1, within[-1])
    one = list(propagate(block, 3, cells, [within, other, across], APART))
    two = list(propagate(block, 3, cells, [other, within, across], APART))
    np.testing.assert_allclose(one, two, rtol=1e-9)
    assert not np.allclose(one, alike, rtol=1e-3)


def test_equal_prompts_leave_no_distance() -> None:
    cells = Cells(4, 12, fine=True)
    block = Block(0.5, 1.0, lambda u: kernel("silu", 0.5, u), logit=0.1)
    within = two_prompts(cells, 1.0, 0.2)[0]
    for square in propagate(block, 3, cells, [within, within]):
        np.testing.assert_allclose(square, 0, atol=1e-14)


def test_first_layer_without_mlp_is_worked_on_paper() -> None:
    """D²/d = 2 A² times P/n² of what the norms leave, 1/(1 + epsilon)."""
    cells = Cells(5, 30, fine=True)
    block = Block(0.7, 0.0, linear, epsilon=0.25)
    found = next(propagate(block, 1, cells, two_prompts(cells, 1.0, 0.0)))[5:]
    n = 5 + np.arange(1, 31)
    np.testing.assert_allclose(found, 2 * 0.7 / 1.25 * 5 / n**2, rtol=1e-11)


law = settings(deadline=None, derandomize=True, max_examples=25)
sizes = st.floats(0.05, 2)


@law
@given(sizes, sizes, st.floats(0, 0.2), st.booleans(), st.booleans(), st.integers(1, 5))
def test_distances_are_positive_and_scale_with_the_states(
    attention: float, mlp: float, logit: float, parallel: bool, post_norm: bool, layers: int
) -> None:
    """Without epsilon norms see no scale: D² of states c times as large grows by what they are."""
    cells = Cells(3, 8, fine=True)
    block = Block(
        attention,
        mlp,
        lambda u: kernel("relu", 1.0, u),
        logit=logit,
        parallel=parallel,
        post_norm=post_norm,
    )
    found = np.array(list(propagate(block, layers, cells, two_prompts(cells, 1.0, 0.3))))
    assert (found[:, 3:] > 0).all()
    assert np.isfinite(found).all()
    if not post_norm:
        larger = Block(4 * attention, 4 * mlp, block.hidden, logit=logit, parallel=parallel)
        again = np.array(list(propagate(larger, layers, cells, two_prompts(cells, 4.0, 1.2))))
        np.testing.assert_allclose(again, 4 * found, rtol=1e-9)
