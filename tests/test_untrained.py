"""Untrained networks predicted from their variances: against real weights, nets and draws."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from inspect import signature
from math import inf, nan, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from refusals import refusal
from test_kernels import FUNCTIONS
from tiny_networks import texts, wrap
from transformers import AutoConfig

from nohair.lab import anatomy, distances, twins
from nohair.theory import untrained
from nohair.theory.kernels import kernel
from nohair.theory.untrained import INITIALISATIONS, Initialisation, named

Array = NDArray[np.float64]

# Worked out by hand or in rational arithmetic, independently of the code; see test_relay.
VALUES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("theory_values.json").read_text("utf8")
)


def each(kind: str) -> Any:
    """One test per value of this kind in the file."""
    found = [value for value in VALUES if value["kind"] == kind]
    return pytest.mark.parametrize("value", found)


def on_49_points(curves: Array, last: int) -> Array:
    """Least squares over [16, last] of each curve (…, t), as the worked exponents."""
    t = np.unique(np.geomspace(16, last, 49).round()).astype(int)
    return np.asarray(-np.polyfit(np.log(t), np.log(curves[..., t - 1]).T, 1)[0])


# Real networks: narrow enough for a second each, wide enough for the theory


WIDTH, LAYERS, VOCABULARY = 256, 4, 2000
P, T, PROMPTS, SEEDS = 8, 512, 6, 6
GATED: dict[str, Any] = {
    "intermediate_size": 3 * WIDTH,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // 2,  # so that heads times their width is twice the width
}
GEMMA: dict[str, Any] = {
    **GATED,
    "layer_types": ["full_attention"] * LAYERS,
    "query_pre_attn_scalar": WIDTH // 2,
}
NEOX: dict[str, Any] = {"intermediate_size": 4 * WIDTH, "use_parallel_residual": True}
# The theory's name, then transformers' name, the kind of twin, and its shape
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "init", {}),
    "neox": ("gpt_neox", "init", NEOX),
    "neox-config": ("gpt_neox", "config", NEOX),
    "llama": ("llama", "init", GATED),
    "mistral": ("mistral", "init", GATED | {"sliding_window": None}),
    "qwen3": ("qwen3", "init", GATED),
    "gemma2": ("gemma2", "init", GEMMA),
    "gemma3": ("gemma3_text", "init", GEMMA),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def network(name: str, seed: int, twin: str | None = None) -> Any:
    """A twin as the lab makes it."""
    family, usual, shape = NETWORKS[name]
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=P + T,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        **shape,
    )
    model = twins.fresh(config, twin or usual, seed, torch.float32)
    return model.eval().requires_grad_(False)


def predicted(name: str) -> Initialisation:
    """What the theory says of it."""
    wide = "head_dim" in NETWORKS[name][2]
    sizes = {"mlp_width": 3 * WIDTH, "value_width": 2 * WIDTH} if wide else {}
    return named(name, WIDTH, **sizes)


def assert_drawn_with(weights: list[torch.Tensor], variance: float) -> None:
    """Four standard errors of the variance of n normal numbers, sqrt(2/n), and the mean's."""
    values = np.concatenate([np.asarray(w, float).ravel() for w in weights])
    error = sqrt(2 / values.size)
    assert values.var() / variance == pytest.approx(1, abs=4 * error)
    assert abs(values.mean()) < 4 * sqrt(variance / values.size)


CASES = [(name, NETWORKS[name][1]) for name in NETWORKS]
# what transformers itself draws is the same, for all but GPT-NeoX
CASES += [(name, "config") for name in NETWORKS if not name.startswith("neox")]


