r"""Weights of relay chains: the symmetric polynomials that dilution sums into.

A chain of i relays ends at position t and passes :math:`s_1 \le \dots \le s_i \le t`; each relay is
one key among P + s. All chains of length i together weigh

.. math:: H_i(t) = \sum_{1 \le s_1 \le \dots \le s_i \le t} \prod_k \frac{1}{P + s_k} ,

the complete homogeneous symmetric polynomial of :math:`1/(P+1), \dots, 1/(P+t)`; about
:math:`\log^i(1 + t/P) / i!`.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import zeta

from nohair.errors import Refused

Array = NDArray[np.float64]

MOST = 2**53
SUMMED = 1000  # keys up to here are summed one by one; beyond, the remainder is below rounding


def complete(t: ArrayLike, prompt_tokens: int, count: int) -> Array:
    r"""Evaluate :math:`H_0, \dots, H_{count-1}` at every t.

    Parameters
    ----------
    t
        Positions, at least 0; any shape.
    prompt_tokens
        P.
    count
        How many.

    Returns
    -------
    numpy.ndarray
        Of shape (count, \*t.shape).

    Raises
    ------
    Refused
        A negative or not finite t, or fewer than one prompt token.
    """
    return np.exp(log_complete(t, prompt_tokens, count))


def log_complete(t: ArrayLike, prompt_tokens: int, count: int) -> Array:
    r"""Evaluate the logarithms of what `complete` gives, however small or large.

    By Newton's identity :math:`i H_i = \sum_{k=1}^i p_k H_{i-k}` with the power sums
    :math:`p_k = \sum_{s \le t} (P+s)^{-k}`. All terms are positive, so nothing cancels, up to
    t = 1e12 and beyond.
    """
    t = positions(t, 0)
    whole("prompt_tokens", prompt_tokens)
    sums = _log_power_sums(t, prompt_tokens, count - 1)
    logs = np.zeros((count, *t.shape))
    for i in range(1, count):
        logs[i] = _newton(sums, logs, i) - np.log(i)
    return logs


def log_slope(t: ArrayLike, prompt_tokens: int, log_weights: Array) -> Array:
    r"""Evaluate logarithms of :math:`dH_i/dt` at every t, from what `log_complete` gave there.

    Sums over keys are continued to real t by :math:`\zeta`:
    :math:`H_i' = \sum_{k \ge 1} \zeta(k+1, P+t+1) H_{i-k}`.
    """
    t = positions(t, 0)
    count = len(log_weights)
    steps = np.stack([_log_zeta(k + 1, prompt_tokens + t + 1) for k in range(1, count + 1)])
    slopes = np.full_like(log_weights, -inf)
    for i in range(1, count):
        slopes[i] = _newton(steps, log_weights, i)
    return slopes


def _newton(sums: Array, logs: Array, i: int) -> Array:
    """Logarithm of the sum over k = 1 … i of sums[k-1] * logs[i-k], both given as logarithms.

    The innermost loop of everything here: `scipy.special.logsumexp` takes six times as long.
    """
    terms = sums[:i] + logs[:i][::-1]
    top = terms.max(axis=0)
    top = np.where(np.isfinite(top), top, 0.0)  # where nothing is summed
    terms -= top
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(terms, out=terms).sum(axis=0)) + top)


def positions(t: ArrayLike, least: float = 1) -> Array:
    """Turn positions into an array of floats.

    Raises
    ------
    Refused
        One is not finite, or below `least`.
    """
    array = numbers("t", t)
    wrong = array[~(np.isfinite(array) & (array >= least))]
    if wrong.size:
        raise Refused(f"t = {wrong.flat[0]:g}: positions are finite and at least {least:g}")
    return array


def numbers(name: str, values: ArrayLike) -> Array:
    """Turn numbers into an array of floats.

    Raises
    ------
    Refused
        `values` are no numbers.
    """
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise Refused(f"{name} = {values!r}: give numbers") from None


def whole(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number as an int, and refuse what is none or is below `least`.

    Raises
    ------
    Refused
        `value` is too small, too large to be counted exactly, not finite, has a fraction, or is no
        number.
    """
    try:
        fits = value >= least and float(value).is_integer()
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        raise Refused(f"{name} = {shown}: give a whole number of at least {least}")
    if value > MOST:
        raise Refused(f"{name} = {float(value):g}: floats count exactly up to {MOST:g} only")
    return int(value)


def amount(name: str, value: Any) -> float:
    """Return a number as a float, and refuse what is negative, not finite, or no number.

    Raises
    ------
    Refused
        See above.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = inf
    if not 0 <= number < inf:
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        raise Refused(f"{name} = {shown}: give a finite number of at least 0")
    return number


def _log_power_sums(t: Array, prompt_tokens: int, most: int) -> Array:
    r"""Logarithms of :math:`p_k(t) = \sum_{s \le t} (P+s)^{-k}`, k = 1 … most.

    Term by term while P + s is small, then by the midpoint rule of Euler and Maclaurin, in units
    of the largest term. Differences of polygamma functions, the textbook way, lose their digits
    where P is large beside t.
    """
    unit = prompt_tokens + 1.0
    summed = np.minimum(np.floor(t), max(0, SUMMED - prompt_tokens))
    few = prompt_tokens + np.arange(1, int(summed.max(initial=0)) + 1, dtype=float)
    at = summed.astype(int)
    begin, end = (prompt_tokens + summed + 0.5) / unit, (prompt_tokens + t + 0.5) / unit
    ratio = np.log1p((t - summed) / (prompt_tokens + summed + 0.5))
    sums = np.empty((most, *t.shape))
    for k in range(1, most + 1):
        head = np.concatenate([[0.0], np.cumsum((unit / few) ** k)])[at]
        rest = ratio if k == 1 else -(begin ** (1.0 - k)) * np.expm1((1 - k) * ratio) / (k - 1)
        first = k / 24 * (begin ** (-k - 1.0) - end ** (-k - 1.0)) / unit
        third = 7 * k * (k + 1) * (k + 2) / 5760 * (begin ** (-k - 3.0) - end ** (-k - 3.0))
        with np.errstate(divide="ignore"):
            scaled = np.log(head + unit * rest - first + third / unit**3)
        sums[k - 1] = scaled - k * np.log(unit)
    return sums


def _log_zeta(s: int, q: Array) -> Array:
    """Logarithm of Hurwitz's zeta function, by the midpoint rule where its value underflows."""
    direct, middle = zeta(s, q), q - 0.5
    with np.errstate(divide="ignore"):
        plain = np.log(direct)
    correction = np.log1p(-np.minimum(s * (s - 1) / 24 / middle / middle, 0.5))
    tail = -(s - 1) * np.log(middle) - np.log(s - 1) + correction
    return np.asarray(np.where(direct > 1e-290, plain, tail))
