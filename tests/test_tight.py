"""The network that attains the rate: against itself built from matrices, and against the bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from math import cos, factorial, inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nohair.errors import Refused
from nohair.theory import bound, relay, tight

pytestmark = pytest.mark.filterwarnings("error")

Array = NDArray[np.float64]


def normalised(states: Array) -> Array:
    """RMSNorm with unit gain and no epsilon."""
    return np.asarray(states / np.sqrt((states**2).mean(axis=-1, keepdims=True)))


def attention(u: Array, query: Array, key: Array, value: Array, output: Array) -> Array:
    """Causal softmax attention of one head, any weights."""
    q, k, v = u @ query.T, u @ key.T, u @ value.T
    logits = q @ k.T / np.sqrt(len(query))
    logits = np.where(np.tri(len(u), dtype=bool), logits, -inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ v @ output.T)


def matrices(gain: float) -> dict[str, Array]:
    """Queries are zero, keys anything; (u_1 - u_2)/2 is read and G (1, -1, 0, 0) written."""
    return {
        "query": np.zeros((3, 4)),
        "key": np.random.default_rng(0).standard_normal((3, 4)),
        "value": np.array([[0.5, -0.5, 0.0, 0.0]]),
        "output": gain * np.array([[1.0], [-1.0], [0.0], [0.0]]),
    }


def run(
    horizon: int, layers: int, prompt_tokens: int, gain: float, own: float, background: float
) -> list[Array]:
    """States before the first block and after every one, prompt and continuation."""
    y = np.where(np.arange(prompt_tokens + horizon) < prompt_tokens, own, 0.0)
    c = np.full_like(y, background)
    rows = [np.stack([y, -y, c, -c], axis=-1)]
    for _ in range(layers):
        rows.append(rows[-1] + attention(normalised(rows[-1]), **matrices(gain)))
    return rows


def apart(states: list[Array], others: list[Array]) -> Array:
    return np.array([np.linalg.norm(a - b, axis=-1) for a, b in zip(states, others, strict=True)])


NETWORKS = [
    (1, 3, 0.5, 0.1, 1.0),
    (3, 8, 1.0, 2.0, 0.5),
    (6, 2, 0.3, 10.0, 1.0),
    (4, 5, 4.0, 1.0, 3.0),
]
every = pytest.mark.parametrize(
    ("layers", "prompt_tokens", "gain", "difference", "background"), NETWORKS
)


@every
def test_distance_is_that_of_the_network(
    layers: int, prompt_tokens: int, gain: float, difference: float, background: float
) -> None:
    """Both prompts run through softmax attention with these weights."""
    a, b = (run(50, layers, prompt_tokens, gain, own, background) for own in (difference, 0.0))
    np.testing.assert_array_equal(b[-1], b[0])  # run B stays where it is
    expected = apart(a, b)[1:, prompt_tokens:]
    found = tight.distance(50, layers, prompt_tokens, gain, difference, background)
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@every
def test_blocks_are_the_theorems_constants_of_that_network(
    layers: int, prompt_tokens: int, gain: float, difference: float, background: float
) -> None:
    """From the weights and states, by the theorem's own recipe."""
    a, b = (run(5, layers, prompt_tokens, gain, own, background) for own in (difference, 0.0))
    weights = matrices(gain)
    # the smallest rms of the continuation's states is that of run B
    rms = np.sqrt((b[0][-1] ** 2).mean())
    for one, before, other in zip(
        tight.blocks(layers, prompt_tokens, gain, difference, background), a, b, strict=False
    ):
        read = normalised(before)[:prompt_tokens], normalised(other)[:prompt_tokens]
        expected = bound.block(
            nu=1 / rms,
            gamma=np.linalg.norm(weights["output"] @ weights["value"], 2),
            chi=0.0,
            beta=1.0,
            difference=rms * np.linalg.norm(read[0] - read[1], axis=-1).mean(),
        )
        for name in ("carry", "relay", "source"):
            assert getattr(one, name) == pytest.approx(getattr(expected, name), rel=1e-12)
        assert one.window is None


@every
def test_network_keeps_below_the_theorem(
    layers: int, prompt_tokens: int, gain: float, difference: float, background: float
) -> None:
    settings = (layers, prompt_tokens, gain, difference, background)
    logs = np.log(tight.distance(3000, *settings))
    blocks = tight.blocks(*settings)
    assert (logs <= bound.recursion(blocks, prompt_tokens, 3000) + 1e-12).all()
    t = np.arange(1, 3001)
    assert (logs[-1] <= bound.majorant(blocks, prompt_tokens, t, log=True) + 1e-12).all()
    assert (logs[-1] <= bound.rate(blocks, prompt_tokens, t, log=True) + 1e-12).all()


@pytest.mark.parametrize("difference", [1e-6, 0.3, 1.0, 50.0])
@pytest.mark.parametrize("background", [0.5, 2.0])
def test_one_block_is_below_by_the_sharpness_everywhere(
    difference: float, background: float
) -> None:
    found = tight.distance(100, 1, 7, 0.8, difference, background)
    blocks = tight.blocks(1, 7, 0.8, difference, background)
    ratio = found / np.exp(bound.recursion(blocks, 7, 100))
    np.testing.assert_allclose(ratio, tight.sharpness(difference, background), rtol=1e-12)