@pytest.mark.parametrize(("name", "twin"), CASES)
def test_variances_are_those_of_the_weights(name: str, twin: str) -> None:
    model, init = network(name, 3, twin), predicted(name)
    family = anatomy.describe(model.config).family
    heads = anatomy.projections(model)
    for read in range(3):
        assert_drawn_with([one[read].weight for one in heads], init.std**2)
    assert all(one[i].bias is None or not one[i].bias.any() for one in heads for i in range(3))
    blocks = anatomy.blocks(model)
    written: list[list[torch.Tensor]] = [
        [anatomy.matrix(block.get_submodule(path)) for block in blocks]
        for path in family.residual_writers
    ]
    assert_drawn_with([one[3] for one in heads], init.writing(LAYERS))
    for matrices in written:
        assert_drawn_with(matrices, init.writing(LAYERS))
    for path in family.readers:
        readers = [anatomy.matrix(block.get_submodule(path)) for block in blocks]
        assert_drawn_with(readers, init.std**2)
        assert readers[0].shape == (init.mlp_width, init.width)
    assert written[0][0].shape == (init.width, init.value_width)
    assert written[1][0].shape == (init.width, init.mlp_width)


@every_network
def test_states_begin_with_the_variance_of_embedding_and_position(name: str) -> None:
    """As the first block reads them, whatever the code multiplies and adds before."""
    model, init = network(name, 4), predicted(name)
    ids = torch.arange(400)[None]
    first = model.base_model(ids, output_hidden_states=True).hidden_states[0]
    assert_drawn_with([first], init.embedding + init.position)
    # one token, twice: what differs between its places is the positions alone
    twice = model.base_model(torch.full((1, 400), 7), output_hidden_states=True).hidden_states[0][0]
    if init.positions:
        assert_drawn_with([(twice[::2] - twice[1::2])], 2 * init.position)
    else:
        assert (twice == twice[0]).all()


@every_network
def test_parts_are_those_of_the_code(name: str) -> None:
    """Activation, gate, norms and residual, read off the model that transformers builds."""
    model, init = network(name, 0), predicted(name)
    shape = anatomy.describe(model.config)
    z = np.linspace(-4, 4, 101)
    for block in anatomy.blocks(model):
        activation = block.get_submodule(shape.family.activation)(torch.from_numpy(z))
        np.testing.assert_allclose(activation, FUNCTIONS[init.activation](z), atol=1e-12)
    assert init.gated == (len(shape.family.readers) == 2)
    assert init.parallel == shape.parallel
    assert init.query_key_norm == shape.qk_norm
    assert init.post_norm == (shape.family.placement == "sandwich")
    for norms in anatomy.norms(model):
        for norm in norms.values():
            gain, shift, epsilon = anatomy.gain(model, norm)
            assert (gain == 1).all()
            assert shift is None or (shift == 0).all()
            assert epsilon == pytest.approx(init.epsilon)


@cache
def measured(name: str) -> tuple[Array, Array]:
    """Exponents (seed, layer) of the root mean square over pairs, and mean D² (seed, layer, t)."""
    squares = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        prompts = texts(rng.integers(0, VOCABULARY, (PROMPTS, P)))
        text = texts(rng.integers(0, VOCABULARY, (1, T)), "text")
        record = distances.measure(
            wrap(network(name, seed)), prompts, text, floor=False, progress=False
        )
        found = record.distance.to_numpy()[:LAYERS, 0].astype(float)
        squares.append((found**2).mean(axis=1))
    curves = np.array(squares)
    return np.array([on_49_points(np.sqrt(one), T) for one in curves]), curves


def prediction(name: str) -> Array:
    t = np.arange(1, T + 1)
    return untrained.distance(predicted(name), LAYERS, P, t, collisions=1 / VOCABULARY)


# How far the mean over seeds may be from the prediction, beyond four standard errors of that mean
# (from the seeds themselves). At width d the covariances of one network scatter by d^-1/2 around
# those of the infinite one, and their effect does not cancel from the order of 1/d on: 1/256, or
# .004. Two families are known to be off by more at any width: the expansion in the logits' variance
# s² = 1 of Qwen3 leaves .010, the norm of a nearly averaged-out attention of Gemma 2 leaves .012.
# Mistral without its window is Llama, with the same weights for the same seed.
ALLOWED = {"gpt2": 0.004, "neox": 0.004, "neox-config": 0.004, "llama": 0.004}
ALLOWED |= {"qwen3": 0.010, "gemma2": 0.012}


