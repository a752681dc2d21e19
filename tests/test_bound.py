"""The bound against (R) iterated in exact fractions, numbers worked by hand, and random laws."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import exp, inf, log, nan
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import polygamma

from nohair.errors import Refused
from nohair.theory import bound
from nohair.theory.bound import Block, block

pytestmark = pytest.mark.filterwarnings("error")

# Sizes of the constants, as powers of ten: as near one as can be hoped for, those of trained
# networks (30 blocks of 1e40 multiply to 1e1200), and vanishing ones.
SIZES = {"moderate": (-1.0, 1.0), "huge": (38.0, 42.0), "tiny": (-42.0, -38.0)}


def random_blocks(seed: int, windows: Sequence[int | None], size: str = "moderate") -> list[Block]:
    rng = np.random.default_rng(seed)
    drawn = 10 ** rng.uniform(*SIZES[size], (len(windows), 3))
    return [
        Block(1 + a, c if window is None else 0.0, s, window)
        for (a, c, s), window in zip(drawn.tolist(), windows, strict=True)
    ]


def exactly(blocks: Sequence[Block], prompt_tokens: int, horizon: int) -> list[list[Fraction]]:
    """(R) with equality, read off the page, sum by sum: D after every block at t = 1 ... T.

    A windowed query reads the prompt only if one of its W keys is in it.
    """
    before = [Fraction(0)] * (horizon + 1)  # by t, of which 0 is never read
    rows = []
    for one in blocks:
        carry, relay, source = map(Fraction, (one.carry, one.relay, one.source))
        after = [Fraction(0)]
        for t in range(1, horizon + 1):
            first = t if one.window is None else max(1, t - one.window + 1)
            sees_prompt = one.window is None or t - one.window + 1 <= 0
            prompt = prompt_tokens * source if sees_prompt else 0
            relayed = relay * sum(before[1 : t + 1])
            after.append(
                carry * max(before[first : t + 1]) + (prompt + relayed) / (prompt_tokens + t)
            )
        rows.append(after[1:])
        before = after
    return rows


def logarithm(value: Fraction) -> float:
    """Of a fraction of any size; -inf of zero."""
    return log(value.numerator) - log(value.denominator) if value else -inf


def logarithms(rows: Sequence[Sequence[Fraction]]) -> NDArray[np.float64]:
    return np.array([[logarithm(value) for value in row] for row in rows])


def assert_equal_logarithms(found: Any, expected: Any, relative: float = 1e-9) -> None:
    """Equal up to a relative error of what the logarithms are of; equal infinities are equal."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=relative)


# The recursion


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prompt_tokens", [1, 7, 100])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_recursion_is_the_one_on_the_page(size: str, prompt_tokens: int, depth: int) -> None:
    blocks = random_blocks(depth, [None] * depth, size)
    expected = logarithms(exactly(blocks, prompt_tokens, 12))
    assert_equal_logarithms(bound.recursion(blocks, prompt_tokens, 12), expected)


@pytest.mark.parametrize("prompt_tokens", [1, 3, 50])
@pytest.mark.parametrize(
    "windows", [(4,), (1,), (4, 4), (4, None), (None, 4), (None, 5, None), (2, 3, None, 6, None)]
)
def test_recursion_with_windows(windows: tuple[int | None, ...], prompt_tokens: int) -> None:
    blocks = random_blocks(3, windows)
    expected = logarithms(exactly(blocks, prompt_tokens, 14))
    assert_equal_logarithms(bound.recursion(blocks, prompt_tokens, 14), expected)


def test_window_wider_than_the_horizon() -> None:
    blocks = random_blocks(4, (None, 50, 9))
    expected = logarithms(exactly(blocks, 6, 9))
    assert_equal_logarithms(bound.recursion(blocks, 6, 9), expected)


RELAYS = {
    # L, P, gain, carry, whether the prompt's states evolve: d at t = 1, 2, 3, 10, worked elsewhere
    (1, 2, "1", "1", False): ("2/3", "1/2", "2/5", "1/6"),
    (2, 2, "1", "1", False): ("14/9", "31/24", "167/150", "99881/166320"),
    (3, 1, "1", "1", False): ("19/8", "217/108", "1015/576", "8743298323/8452382400"),
    (4, 4, "1/2", "1", False): (
        "4641/2500",
        "1124111/648000",
        "422944943/259308000",
        "124418021259434891/104823281952829440",
    ),
    (3, 2, "1", "1/2", False): ("91/54", "457/288", "13429/9000", "4917021253/4610390400"),
    (3, 2, "1", "1", True): ("152/27", "1381/288", "37969/9000", "11414921893/4610390400"),
}


