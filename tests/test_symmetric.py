"""Weights of relay chains against every chain written out, and against 60 digits."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement, pairwise
from math import factorial, inf, log, nan, prod
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import polygamma

from nohair.errors import Refused
from nohair.theory import symmetric
from nohair.theory.symmetric import complete, log_complete, log_slope

pytestmark = pytest.mark.filterwarnings("error")

# A sum of positive terms keeps its digits: what is left are a few dozen roundings of 1e-16.
ROUNDING = 1e-13


def chains(prompt_tokens: int, t: int, relays: int) -> Fraction:
    """Every list 1 <= s_1 <= ... <= s_i <= t, one after the other."""
    lists = combinations_with_replacement(range(1, t + 1), relays)
    return sum((prod(Fraction(1, prompt_tokens + s) for s in one) for one in lists), Fraction(0))


def to_60_digits(prompt_tokens: int, t: float, count: int, shift: str = "0") -> list[Any]:
    r"""Coefficients of :math:`\prod_s (1 - z/(P+s))^{-1} = \prod_k \exp(p_k z^k / k)`.

    The power sums p are differences of psi and zeta, continued to t + shift; what these cancel is
    spare among 120 digits.
    """
    with mpmath.workdps(120):
        low, high = mpmath.mpf(prompt_tokens + 1), mpmath.mpf(prompt_tokens) + t + 1
        high += mpmath.mpf(shift)
        series = [mpmath.mpf(1)] + [mpmath.mpf(0)] * (count - 1)
        for k in range(1, count):
            ends = [mpmath.psi(0, x) if k == 1 else -mpmath.zeta(k, x) for x in (low, high)]
            factor = (ends[1] - ends[0]) / k
            series = [
                sum(factor**j / factorial(j) * series[n - k * j] for j in range(n // k + 1))
                for n in range(count)
            ]
        return series


@pytest.mark.parametrize("prompt_tokens", [1, 2, 5, 40])
@pytest.mark.parametrize("t", [0, 1, 2, 3, 6])
def test_weights_are_the_sum_over_all_chains(prompt_tokens: int, t: int) -> None:
    expected = [float(chains(prompt_tokens, t, i)) for i in range(6)]
    np.testing.assert_allclose(complete(t, prompt_tokens, 6), expected, rtol=ROUNDING)


def test_chains_of_two_relays_after_two_tokens() -> None:
    """Worked by hand; the first two lines are the example of the book's page on the proof."""
    known = {
        1: Fraction(1, 9),
        2: Fraction(37, 144),
        3: Fraction(1489, 3600),
        10: Fraction(1108515013, 768398400),
    }
    assert known[2] == Fraction(1, 9) + Fraction(1, 12) + Fraction(1, 16)
    found = complete(list(known), 2, 3)[2]
    np.testing.assert_allclose(found, [float(value) for value in known.values()], rtol=ROUNDING)


@pytest.mark.parametrize("prompt_tokens", [1, 7, 300, 999, 1000, 1001, 5000])
def test_last_relay_at_each_position_in_turn(prompt_tokens: int) -> None:
    """Chains sorted by their last position; t passes the place where sums become integrals."""
    t = np.arange(1, 3001)
    expected = [np.ones(len(t))]
    for _ in range(11):
        expected.append(np.cumsum(expected[-1] / (prompt_tokens + t)))
    # a running sum of 3000 terms may round 3000 times; errors of one sign are the worst case
    np.testing.assert_allclose(complete(t, prompt_tokens, 12), expected, rtol=3000 * 2**-53)


@pytest.mark.parametrize("prompt_tokens", [1, 150, 999, 1000, 1001, 12345, 10**8])
def test_one_position_has_one_chain_of_each_length(prompt_tokens: int) -> None:
    """The sharpest test of the integrals in place of sums: nothing else covers their error."""
    expected = (prompt_tokens + 1.0) ** -np.arange(25)
    np.testing.assert_allclose(complete(1, prompt_tokens, 25), expected, rtol=ROUNDING)


@pytest.mark.parametrize("prompt_tokens", [1, 64, 10**8])
@pytest.mark.parametrize("t", [1e3, 1e6, 1e12, 1e18])
def test_weights_keep_their_digits_far_out_and_beside_a_long_prompt(
    prompt_tokens: int, t: float
) -> None:
    expected = [float(x) for x in to_60_digits(prompt_tokens, t, 32)]
    # Up to 1000 keys are summed one by one, which costs a sum 20 roundings or so and H_i i times
    # that; and a logarithm of size x is known to x roundings, those of (P + 1)^-k, k < 32, are met.
    largest = max(np.abs(np.log(expected)).max(), 31 * log(prompt_tokens + 1))
    tolerance = (32 * 20 + 2 * largest) * 2**-53
    np.testing.assert_allclose(complete(t, prompt_tokens, 32), expected, rtol=tolerance)


def test_weights_stay_finite_and_right_at_1e300() -> None:
    """One relay: the difference of two digammas; two: half of the square and of its diagonal."""
    t, prompt_tokens = 1e300, 3
    one = log(t) - polygamma(0, prompt_tokens + 1)
    two = (one**2 + polygamma(1, prompt_tokens + 1)) / 2
    found = complete(t, prompt_tokens, 40)
    np.testing.assert_allclose(found[:3], [1, one, two], rtol=1e-14)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("prompt_tokens", [1, 3, 64, 10**5])