@pytest.mark.parametrize("name", ALLOWED)
def test_exponents_of_untrained_networks(name: str) -> None:
    alphas, _ = measured(name)
    found = alphas.mean(axis=0) - on_49_points(prediction(name), T)
    error = alphas.std(axis=0, ddof=1) / sqrt(SEEDS)
    assert (np.abs(found) < 4 * error + ALLOWED[name]).all(), (found, error)
    assert (error < 0.02).all()  # so that four of them tell one layer from the next


def test_exponents_of_gemma_3_are_off_by_a_little() -> None:
    """Normalised queries and post-norms together: .03 over all layers, and no more than twice that.

    The prediction is known not to hold here to the digits of the other families; should this ever
    fail from below, the theory has improved and the book must say so.
    """
    alphas, _ = measured("gemma3")
    found = np.abs(alphas.mean(axis=0) - on_49_points(prediction("gemma3"), T)).mean()
    assert 0.005 < found < 0.06


@pytest.mark.parametrize("name", ALLOWED)
def test_sizes_of_distances_of_untrained_networks(name: str) -> None:
    """Root mean square over seeds and pairs: within 3 %, Qwen3 and Gemma 2 within 10 %."""
    curves = measured(name)[1][..., 15:]
    logs = np.log(np.sqrt(curves) / prediction(name)[:, 15:]).mean(axis=-1)
    error = logs.std(axis=0, ddof=1) / sqrt(SEEDS)
    allowed = 0.1 if name in ("qwen3", "gemma2") else 0.03
    assert (np.abs(logs.mean(axis=0)) < 4 * error + allowed).all(), (logs.mean(axis=0), error)
    assert (error < 0.05).all()  # seeds differ in the size of all D together


# The prediction, by itself


PUBLISHED = {
    # layers 1 … L over [16, 1024] at P = 32, width 512; and how far measured ones were
    ("gpt2", 6): (0.753, 0.554, 0.466, 0.416, 0.383, 0.359),
    ("neox", 6): (0.762, 0.609, 0.535, 0.491, 0.461, 0.439),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_table_of_exponents(case: tuple[str, int]) -> None:
    name, layers = case
    found = untrained.distance(named(name, 512), layers, 32, np.arange(1, 1025))
    np.testing.assert_allclose(on_49_points(found, 1024), PUBLISHED[case], atol=6e-4)


@pytest.mark.parametrize(("width", "alpha"), [(128, 0.475), (256, 0.392), (512, 0.359)])
def test_exponent_falls_with_width(width: int, alpha: float) -> None:
    found = untrained.distance(named("gpt2", width), 6, 32, np.arange(1, 1025))[-1]
    assert on_49_points(found, 1024) == pytest.approx(alpha, abs=1e-3)


def test_any_horizon_and_any_shape() -> None:
    """Local exponents of the last of six GPT-2 blocks creep to one."""
    t = np.array([16, 100, 1e3, 1e4, 1e5, 1e6])
    both = np.stack([t * 0.9, t * 1.1]).round()
    found = untrained.distance(named("gpt2", 512), 6, 32, both)
    assert found.shape == (6, 2, 6)
    slope = -np.diff(np.log(found), axis=1)[:, 0] / np.diff(np.log(both), axis=0)[0]
    np.testing.assert_allclose(slope[5], [0.14, 0.34, 0.52, 0.61, 0.66, 0.70], atol=0.015)
    np.testing.assert_allclose(slope[1], [0.23, 0.54, 0.77, 0.85, 0.89, 0.91], atol=0.015)
    alone = untrained.distance(named("gpt2", 512), 6, 32, 100)
    assert alone.shape == (6,)


def test_collisions_are_shared_tokens() -> None:
    """A token at the same place of both prompts adds nothing; squares of the others stay.

    In the first layer, and up to 1 %: an MLP of width 1 is next to none, and attention with
    logits of variance .0026 is next to even.
    """
    init, t = Initialisation(128, 1, 128), np.arange(1, 60)
    none = untrained.distance(init, 2, 8, t, form="full")
    for collisions in (0.01, 0.5):
        some = untrained.distance(init, 2, 8, t, form="full", collisions=collisions)
        np.testing.assert_allclose(some[0], none[0] * sqrt(1 - collisions), rtol=0.01)
        assert (some < none).all()


def test_prompts_of_one_token_only_leave_no_distance() -> None:
    """Up to what rounding leaves of differences between equal covariances."""
    with np.errstate(all="raise"):
        found = untrained.distance(named("llama", 64), 2, 8, [1, 10], collisions=1.0)
    assert (found < 1e-7).all()


# Given texts


def rms_norm(x: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon))