@pytest.mark.parametrize("case", RELAYS)
def test_linear_relay_reaches_the_bound(case: tuple[int, int, str, str, bool]) -> None:
    """Where each block adds an average of what it reads, (R) holds with equality."""
    depth, prompt_tokens, gain, carry, evolving = case
    g, a = float(Fraction(gain)), float(Fraction(carry))
    blocks = [Block(a, g, g * (a + g) ** (l if evolving else 0)) for l in range(depth)]  # noqa: E741
    expected = np.log([float(Fraction(value)) for value in RELAYS[case]])
    t = np.array([1, 2, 3, 10])
    assert_equal_logarithms(bound.recursion(blocks, prompt_tokens, 10)[-1, t - 1], expected)
    assert_equal_logarithms(bound.majorant(blocks, prompt_tokens, t, log=True), expected)


# The majorant


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("prompt_tokens", "depth"), [(1, 3), (64, 30), (2000, 12)])
def test_both_routes_to_the_majorant_agree(
    prompt_tokens: int, depth: int, size: str, seed: int
) -> None:
    blocks = random_blocks(seed, [None] * depth, size)
    iterated = bound.recursion(blocks, prompt_tokens, 2000)[-1]
    closed = bound.majorant(blocks, prompt_tokens, np.arange(1, 2001), log=True)
    assert_equal_logarithms(closed, iterated)


@pytest.mark.parametrize("size", SIZES)
def test_majorant_against_exact_fractions(size: str) -> None:
    blocks = random_blocks(11, [None] * 4, size)
    expected = logarithms(exactly(blocks, 5, 15))[-1]
    found = bound.majorant(blocks, 5, np.arange(1, 16), log=True)
    assert_equal_logarithms(found, expected)


@pytest.mark.parametrize("missing", ["carry", "relay", "source"])
def test_constants_may_be_zero(missing: str) -> None:
    blocks = random_blocks(5, [None] * 4)
    for i in range(4):
        some = [
            Block(**(vars(b) | ({missing: 0.0} if i == j else {}))) for j, b in enumerate(blocks)
        ]
        none = [Block(**(vars(b) | {missing: 0.0})) for b in blocks]
        for these in (some, none):
            expected = logarithms(exactly(these, 3, 8))
            assert_equal_logarithms(bound.recursion(these, 3, 8), expected)
            found = bound.majorant(these, 3, np.arange(1, 9), log=True)
            assert_equal_logarithms(found, expected[-1])


def test_largest_constant_a_float_holds() -> None:
    """P times S is beyond 1e308; the bound, at most S, is not."""
    blocks = [Block(1.0, 0.0, 1e307)]
    expected = np.log(1e307) + np.log(1000 / (1000 + np.arange(1, 6)))
    assert_equal_logarithms(bound.majorant(blocks, 1000, np.arange(1, 6), log=True), expected)
    assert_equal_logarithms(bound.recursion(blocks, 1000, 5)[-1], expected)
    assert_equal_logarithms(np.log(bound.step(blocks[0], np.zeros(5), 1000)), expected)


def test_weights_below_the_smallest_float_still_count() -> None:
    """126 blocks of strong relay: a chain of 125 has weight 513^-125, and a factor 1e5000."""
    blocks = [Block(1.0, 1e40, 1.0)] * 126
    iterated = bound.recursion(blocks, 512, 2)[-1]
    closed = bound.majorant(blocks, 512, [1, 2], log=True)
    assert_equal_logarithms(closed, iterated)


def test_majorant_far_out_by_hand() -> None:
    """Three blocks, t = 1e300: H_1 and H_2 from digammas, c from its recursion on paper."""
    blocks = [Block(2.0, 9.0, 1.0), Block(3.0, 5.0, 7.0), Block(1.5, 4.0, 2.0)]
    # after one block: 1; after two: 3·1 + 7, 5·1; after three: 1.5·10 + 2, 1.5·5 + 4·10, 4·5
    c = (17.0, 47.5, 20.0)
    one = log(1e300) - polygamma(0, 7)
    two = (one**2 + polygamma(1, 7)) / 2
    expected = log(6) - log(1e300) + log(c[0] + c[1] * one + c[2] * two)
    assert_equal_logarithms(bound.majorant(blocks, 6, 1e300, log=True), expected, 1e-12)


def test_majorant_and_its_logarithm_keep_the_shape() -> None:
    blocks = random_blocks(1, [None] * 3)
    t = np.array([[1.0, 30.0, 1e5], [2.0, 7.0, 1e9]])
    for evaluate in (bound.majorant, bound.rate):
        found = evaluate(blocks, 9, t)
        assert found.shape == t.shape
        np.testing.assert_allclose(np.log(found), evaluate(blocks, 9, t, log=True), rtol=1e-12)
        for place in np.ndindex(t.shape):
            alone = evaluate(blocks, 9, t[place])
            assert alone.shape == ()
            np.testing.assert_allclose(found[place], alone, rtol=1e-13)
    assert bound.local_exponent(blocks, 9, t).shape == t.shape