def test_weights_are_log_concave_in_the_number_of_relays(prompt_tokens: int) -> None:
    found = complete([1, 2, 10, 1e3, 1e6, 1e12], prompt_tokens, 30)
    square, ends = found[1:-1] ** 2, found[:-2] * found[2:]
    # at t = 1 the sequence is geometric and the two are equal up to rounding
    assert (square >= ends * (1 - 1e-13)).all()
    assert (square[:, 1:] > ends[:, 1:]).all()


@pytest.mark.parametrize("prompt_tokens", [1, 3, 64, 10**5])
def test_lemma_of_chains(prompt_tokens: int) -> None:
    """One more relay multiplies by at most H_1, which is at most the logarithm."""
    t = np.array([1, 2, 10, 1e3, 1e6, 1e12])
    found = complete(t, prompt_tokens, 20)
    one = found[1]
    # at t = 1 there is one chain of each length, and the two are equal up to rounding
    assert (found[2:] <= found[1:-1] * one * (1 + ROUNDING)).all()
    assert (one <= np.log1p(t / prompt_tokens)).all()
    # and at least the share of the chains in any order that are sorted
    for i in range(2, 20):
        assert (found[i] >= one**i / factorial(i)).all()


def test_long_prompt_makes_weights_powers_of_the_logarithm() -> None:
    """Over i!: H_i differs from it by about i²/P."""
    prompt_tokens = 10**9
    t = prompt_tokens * np.expm1([0.5, 1.0, 4.0])
    expected = [np.array([0.5, 1.0, 4.0]) ** i / factorial(i) for i in range(8)]
    np.testing.assert_allclose(complete(t, prompt_tokens, 8), expected, rtol=1e-7)


def test_weights_grow_with_t_and_fall_with_the_prompt() -> None:
    t = np.unique(np.round(np.geomspace(1, 1e12, 400)))
    weights = [complete(t, prompt_tokens, 10)[1:] for prompt_tokens in (1, 2, 990, 1010, 10**6)]
    assert all((np.diff(one, axis=-1) > 0).all() for one in weights)
    assert all((more > less).all() for more, less in pairwise(weights))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shape_is_that_of_the_positions(count: int) -> None:
    t = np.array([[1.0, 500.0, 1e6], [999.0, 2.0, 1e12]])
    found = complete(t, 30, count)
    assert found.shape == (count, 2, 3)
    assert complete(5, 30, count).shape == (count,)
    assert complete([], 30, count).shape == (count, 0)
    for place in np.ndindex(t.shape):  # positions do not see each other
        alone = complete(t[place], 30, count)
        np.testing.assert_array_equal(found[(slice(None), *place)], alone)


def slope(t: float, prompt_tokens: int, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Derivatives in plain numbers, from weights in plain numbers."""
    with np.errstate(divide="ignore"):
        return np.exp(log_slope(t, prompt_tokens, np.log(weights)))


def _differences(prompt_tokens: int, t: float, count: int) -> NDArray[np.float64]:
    """Central difference, of width 2e-30, in 120 digits."""
    sides = [to_60_digits(prompt_tokens, t, count, shift) for shift in ("1e-30", "-1e-30")]
    both = zip(*sides, strict=True)
    return np.array([float((a - b) * 5 * 10**29) for a, b in both])


@pytest.mark.parametrize("prompt_tokens", [1, 64, 10**8])
@pytest.mark.parametrize("t", [0.0, 1.0, 2.5, 1000.0, 1e6, 1e12])
def test_slope_is_the_derivative_of_the_continued_weights(prompt_tokens: int, t: float) -> None:
    weights = np.array([float(x) for x in to_60_digits(prompt_tokens, t, 10)])
    expected = _differences(prompt_tokens, t, 10)
    found = slope(t, prompt_tokens, weights)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=1e-300)


def test_slopes_have_the_shape_of_the_weights() -> None:
    t = np.array([[1.0, 7.0], [1e3, 1e9]])
    weights = complete(t, 5, 4)
    found = slope(t, 5, weights)
    assert found.shape == weights.shape
    for place in np.ndindex(t.shape):
        where = (slice(None), *place)
        np.testing.assert_allclose(found[where], slope(t[place], 5, weights[where]), rtol=1e-15)
    assert slope(3.0, 5, complete(3.0, 5, 1)).tolist() == [0.0]


@pytest.mark.parametrize(
    ("t", "named"),
    [(-1, "-1"), ([3, -2.5, 4], "-2.5"), (nan, "nan"), ([inf], "inf"), (-inf, "-inf")],
)
def test_impossible_position_is_refused_by_its_value(t: object, named: str) -> None:
    for ask in (
        lambda: complete(t, 4, 3),  # type: ignore[arg-type]
        lambda: log_complete(t, 4, 3),  # type: ignore[arg-type]
        lambda: log_slope(t, 4, np.zeros(3)),  # type: ignore[arg-type]
        lambda: symmetric.positions(t),  # type: ignore[arg-type]
    ):
        with pytest.raises(Refused) as refusal:
            ask()
        assert f"t = {named}:" in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_position_zero_has_the_empty_chain_only() -> None:
    assert complete(0, 4, 3).tolist() == [1.0, 0.0, 0.0]
    with pytest.raises(Refused, match=r"t = 0: .* at least 1"):
        symmetric.positions(0)


@pytest.mark.parametrize("prompt_tokens", [0, -3, 1.5, nan, inf])
def test_impossible_prompt_is_refused_by_its_value(prompt_tokens: float) -> None:
    with pytest.raises(Refused) as refusal:
        complete(3, prompt_tokens, 3)  # type: ignore[arg-type]
    assert f"prompt_tokens = {prompt_tokens}:" in str(refusal.value)
    assert "\n" not in str(refusal.value)