def random_network(init: Initialisation, layers: int, rng: Any) -> Callable[[Array], list[Array]]:
    """One draw: from initial states (tokens, width) to those after every block.

    Heads of 8 numbers with logits of their own; written from the description of the fields.
    """
    d, inner, values = init.width, init.mlp_width, init.value_width
    heads = values // 8

    def draw(rows: int, columns: int, variance: float) -> Array:
        return np.asarray(rng.standard_normal((rows, columns)) * sqrt(variance))

    reading, writing = init.std**2, init.writing(layers)
    weights = [
        {
            "q": draw(d, values, reading),
            "k": draw(d, values, reading),
            "v": draw(d, values, reading),
            "o": draw(values, d, writing),
            "up": draw(d, inner, reading),
            "gate": draw(d, inner, reading),
            "down": draw(inner, d, writing),
        }
        for _ in range(layers)
    ]

    def attend(u: Array, w: dict[str, Array]) -> Array:
        q, k, v = (np.moveaxis((u @ w[x]).reshape(len(u), heads, 8), 1, 0) for x in "qkv")
        logits = np.where(np.tri(len(u)), q @ np.moveaxis(k, 1, 2) / sqrt(8), -inf)
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        return np.asarray(np.moveaxis(shares @ v, 0, 1).reshape(len(u), -1) @ w["o"])

    def think(u: Array, w: dict[str, Array]) -> Array:
        hidden = FUNCTIONS[init.activation](u @ w["gate"])
        return np.asarray((hidden * (u @ w["up"]) if init.gated else hidden) @ w["down"])

    def run(x: Array) -> list[Array]:
        rows = []
        for w in weights:
            u = rms_norm(x, init.epsilon)
            added = attend(u, w)
            x = x + (rms_norm(added, init.epsilon) if init.post_norm else added)
            u = u if init.parallel else rms_norm(x, init.epsilon)
            added = think(u, w)
            x = x + (rms_norm(added, init.epsilon) if init.post_norm else added)
            rows.append(x)
        return rows

    return run


DRAWN = {
    "sequential": Initialisation(
        160, 320, 240, std=0.05, activation="relu", positions=True, residual="scaled", epsilon=1e-3
    ),
    "parallel": Initialisation(
        160, 320, 160, std=0.04, activation="gelu", parallel=True, residual="wang"
    ),
    "gated": Initialisation(160, 240, 160, std=0.05, activation="silu", gated=True),
}
# The prompts share a token, at one place and at another; the text repeats its own and the prompts'
FIRST = [1, 2, 2, 3, 9, 1, 9, 5, 2, 9]
SECOND = [1, 4, 6, 1, 9, 1, 9, 5, 2, 9]


def drawn_squares(init: Initialisation, draws: int) -> Array:
    """D² of the two texts, (draw, layer, t)."""
    rng = np.random.default_rng(7)
    squares = []
    for _ in range(draws):
        run = random_network(init, 2, rng)
        table = rng.standard_normal((10, init.width)) * sqrt(init.embedding)
        places = rng.standard_normal((len(FIRST), init.width)) * sqrt(init.position)
        one, two = (run(table[ids] + places) for ids in (FIRST, SECOND))
        squares.append([((a - b)[4:] ** 2).sum(axis=-1) for a, b in zip(one, two, strict=True)])
    return np.array(squares)