@pytest.mark.parametrize("evaluate", [bound.majorant, bound.rate])
def test_bound_beyond_the_largest_float_needs_its_logarithm(evaluate: Callable[..., Any]) -> None:
    blocks = random_blocks(0, [None] * 30, "huge")
    with pytest.raises(Refused, match="log=True") as refusal:
        evaluate(blocks, 64, [1, 100])
    assert "\n" not in str(refusal.value)
    # thirty factors of 1e40 each, give or take 1e2, and a few decades for the number of paths
    decades = evaluate(blocks, 64, [1, 100], log=True) / log(10)
    assert ((decades > 1050) & (decades < 1300)).all()


def test_bound_just_below_the_largest_float_is_given() -> None:
    found = bound.majorant([Block(1.0, 1.0, 1e307)], 64, 64)
    np.testing.assert_allclose(found, 5e306, rtol=1e-9)


# Windows: patterns before the first block that sees everything, between such blocks, after them
PATTERNS = [
    (8, None),
    (8, 3, None),
    (None, 8),
    (None, 8, 8, None),
    (8, None, 3, None, 8),
    (1, None, 1),
    (8, 1, None, None),
]


@pytest.mark.parametrize("prompt_tokens", [1, 5, 300])
@pytest.mark.parametrize("windows", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_majorant_lies_above_the_recursion_with_windows(
    windows: tuple[int | None, ...], prompt_tokens: int, seed: int
) -> None:
    for size in SIZES:
        blocks = random_blocks(seed, windows, size)
        iterated = bound.recursion(blocks, prompt_tokens, 400)[-1]
        closed = bound.majorant(blocks, prompt_tokens, np.arange(1, 401), log=True)
        assert (closed >= iterated - 1e-12).all()
        assert np.isfinite(closed).all()  # one block sees everything: it never ends


def test_majorant_with_windows_by_hand() -> None:
    """A window of 4 before, and one after, the only block that sees everything; P = 6."""
    blocks = [Block(2.0, 0.0, 1.0, 4), Block(3.0, 5.0, 7.0), Block(2.0, 0.0, 1.0, 4)]
    # after one: 1, and D ends at 3; after two: 3·1 + 7 and the finite relay 5·(1/7 + 1/8 + 1/9);
    # after three: 2·(1 + 3/6)·that + 1
    first = 10 + 5 * (1 / 7 + 1 / 8 + 1 / 9)
    t = np.array([1, 3, 4, 100, 10**9])
    np.testing.assert_allclose(
        bound.majorant(blocks, 6, t), 6 / (6 + t) * (3 * first + 1), rtol=1e-12
    )


@pytest.mark.parametrize("windows", [(5,), (1,), (1, 1), (5, 3), (5, 1, 9), (2, 2, 2, 2)])
def test_windows_everywhere_end_the_distance(windows: tuple[int, ...]) -> None:
    """D is zero beyond the sum of W - 1, in the bound as in an honest evaluation of (R)."""
    blocks = random_blocks(2, windows)
    end = sum(w - 1 for w in windows)
    t = np.arange(1, 31)
    honest = np.array([float(value) for value in exactly(blocks, 4, 30)[-1]])
    found = bound.majorant(blocks, 4, t)
    iterated = bound.recursion(blocks, 4, 30)[-1]
    np.testing.assert_array_equal(honest > 0, t <= end)
    np.testing.assert_array_equal(found > 0, t <= end)
    np.testing.assert_array_equal(iterated > -inf, t <= end)
    assert (found >= honest * (1 - 1e-12)).all()
    for ask in (bound.rate, bound.local_exponent):
        with pytest.raises(Refused, match=f"zero beyond t = {end}$"):
            ask(blocks, 4, 3)
    with pytest.raises(Refused, match=f"zero beyond t = {end}$"):
        bound.turning_point(blocks, 4)


# The rate


@pytest.mark.parametrize("prompt_tokens", [1, 8, 2000])
@pytest.mark.parametrize("windows", [(None,), (None,) * 2, (None,) * 12, *PATTERNS])
def test_rate_lies_above_the_majorant(windows: tuple[int | None, ...], prompt_tokens: int) -> None:
    t = np.concatenate([np.arange(1, 2000), np.geomspace(2e3, 1e300, 500)])
    for size in SIZES:
        blocks = random_blocks(7, windows, size)
        middle = bound.majorant(blocks, prompt_tokens, t, log=True)
        right = bound.rate(blocks, prompt_tokens, t, log=True)
        # with one block that sees everything the two are equal, up to the rounding of logarithms
        assert (middle <= right + 1e-12 * np.abs(right)).all()


@pytest.mark.parametrize("windows", [(None,), (None,) * 2, (None,) * 7, *PATTERNS])
def test_power_of_the_logarithm_counts_the_blocks_without_window(
    windows: tuple[int | None, ...],
) -> None:
    """Seen in the growth of t times the bound, between two logarithms of t a factor 8 apart."""
    blocks = random_blocks(9, windows)
    far = 4 * np.expm1([80.0, 640.0])
    grown = bound.rate(blocks, 4, far, log=True) + np.log(1 + far / 4)
    power = np.diff(grown) / np.diff(np.log([81.0, 641.0]))
    expected = sum(window is None for window in windows) - 1
    assert power == pytest.approx(expected, abs=1e-9)
    # the majorant has the same power, in the limit, which its lower powers delay
    grown = bound.majorant(blocks, 4, far, log=True) + np.log(1 + far / 4)
    power = np.diff(grown) / np.diff(np.log([81.0, 641.0]))
    assert power == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("size", SIZES)
def test_constant_of_the_rate_is_k(size: str) -> None:
    blocks = random_blocks(6, [None] * 5, size)
    k = Fraction(0)
    for one in blocks:
        k = (Fraction(one.carry) + Fraction(one.relay)) * k + Fraction(one.source)
    t = np.array([1.0, 50.0, 1e20])
    spread = np.log1p(t / 8)
    expected = logarithm(k) - spread + 4 * np.log(1 + spread)
    assert_equal_logarithms(bound.rate(blocks, 8, t, log=True), expected)


# One step


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 7, 29, 30, 31, 100])
@pytest.mark.parametrize("prompt_tokens", [1, 6, 500])
def test_step_against_a_double_loop(window: int | None, prompt_tokens: int) -> None:
    one = Block(1.7, 0.9 if window is None else 0.0, 2.3, window)
    distance = np.random.default_rng(0).exponential(size=30)
    expected = []
    for t in range(1, 31):
        near, total = 0.0, 0.0
        for s in range(1, t + 1):
            total += distance[s - 1]
            if s == t or (window is not None and t - s < window):
                near = max(near, distance[s - 1])
        prompt = prompt_tokens * 2.3 if window is None or t < window else 0.0
        expected.append(1.7 * near + (prompt + one.relay * total) / (prompt_tokens + t))
    np.testing.assert_allclose(bound.step(one, distance, prompt_tokens), expected, rtol=1e-13)