@pytest.mark.parametrize(
    ("layers", "gain", "difference"), [(2, 0.5, 1.0), (2, 1.0, 10.0), (3, 0.5, 1.0), (4, 0.5, 0.1)]
)
def test_ratio_to_the_bound_tends_to_the_sharpness(
    layers: int, gain: float, difference: float
) -> None:
    """From below, as 1/log t: what is left at t = 1e6 is extrapolated away."""
    settings = (layers, 4, gain, difference)
    t = 10 ** np.arange(3, 7)
    curve = np.log(tight.distance(10**6, *settings)[-1, t - 1])
    ratio = np.exp(curve - bound.majorant(tight.blocks(*settings), 4, t, log=True))
    limit = tight.sharpness(difference)
    assert (np.diff(ratio) > 0).all()
    assert (ratio < limit).all()
    found = np.polyfit(1 / np.log(t), ratio, 2)[-1]
    assert found == pytest.approx(limit, abs=2e-3)
    # nearer by far than where it began
    assert abs(found - limit) < 0.3 * (limit - ratio[-1])


def test_rate_and_constant_of_the_network() -> None:
    """D t / (P log^(L-1) t) against cos(½ arctan m/c) M_0 prod C / (L-1)!."""
    layers, prompt_tokens, gain, difference = 3, 4, 0.5, 0.5
    t = np.unique(np.geomspace(1e4, 3e6, 40).round()).astype(int)
    curve = tight.distance(3 * 10**6, layers, prompt_tokens, gain, difference)[-1, t - 1]
    scaled = curve * t / prompt_tokens / np.log(t) ** 2
    blocks = tight.blocks(layers, prompt_tokens, gain, difference)
    chain = blocks[0].source * blocks[1].relay * blocks[2].relay / factorial(2)
    expected = cos(np.arctan(difference) / 2) * chain
    # the square of log t has three coefficients; what is beyond them falls as (log t)²/t
    found = np.polyfit(1 / np.log(t), scaled, 2)[-1]
    assert found == pytest.approx(expected, rel=5e-3)


def test_sharpness_by_hand() -> None:
    """arctan 1 = pi/4, and half of it; it is scale-free, and between .707 and 1."""
    assert tight.sharpness(1.0) == pytest.approx(cos(np.pi / 8), rel=1e-15)
    assert tight.sharpness(3.0, 3.0) == pytest.approx(cos(np.pi / 8), rel=1e-15)
    assert tight.sharpness(0.0) == 1.0
    assert tight.sharpness(1e-4) == pytest.approx(1, abs=2e-9)
    assert tight.sharpness(1e12) == pytest.approx(np.sqrt(0.5), rel=1e-11)


law = settings(deadline=None, derandomize=True, max_examples=40)
depths = st.integers(1, 8)
prompts = st.integers(1, 100)
sizes = st.floats(0.01, 20)


@law
@given(depths, prompts, sizes, sizes, sizes)
def test_no_network_of_this_kind_exceeds_the_bound(
    layers: int, prompt_tokens: int, gain: float, difference: float, background: float
) -> None:
    found = tight.distance(40, layers, prompt_tokens, gain, difference, background)
    blocks = tight.blocks(layers, prompt_tokens, gain, difference, background)
    assert (found > 0).all()
    assert (np.log(found) <= bound.recursion(blocks, prompt_tokens, 40) + 1e-12).all()
    assert 0.7 < tight.sharpness(difference, background) <= 1


@law
@given(depths, prompts, sizes, sizes, st.floats(0.1, 10))
def test_only_ratios_of_sizes_matter(
    layers: int, prompt_tokens: int, gain: float, difference: float, scale: float
) -> None:
    """All in units of the background: D scales with it."""
    one = tight.distance(20, layers, prompt_tokens, gain, difference, 1.0)
    many = tight.distance(20, layers, prompt_tokens, scale * gain, scale * difference, scale)
    np.testing.assert_allclose(many, scale * one, rtol=1e-10)


def test_small_differences_are_the_linear_relay() -> None:
    """Where y stays far below c, phi is linear: gain sqrt 2 G/c, evolving states."""
    found = tight.distance(200, 4, 6, 0.5, 1e-7, 2.0)
    linear = relay.recursion(200, 4, 6, np.sqrt(2) * 0.5 / 2, 1.0, "evolving")
    np.testing.assert_allclose(found, np.sqrt(2) * 1e-7 * linear, rtol=1e-10)


BASE: dict[str, Any] = {
    "layers": 3,
    "prompt_tokens": 9,
    "gain": 0.5,
    "difference": 2.0,
    "background": 1.5,
}
ASKS: dict[Callable[..., Any], dict[str, Any]] = {
    tight.distance: {"horizon": 5, **BASE},
    tight.blocks: BASE,
    tight.sharpness: {"difference": 2.0, "background": 1.5},
}
WRONG: dict[str, list[Any]] = {
    **{name: [0, -1, 2.5, inf, nan, "many"] for name in ("horizon", "layers", "prompt_tokens")},
    **{name: [-1, inf, nan, "many"] for name in ("gain", "difference")},
    "background": [0, -1, inf, nan, "many"],
}
REFUSED = [
    pytest.param(ask, parameter, wrong, id=f"{ask.__name__}-{parameter}-{wrong}")
    for ask in ASKS
    for parameter in signature(ask).parameters
    for wrong in WRONG[parameter]
]


@pytest.mark.parametrize(("ask", "parameter", "wrong"), REFUSED)
def test_what_is_impossible_is_refused_by_name_and_value(
    ask: Callable[..., Any], parameter: str, wrong: Any
) -> None:
    with pytest.raises(Refused) as refused:
        ask(**(ASKS[ask] | {parameter: wrong}))
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(rf"\b{parameter} = '?{re.escape(str(wrong))}\b", message)


@pytest.mark.parametrize("number", [3.0, np.int64(3), np.float64(3)], ids=repr)
def test_whole_numbers_come_in_any_type(number: Any) -> None:
    """`symmetric.whole` lets them pass, so they must work."""
    found = tight.distance(number, number, number, 0.5, 1.0)
    np.testing.assert_array_equal(found, tight.distance(3, 3, 3, 0.5, 1.0))