@pytest.mark.parametrize("name", DRAWN)
def test_given_texts_against_draws(name: str) -> None:
    """Four standard errors, and what a width of 160 leaves: heads of 8 and covariances of 1/160.

    Two percent of D cover the latter; tokens that repeat move D by far more.
    """
    init, draws = DRAWN[name], 250
    squares = drawn_squares(init, draws)
    mean, error = squares.mean(axis=0), squares.std(axis=0) / sqrt(draws)
    expected = untrained.between(init, 2, FIRST, SECOND, 4) ** 2
    assert expected.shape == mean.shape == (2, 6)
    assert (np.abs(mean - expected) < 4 * error + 0.04 * expected).all(), (
        mean / expected,
        error / mean,
    )
    distinct = untrained.distance(init, 2, 4, np.arange(1, 7), form="full") ** 2
    assert np.abs(mean / distinct - 1).max() > 0.2


def test_given_texts_without_repeats_are_the_average_ones() -> None:
    init = named("gpt2", 64)
    text = list(range(100, 130))
    first, second = [1, 2, 3, *text], [4, 5, 6, *text]
    found = untrained.between(init, 3, first, second, 3)
    expected = untrained.distance(init, 3, 3, np.arange(1, 31), form="full")
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_given_texts_by_their_equalities_alone() -> None:
    """Names of tokens do not matter, nor which run comes first; equal runs leave nothing."""
    init = named("llama", 64)
    found = untrained.between(init, 2, FIRST, SECOND, 4)
    renamed = [[100 - i for i in ids] for ids in (FIRST, SECOND)]
    np.testing.assert_allclose(untrained.between(init, 2, *renamed, 4), found, rtol=1e-12)
    np.testing.assert_allclose(untrained.between(init, 2, SECOND, FIRST, 4), found, rtol=1e-9)
    same = untrained.between(init, 2, FIRST, FIRST, 4)
    assert (same < 1e-7 * found).all()


def test_prompts_may_share_their_beginning() -> None:
    """A longer prompt of which the first part is shared is a shared prefix."""
    init = named("gpt2", 64)
    found = untrained.between(init, 2, FIRST, SECOND, 1)
    np.testing.assert_allclose(
        found[:, 3:], untrained.between(init, 2, FIRST, SECOND, 4), rtol=1e-9
    )
    assert (found[:, 0] > 0).all()


# The incoherent relay


@each("incoherent_q")
def test_worked_weights_of_incoherent_chains(value: dict[str, Any]) -> None:
    t = [int(t) for t in value["q"]]
    expected = [float(Fraction(q)) for q in value["q"].values()]
    found = untrained.chain_weights(max(t), value["P"], value["k"])[value["k"] - 1]
    np.testing.assert_allclose(found[np.array(t) - 1], expected, rtol=1e-14)


def means(length: int) -> Array:
    return np.asarray(np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None])