@pytest.mark.parametrize("window", [None, 5])
def test_step_takes_many_distances_at_once(window: int | None) -> None:
    one = Block(1.2, 0.0 if window else 3.0, 0.4, window)
    distance = np.random.default_rng(1).exponential(size=(2, 3, 12))
    found = bound.step(one, distance, 7)
    assert found.shape == distance.shape
    for place in np.ndindex(2, 3):
        np.testing.assert_allclose(found[place], bound.step(one, distance[place], 7), rtol=1e-14)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("seed", range(5))
def test_larger_distance_gives_no_smaller_one(window: int | None, seed: int) -> None:
    """(R) can only be iterated because it is monotone."""
    rng = np.random.default_rng(seed)
    one = Block(*rng.exponential(size=1), 0.0 if window else rng.exponential(), 1.0, window)
    less = rng.exponential(size=40)
    more = less + rng.exponential(size=40) * (rng.random(40) < 0.3)
    assert (bound.step(one, more, 5) >= bound.step(one, less, 5)).all()


def test_step_does_not_hear_what_comes_later() -> None:
    less = np.ones(20)
    more = less.copy()
    more[11:] = 9.0
    for one in (Block(1.0, 2.0, 3.0), Block(1.0, 0.0, 3.0, 6)):
        before, after = bound.step(one, less, 5), bound.step(one, more, 5)
        np.testing.assert_array_equal(before[:11], after[:11])
        assert (after[11:] > before[11:]).all()


def test_steps_from_no_distance_are_the_recursion() -> None:
    blocks = random_blocks(8, (4, None, 3, None))
    distance = np.zeros(25)
    for row, one in zip(bound.recursion(blocks, 6, 25), blocks, strict=True):
        distance = bound.step(one, distance, 6)
        np.testing.assert_allclose(distance, np.exp(row), rtol=1e-12)


# Local exponent and turning point


@pytest.mark.parametrize("windows", [(None,), (None,) * 2, (None,) * 12, (8, None, 3, None, 8)])
@pytest.mark.parametrize("prompt_tokens", [1, 300])
def test_local_exponent_is_minus_the_slope(
    windows: tuple[int | None, ...], prompt_tokens: int
) -> None:
    """Five points across 4% of t; t is large since between small integers a sum has no slope."""
    blocks = random_blocks(12, windows)
    t = np.array([1e4, 1e6, 1e12, 1e100])
    h = 0.01
    at = [bound.majorant(blocks, prompt_tokens, t * exp(k * h), log=True) for k in (-2, -1, 1, 2)]
    slope = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h)
    # h**4 is 1e-8, and rounding leaves 1e-14 / h of each logarithm of a few hundred
    np.testing.assert_allclose(bound.local_exponent(blocks, prompt_tokens, t), -slope, atol=1e-8)


def test_local_exponent_near_the_prompt_by_hand() -> None:
    """Two blocks: c_0 + c_1 H_1 over P + t, with H_1 a difference of digammas."""
    blocks = [Block(2.0, 9.0, 1.0), Block(3.0, 5.0, 7.0)]
    t = np.array([1.0, 2.0, 3.0, 17.0])
    weight = 10 + 5 * (polygamma(0, 4 + t + 1) - polygamma(0, 5))
    expected = t / (4 + t) - t * 5 * polygamma(1, 4 + t + 1) / weight
    np.testing.assert_allclose(bound.local_exponent(blocks, 4, t), expected, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_local_exponent_of_one_block_is_that_of_the_share(size: str) -> None:
    t = np.array([1, 10, 1e4, 1e9])
    found = bound.local_exponent(random_blocks(1, [None], size), 20, t)
    np.testing.assert_allclose(found, t / (20 + t), rtol=1e-14)


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_local_exponent_tends_to_one_from_below(depth: int) -> None:
    """As 1 - (L-1)/log t + (L-1)(L/g - psi(P+1))/log² t where A = 1 and C = S = g."""
    gain, prompt_tokens = 0.5, 3
    blocks = [Block(1.0, gain, gain)] * depth
    t = np.array([1e30, 1e75, 1e150, 1e300])
    found = bound.local_exponent(blocks, prompt_tokens, t)
    assert (np.diff(found) > 0).all()
    assert (found < 1).all()
    second = (depth - 1) * (depth / gain - polygamma(0, prompt_tokens + 1))
    rest = found - 1 + (depth - 1) / np.log(t) - second / np.log(t) ** 2
    # what is left is of third order: it falls eightfold when log t doubles, and less before that
    assert (np.abs(rest) <= np.abs(rest[-1]) * (np.log(1e300) / np.log(t)) ** 3).all()
    assert abs(rest[-1]) < 0.2 * second / np.log(1e300) ** 2


def test_local_exponent_of_huge_constants_is_finite() -> None:
    """With nothing but the longest chains left it is that of x^(L-1) e^-x, but for O(1/P)."""
    blocks = [Block(1.0, 1e40, 1e40)] * 30
    x = np.array([5.0, 29.0, 60.0])
    t = 10**7 * np.expm1(x)
    expected = t / (10**7 + t) * (1 - 29 / x)
    np.testing.assert_allclose(bound.local_exponent(blocks, 10**7, t), expected, atol=1e-4)


def test_one_block_falls_from_the_start() -> None:
    assert bound.turning_point([Block(3.0, 4.0, 5.0)], 64) == 1.0
    # nor does it rise where relays are too weak
    assert bound.turning_point([Block(1.0, 0.1, 1.0)] * 3, 64) == 1.0


@pytest.mark.parametrize("prompt_tokens", [1, 64, 2000])
@pytest.mark.parametrize("windows", [(None,) * 3, (None,) * 12, (8, None, 3, None, None)])
def test_majorant_rises_to_the_turning_point_and_falls_from_it(
    windows: tuple[int | None, ...], prompt_tokens: int
) -> None:
    blocks = [Block(1.0, 0.0 if w else 50.0, 1.0, w) for w in windows]
    turn = bound.turning_point(blocks, prompt_tokens)
    assert turn > 2
    before = np.geomspace(1, turn, 300)
    after = np.geomspace(turn, 1e300, 3000)
    # between integers below 1000 the continuation is good to a few digits only
    before = np.unique(np.where(before < 1000, np.floor(before), before))
    after = np.unique(np.where(after < 1000, np.ceil(after), after))
    assert (np.diff(bound.majorant(blocks, prompt_tokens, before, log=True)) > 0).all()
    assert (np.diff(bound.majorant(blocks, prompt_tokens, after, log=True)) < 0).all()


@pytest.mark.parametrize("prompt_tokens", [1, 10])
def test_turning_point_is_beside_the_largest_integer(prompt_tokens: int) -> None:
    blocks = [Block(1.0, 20.0, 1.0)] * 4
    t = np.arange(1, 5001)
    largest = t[bound.recursion(blocks, prompt_tokens, 5000)[-1].argmax()]
    assert largest < 5000
    assert abs(bound.turning_point(blocks, prompt_tokens) - largest) <= 1


@pytest.mark.parametrize("last", [1 / 3, 0.66])
def test_turning_point_is_the_last_one(last: float) -> None:
    """The majorant falls, rises, and falls for good: it is (S + x³/6) e^-x up to 1e-6.

    The rise begins and ends where x³ - 3x² + 6 S = 0; with S = 0.66 it takes 0.23 of x.
    """
    prompt_tokens = 10**6
    # three blocks of strong relay, then a source as large as what they have relayed
    blocks = [Block(1.0, 1e6, 1e-18)] * 3 + [Block(1.0, 1e6, last)]
    _, low, high = sorted(np.roots([1, -3, 0, 6 * last]).real)
    turn = bound.turning_point(blocks, prompt_tokens)
    assert np.log1p(turn / prompt_tokens) == pytest.approx(high, rel=1e-4)
    x = np.array([0.2, low - 0.05, low + 0.05, high - 0.05, high + 0.05, 6.0])
    falls = bound.local_exponent(blocks, prompt_tokens, prompt_tokens * np.expm1(x)) > 0
    assert falls.tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("depth", [2, 5, 12, 30])
def test_turning_point_of_strong_relays(depth: int) -> None:
    """Chains of L - 1 relays alone are left: x^(L-1) e^-x, largest at x = L - 1."""
    prompt_tokens = 10**6
    turn = bound.turning_point([Block(1.0, 1e9, 1.0)] * depth, prompt_tokens)
    assert np.log1p(turn / prompt_tokens) == pytest.approx(depth - 1, rel=1e-4)


def test_turning_point_of_200_blocks() -> None:
    """It lies near log t = 200, and the search for it goes no further than floats do."""
    blocks = [Block(1.0, 1.0, 1.0)] * 200
    turn = bound.turning_point(blocks, 64)
    assert 20 < log(turn) < 200
    beside = bound.local_exponent(blocks, 64, [turn / 2, turn * 2])
    assert beside[0] < 0 < beside[1]


# Constants of a block


HEADS: dict[str, Any] = {"nu": 2.0, "gamma": [0.5, 1.5], "chi": [0.25, 2.0], "beta": [3.0, 4.0]}
MLP: dict[str, Any] = {"mu": 0.5, "nu_mlp": 4.0, "difference": 0.75}


def test_sequential_block_by_hand() -> None:
    # mu nu_2 = 2; sum of gamma chi = 0.125 + 3; A = (1 + 2)(1 + 2·2·3.125)
    # sum of gamma (1 + 2 chi) beta = 0.5·1.5·3 + 1.5·5·4 = 32.25; C = 3·2·32.25; S = 0.75 C
    assert block(**HEADS, **MLP) == Block(40.5, 193.5, 145.125)


def test_parallel_block_by_hand() -> None:
    # A = 1 + 2 + 2·2·3.125; C = 2·32.25
    assert block(**HEADS, **MLP, parallel=True) == Block(15.5, 64.5, 48.375)


def test_windowed_block_by_hand() -> None:
    # sum of gamma (1 + 4 chi) = 0.5·2 + 1.5·9 = 14.5; A = 3·(1 + 2·14.5); S as without a window
    assert block(**HEADS, **MLP, window=9) == Block(90.0, 0.0, 145.125, 9)
    assert block(**HEADS, **MLP, window=9, parallel=True) == Block(32.0, 0.0, 48.375, 9)


def test_block_of_one_head_without_mlp() -> None:
    # A = 1 + 2·2·0.5·0.25; C = 2·0.5·1.5·3; heads may come as bare numbers
    found = block(nu=2.0, gamma=0.5, chi=0.25, beta=3.0, difference=2.0)
    assert found == Block(1.5, 4.5, 9.0)
    again = block(nu=2.0, gamma=0.5, chi=0.25, beta=3.0, difference=2.0, parallel=True)
    assert again == found


def test_source_is_proportional_to_the_difference_and_nothing_else_is() -> None:
    for options in ({}, {"parallel": True}, {"window": 5}):
        one, two, none = (
            block(**HEADS, **(MLP | {"difference": m}), **options) for m in (0.75, 1.5, 0.0)
        )
        assert (one.carry, one.relay) == (two.carry, two.relay) == (none.carry, none.relay)
        assert two.source == 2 * one.source
        assert none.source == 0


# The next token


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def apart(p: NDArray[np.float64], q: NDArray[np.float64]) -> tuple[Any, Any]:
    """Total variation and Kullback–Leibler divergence."""
    return np.abs(p - q).sum(-1) / 2, (p * np.log(p / q)).sum(-1)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 5.0])