@pytest.mark.parametrize("gain", [0.5, (1.0, 0.2, 3.0, 0.0, 0.7)])
@pytest.mark.parametrize(("prompt_tokens", "horizon"), [(1, 30), (7, 40)])
def test_incoherent_relay_is_the_covariance_carried_along(
    gain: Any, prompt_tokens: int, horizon: int
) -> None:
    """M becomes M + g² C M C', from prompts' differences that are independent."""
    gains = [gain] * 5 if isinstance(gain, float) else gain
    length = prompt_tokens + horizon
    average = means(length)
    covariance = np.diag((np.arange(length) < prompt_tokens).astype(float))
    expected = []
    for g in gains:
        covariance = covariance + g**2 * average @ covariance @ average.T
        expected.append(np.sqrt(covariance.diagonal()[prompt_tokens:]))
    found = untrained.incoherent(horizon, 5, prompt_tokens, gain)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_incoherent_relay_against_draws() -> None:
    """Linear nets of width 64: within four standard errors of the mean square."""
    rng = np.random.default_rng(0)
    gains, prompt_tokens, horizon, width, draws = (1.0, 0.5, 0.8), 5, 30, 64, 400
    average = means(prompt_tokens + horizon)
    squares = np.empty((draws, 3, horizon))
    for draw in range(draws):
        x = np.zeros((prompt_tokens + horizon, width))
        x[:prompt_tokens] = rng.standard_normal((prompt_tokens, width)) / sqrt(width)
        for layer, g in enumerate(gains):
            x = x + g * average @ x @ rng.standard_normal((width, width)) / sqrt(width)
            squares[draw, layer] = (x[prompt_tokens:] ** 2).sum(axis=1)
    error = squares.std(axis=0) / sqrt(draws)
    expected = untrained.incoherent(horizon, 3, prompt_tokens, gains) ** 2
    assert (np.abs(squares.mean(axis=0) - expected) < 4 * error).all()
    assert (error < 0.06 * expected).all()


def test_first_incoherent_block_is_that_of_independent_tokens() -> None:
    t = np.arange(1, 200)
    found = untrained.incoherent(199, 1, 8, 0.5)[0]
    np.testing.assert_allclose(found, 0.5 * np.sqrt(8) / (8 + t), rtol=1e-13)


# Gains


def test_gains_of_gpt2() -> None:
    """As found elsewhere, without epsilon, to their two digits; and the exponents they give."""
    init = Initialisation(512, 2048, 512, positions=True, residual="scaled", epsilon=0.0)
    found = untrained.gains(init, 6)
    np.testing.assert_allclose(found, [2.09, 0.81, 0.59, 0.48, 0.42, 0.37], atol=6e-3)
    assert untrained.gains(named("gpt2", 512), 6)[0] < found[0]  # epsilon is in the norm
    curves = untrained.incoherent(1024, 6, 32, found)
    expected = [0.560, 0.482, 0.440, 0.413, 0.393]
    np.testing.assert_allclose(on_49_points(curves, 1024)[1:], expected, atol=1e-3)
    constant = untrained.incoherent(1024, 6, 32, found[0])
    expected = [0.526, 0.409, 0.340, 0.286, 0.239]
    np.testing.assert_allclose(on_49_points(constant, 1024)[1:], expected, atol=1e-3)


@pytest.mark.parametrize("parallel", [False, True])
def test_gains_on_paper(parallel: bool) -> None:
    """Numbers chosen so that v = A² = B² = 1 and the embeddings' variance is 1/4.

    ReLU of two independent normals has the covariance 1/(2 pi), of one with itself 1/2.
    """
    init = Initialisation(4, 4, 4, std=0.5, activation="relu", parallel=parallel, epsilon=0.25)
    assert (init.reading, init.embedding, init.writing(9)) == (1.0, 0.25, 0.25)
    assert (init.attention(9), init.mlp(9)) == (1.0, 1.0)
    sizes, common = [0.25, 0.75], 1 / (2 * pi)
    rho = common / 0.75
    after = (common + rho) / (0.75 + rho)
    sizes.append(0.75 + rho + 0.5)
    read = float(kernel("relu", 1.0, np.array(rho if parallel else after)))
    common += rho + read
    rho = common / sizes[-1]
    sizes.append(sizes[-1] + rho + 0.5)
    found = untrained.gains(init, 4)
    np.testing.assert_allclose(found, 1 / np.sqrt(np.array(sizes) + 0.25), rtol=1e-12)


# Variances on paper


def test_variances_of_every_kind_of_writing() -> None:
    flat, scaled, wang = (
        Initialisation(100, 300, 50, std=0.1, residual=r)  # type: ignore[arg-type]
        for r in ("flat", "scaled", "wang")
    )
    assert flat.writing(8) == pytest.approx(0.01)
    assert scaled.writing(8) == pytest.approx(0.01 / 16)
    assert wang.writing(8) == pytest.approx(4 / 64 / 100)  # (2 / (L sqrt d))²
    assert flat.reading == pytest.approx(1.0)
    assert flat.attention(8) == pytest.approx(100 * 0.01 * 50 * 0.01)
    assert flat.mlp(8) == pytest.approx(300 * 0.01)
    assert scaled.attention(8) == pytest.approx(0.5 / 16)
    assert flat.logit == pytest.approx(1.0)
    assert Initialisation(100, 300, 50, std=0.05).logit == pytest.approx(0.0625)
    assert Initialisation(100, 300, 50, std=0.05, query_key_norm=True).logit == 1.0


def test_gate_multiplies_the_kernel_by_a_linear_one() -> None:
    plain, gated = (
        Initialisation(100, 300, 50, std=0.05, activation="silu", gated=g) for g in (False, True)
    )
    rho = np.array([-0.3, 0.2, 1.0])
    np.testing.assert_allclose(gated.hidden(rho), plain.hidden(rho) * 0.25 * rho, rtol=1e-13)
    np.testing.assert_allclose(plain.hidden(rho), kernel("silu", 0.25, rho), rtol=1e-13)


def test_names_give_the_usual_shape_unless_told() -> None:
    for name in INITIALISATIONS:
        usual = named(name, 64)
        assert (usual.width, usual.mlp_width, usual.value_width) == (64, 256, 64)
        given_ = named(name, 64, mlp_width=100, value_width=32)
        assert (given_.width, given_.mlp_width, given_.value_width) == (64, 100, 32)
    assert set(INITIALISATIONS) == set(NETWORKS)


law = settings(deadline=None, derandomize=True, max_examples=25)


@law
@given(st.sampled_from(sorted(INITIALISATIONS)), st.integers(1, 4), st.integers(1, 30))
def test_distances_are_positive_and_the_first_layers_fall(
    name: str, layers: int, prompt_tokens: int
) -> None:
    """Strictly, from the first position on, and like the share where nothing is normalised yet."""
    found = untrained.distance(named(name, 128), layers, prompt_tokens, [1, 2, 5, 30, 100, 400])
    assert found.shape == (layers, 6)
    assert (found > 0).all()
    assert (np.diff(found) < 0).all()


@law
@given(st.integers(1, 6), st.integers(1, 20), st.floats(0.05, 2), st.floats(1.05, 2))
def test_incoherent_distance_grows_with_gain_and_depth(
    layers: int, prompt_tokens: int, gain: float, more: float
) -> None:
    one, two = (untrained.incoherent(30, layers, prompt_tokens, g) for g in (gain, more * gain))
    assert (one > 0).all()
    assert (two > one).all()
    assert (np.diff(one, axis=0) > 0).all()


# What is refused


INIT = named("llama", 32)
SHAPE: dict[str, Any] = {"width": 32, "mlp_width": 64, "value_width": 32}
RELAY: dict[str, Any] = {"horizon": 9, "layers": 3, "prompt_tokens": 4}
ASKS: dict[Callable[..., Any], dict[str, Any]] = {
    Initialisation: SHAPE,
    named: {"name": "gpt2", "width": 32},
    untrained.distance: {"init": INIT, "layers": 2, "prompt_tokens": 3, "t": [1, 5]},
    untrained.between: {
        "init": INIT,
        "layers": 2,
        "first": [1, 2, 3, 4],
        "second": [5, 2, 3, 4],
        "prompt_tokens": 2,
    },
    untrained.gains: {"init": INIT, "layers": 2},
    untrained.incoherent: {**RELAY, "gain": 0.5},
    untrained.chain_weights: {"horizon": 9, "prompt_tokens": 4, "count": 3},
}
COUNTS: list[Any] = [0, -1, 2.5, inf, nan, "many"]
SIZES: list[Any] = [-1, inf, nan, "many"]
WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(("width", "mlp_width", "value_width"), COUNTS),
    **dict.fromkeys(("layers", "prompt_tokens", "horizon", "count"), COUNTS),
    "std": SIZES,
    "epsilon": SIZES,
    "residual": ["large", ""],
    "activation": ["tanh", ""],
    "name": ["gpt5", "", "GPT2"],
    "init": ["gpt2", None],
    "t": [0, 0.5, 2.5, -3, inf, nan, "many"],
    "form": ["coarse", ""],
    "collisions": [-0.1, 1.5, nan, "many"],
    "gain": [*SIZES, [0.5, 0.5]],
}
REFUSED = [
    pytest.param(ask, parameter, wrong, id=f"{ask.__name__}-{parameter}-{wrong}")
    for ask in ASKS
    for parameter in signature(ask).parameters
    for wrong in WRONG.get(parameter, [])
]