def test_no_two_laws_are_further_apart_than_the_bound(size: float) -> None:
    """Logits W_U x and W_U y with |x - y| = D, from laws flat to nearly certain."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        unembedding = rng.standard_normal((rng.integers(2, 40), rng.integers(1, 6)))
        x = rng.exponential(3) * rng.standard_normal(unembedding.shape[1])
        y = x + size * rng.standard_normal(unembedding.shape[1])
        distance = np.linalg.norm(x - y)
        kappa = np.linalg.norm(unembedding, axis=1).max()
        variation, divergence = apart(softmax(unembedding @ x), softmax(unembedding @ y))
        at_most = bound.next_token(distance, kappa)
        # where D is 1e-3 the divergence is 1e-7 and less, computed from terms that nearly cancel
        assert variation <= at_most[0] + 1e-15
        assert divergence <= at_most[1] + 1e-15


def test_two_even_tokens_reach_the_bound() -> None:
    """Logits (b, -b)/2 against (-b, b)/2: no smaller constant will do."""
    distance, kappa = np.array([1e-3, 1e-2, 1e-1]), 2.0
    b = kappa * distance
    p = softmax(np.stack([b, -b], -1) / 2)
    variation, divergence = apart(p, p[:, ::-1])
    at_most = bound.next_token(distance, kappa)
    np.testing.assert_allclose(at_most[0] / variation, 1, atol=0.01)
    np.testing.assert_allclose(at_most[1] / divergence, 1, atol=0.01)


def test_total_variation_never_exceeds_one_and_divergence_is_quadratic() -> None:
    distance = np.array([[0.0, 0.1, 0.2], [10.0, 1e6, 1e100]])
    variation, divergence = bound.next_token(distance, 3.0)
    assert variation.shape == divergence.shape == distance.shape
    np.testing.assert_allclose(variation, [[0, 0.15, 0.3], [1, 1, 1]], rtol=1e-14)
    np.testing.assert_allclose(divergence, 4.5 * distance**2, rtol=1e-14)


def test_temperature_divides_kappa() -> None:
    """Logits divided by a temperature: the bound with kappa over it holds and is reached."""
    p = softmax(np.array([0.01, -0.01]) / 4)
    variation, divergence = apart(p, p[::-1])
    at_most = bound.next_token(0.02, 1 / 4)
    assert variation <= at_most[0] <= 1.01 * variation
    assert divergence <= at_most[1] <= 1.01 * divergence


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_lemma_softmax(spread: float) -> None:
    """sum |a' - a| <= 2 max(E|d|, E'|d|), which the page proves, on 2000 pairs of softmaxes."""
    rng = np.random.default_rng(3)
    logits = rng.exponential(3, (2000, 1)) * rng.standard_normal((2000, 9))
    moved = spread * rng.standard_normal((2000, 9)) * (rng.random((2000, 9)) < 0.5)
    a, b = softmax(logits), softmax(logits + moved)
    means = np.maximum((a * np.abs(moved)).sum(-1), (b * np.abs(moved)).sum(-1))
    assert (np.abs(a - b).sum(-1) <= 2 * means + 1e-15).all()


# Refusals

wrong_constant = pytest.mark.parametrize(
    ("value", "named"), [(-1.5, "-1.5"), (nan, "nan"), (inf, "inf")]
)
A_BLOCK = Block(1.0, 1.0, 1.0)


def refused(ask: Callable[[], object], *parts: str) -> None:
    """It is refused in one line that holds every part."""
    with pytest.raises(Refused) as refusal:
        ask()
    for part in parts:
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


@wrong_constant
@pytest.mark.parametrize("name", ["carry", "relay", "source"])
def test_impossible_constant_of_a_block_is_named(name: str, value: float, named: str) -> None:
    values = {"carry": 1.0, "relay": 1.0, "source": 1.0} | {name: value}
    refused(lambda: Block(**values), f"{name} = {named}:")


@wrong_constant
@pytest.mark.parametrize("name", ["nu", "nu_mlp", "mu", "difference"])
def test_impossible_constant_of_a_part_is_named(name: str, value: float, named: str) -> None:
    refused(lambda: block(**(HEADS | MLP | {name: value})), f"{name} = {named}:")


@wrong_constant
@pytest.mark.parametrize("name", ["gamma", "chi", "beta"])
def test_impossible_constant_of_a_head_is_named(name: str, value: float, named: str) -> None:
    for values in ([value, 1.0], [1.0, value]):
        refused(lambda values=values: block(**(HEADS | MLP | {name: values})), f"{name} = {named}:")


@wrong_constant
def test_impossible_distance_is_named(value: float, named: str) -> None:
    refused(lambda: bound.step(A_BLOCK, [1.0, value], 4), f"distance = {named}:")
    refused(lambda: bound.next_token([1.0, value], 1.0), f"distance = {named}:")
    refused(lambda: bound.next_token(1.0, value), f"kappa = {named}:")


@pytest.mark.parametrize("short", ["gamma", "chi", "beta"])
def test_heads_that_disagree_in_number_are_refused(short: str) -> None:
    counts = ", ".join("1" if name == short else "2" for name in ("gamma", "chi", "beta"))
    refused(lambda: block(**(HEADS | MLP | {short: [1.0]})), counts)
    refused(lambda: block(**(HEADS | MLP | {short: [1.0, 1.0, 1.0]})), counts.replace("1", "3"))


def test_impossible_window_is_refused() -> None:
    for window in (0, -3, 2.5, nan):
        refused(lambda window=window: Block(1.0, 0.0, 1.0, window), f"window = {window}:")
        refused(lambda window=window: block(**HEADS, **MLP, window=window), f"window = {window}:")
    refused(lambda: Block(1.0, 0.25, 1.0, 4), "relay = 0.25", "window")


Ask = Callable[[Sequence[Block], Any, Any], object]
AT_POSITIONS: dict[str, Ask] = {
    "majorant": bound.majorant,
    "rate": bound.rate,
    "local_exponent": bound.local_exponent,
}
ALL: dict[str, Ask] = {
    **AT_POSITIONS,
    "recursion": bound.recursion,
    "turning_point": lambda blocks, prompt_tokens, _: bound.turning_point(blocks, prompt_tokens),
}


@pytest.mark.parametrize("name", ALL)
def test_no_blocks_are_refused(name: str) -> None:
    refused(lambda: ALL[name]([], 4, 3), "blocks is empty")


@pytest.mark.parametrize("prompt_tokens", [0, -2, 2.5, nan, inf])
@pytest.mark.parametrize("name", [*ALL, "step"])
def test_impossible_prompt_is_refused(name: str, prompt_tokens: float) -> None:
    asks = ALL | {"step": lambda blocks, p, _: bound.step(blocks[0], [1.0, 2.0], p)}
    refused(
        lambda: asks[name]([A_BLOCK] * 2, prompt_tokens, 3), f"prompt_tokens = {prompt_tokens}:"
    )


@pytest.mark.parametrize(
    ("t", "named"), [(0, "0"), ([4, -1], "-1"), (0.5, "0.5"), (nan, "nan"), (inf, "inf")]
)
@pytest.mark.parametrize("name", AT_POSITIONS)
def test_impossible_position_is_refused(name: str, t: object, named: str) -> None:
    refused(lambda: AT_POSITIONS[name]([A_BLOCK] * 2, 4, t), f"t = {named}:")


@pytest.mark.parametrize("horizon", [0, -1, 2.5, nan, inf])
def test_impossible_horizon_is_refused(horizon: float) -> None:
    refused(lambda: bound.recursion([A_BLOCK], 4, horizon), f"horizon = {horizon}:")  # type: ignore[arg-type]


@pytest.mark.parametrize("distance", [[], 1.0, np.ones((3, 0))])
def test_no_distance_to_start_from_is_refused(distance: Any) -> None:
    refused(lambda: bound.step(A_BLOCK, distance, 4), "horizon = 0:")


# Where it runs


def test_import_needs_numpy_and_scipy_alone() -> None:
    """It also runs in a browser's Python, where the rest cannot be had."""
    code = """
import sys
tried = set()

class Nothing:
    \"\"\"Finds no module that is not of Python, NumPy, SciPy or ours.\"\"\"

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        known = sys.stdlib_module_names | {"numpy", "scipy", "nohair"}
        if top not in known and not top.startswith("_"):  # Python's own settings begin so
            tried.add(top)
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())
import nohair.theory.bound as bound
print(bound.majorant([bound.Block(1.0, 1.0, 3.0)], 2, 1), *tried, *sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer, *loaded = done.stdout.split()
    assert float(answer) == pytest.approx(2)
    assert not {"torch", "transformers", "matplotlib", "xarray", "pandas"} & set(loaded)


@pytest.mark.parametrize("wrong", [nan, -1.0, inf])
def test_looseness_refuses_a_distance_that_is_none_wherever_it_stands(wrong: float) -> None:
    distance = np.ones((2, 3))
    distance[1, 2] = wrong
    with pytest.raises(Refused, match=r"distance = (nan|-1|inf): .*"):
        bound.looseness([bound.Block(1, 1, 1)] * 2, distance, 2)