@pytest.mark.parametrize(("ask", "parameter", "wrong"), REFUSED)
def test_what_is_impossible_is_refused_by_name_and_value(
    ask: Callable[..., Any], parameter: str, wrong: Any
) -> None:
    message = refusal(ask, **(ASKS[ask] | {parameter: wrong}))
    called = "initialisation" if parameter == "name" else parameter
    assert re.search(rf"\b{called}\b", message)
    shown = "2 values for 3" if isinstance(wrong, list) else str(wrong)
    assert shown in message


@pytest.mark.parametrize(
    ("first", "second", "prompt_tokens"),
    [
        ([1, 2, 3], [1, 2], 1),
        ([1, 2], [3, 4], 2),
        ([1, 2], [3, 4], 5),
        ([[1, 2]], [[3, 4]], 1),
        (7, 8, 1),
        ("many", "more", 1),
        ([], [], 1),
    ],
)
def test_texts_that_do_not_match_are_refused(first: Any, second: Any, prompt_tokens: int) -> None:
    message = refusal(
        untrained.between,
        init=INIT,
        layers=1,
        first=first,
        second=second,
        prompt_tokens=prompt_tokens,
    )
    assert "texts" in message
    assert str(np.shape(first)) in message
    assert f"prompt's {prompt_tokens} " in message


def test_what_does_not_fit_in_memory_is_refused() -> None:
    message = refusal(
        untrained.distance, init=INIT, layers=1, prompt_tokens=5, t=[20_000], form="full"
    )
    assert "form = 'full'" in message
    assert "20005" in message
    long = [0] * 20_001
    assert "20000" in refusal(
        untrained.between, init=INIT, layers=1, first=long, second=long, prompt_tokens=5
    )


@pytest.mark.parametrize("number", [2.0, np.int64(2), np.float64(2)], ids=repr)
@pytest.mark.parametrize(
    "ask",
    [
        lambda n: untrained.distance(INIT, n, n, [1, 5]),
        lambda n: untrained.between(INIT, n, [1, 2, 3, 4], [5, 2, 3, 4], n),
        lambda n: untrained.gains(INIT, n),
        lambda n: untrained.incoherent(n, n, n, 0.5),
        lambda n: untrained.chain_weights(n, n, n),
    ],
    ids=["distance", "between", "gains", "incoherent", "chain_weights"],
)
def test_whole_numbers_come_in_any_type(ask: Callable[[Any], Any], number: Any) -> None:
    """`symmetric.whole` lets them pass, so they must work."""
    np.testing.assert_array_equal(ask(number), ask(2))


def test_a_distance_that_rounding_hides_is_refused_and_not_made_up() -> None:
    init = untrained.named("gpt2", 512)
    near, far = untrained.distance(init, 2, 32, [5e5, 1e6]).T
    # Block 1 is pure dilution, P and T apart: exponent 1, to the error of the grid.
    assert float(np.log2(near[0] / far[0])) == pytest.approx(1, abs=0.01)
    assert "t = 1e+09" in refusal(
        untrained.distance, init=init, layers=2, prompt_tokens=32, t=[1.0, 1e9]
    )
