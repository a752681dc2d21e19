r"""Weights of relay chains: the symmetric polynomials that dilution sums into.

A chain of i relays ends at position t and passes :math:`s_1 \le \dots \le s_i \le t`; each relay is
one key among P + s. All chains of length i together weigh

.. math:: H_i(t) = \sum_{1 \le s_1 \le \dots \le s_i \le t} \prod_k \frac{1}{P + s_k} ,

the complete homogeneous symmetric polynomial of :math:`1/(P+1), \dots, 1/(P+t)`; about
:math:`\log^i(1 + t/P) / i!`.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp, zeta

from nohair.errors import Refused

Array = NDArray[np.float64]

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
    logs = [np.zeros_like(t)]
    for i in range(1, count):
        logs.append(_newton(sums, logs, i) - np.log(i))
    return np.stack(logs)


def log_slope(t: ArrayLike, prompt_tokens: int, log_weights: Array) -> Array:
    r"""Evaluate logarithms of :math:`dH_i/dt` at every t, from what `log_complete` gave there.

    Sums over keys are continued to real t by :math:`\zeta`:
    :math:`H_i' = \sum_{k \ge 1} \zeta(k+1, P+t+1) H_{i-k}`.
    """
    t = positions(t, 0)
    count = len(log_weights)
    steps = [_log_zeta(k + 1, prompt_tokens + t + 1) for k in range(1, count)]
    slopes = [np.full_like(t, -inf)]
    slopes += [_newton(steps, list(log_weights), i) for i in range(1, count)]
    return np.stack(slopes)


def _newton(sums: list[Array], logs: list[Array], i: int) -> Array:
    """Logarithm of the sum over k = 1 … i of sums[k-1] * logs[i-k], both given as logarithms."""
    return np.asarray(logsumexp([sums[k - 1] + logs[i - k] for k in range(1, i + 1)], axis=0))


def positions(t: ArrayLike, least: float = 1) -> Array:
    """Turn positions into an array of floats.

    Raises
    ------
    Refused
        One is not finite, or below `least`.
    """
    array = np.asarray(t, np.float64)
    wrong = array[~(np.isfinite(array) & (array >= least))]
    if wrong.size:
        raise Refused(f"t = {wrong.flat[0]:g}: positions are finite and at least {least:g}")
    return array


def whole(name: str, value: float) -> None:
    """Refuse what is no whole number of at least one.

    Raises
    ------
    Refused
        `value` is below 1, not finite, or has a fraction.
    """
    if not (value >= 1 and float(value).is_integer()):
        raise Refused(f"{name} = {value:g}: give a whole number of at least 1")


def _log_power_sums(t: Array, prompt_tokens: int, most: int) -> list[Array]:
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
    sums = []
    for k in range(1, most + 1):
        head = np.concatenate([[0.0], np.cumsum((unit / few) ** k)])[at]
        rest = ratio if k == 1 else -(begin ** (1.0 - k)) * np.expm1((1 - k) * ratio) / (k - 1)
        first = k / 24 * (begin ** (-k - 1.0) - end ** (-k - 1.0)) / unit
        third = 7 * k * (k + 1) * (k + 2) / 5760 * (begin ** (-k - 3.0) - end ** (-k - 3.0))
        with np.errstate(divide="ignore"):
            scaled = np.log(head + unit * rest - first + third / unit**3)
        sums.append(scaled - k * np.log(unit))
    return sums


def _log_zeta(s: int, q: Array) -> Array:
    """Logarithm of Hurwitz's zeta function, by the midpoint rule where its value underflows."""
    direct, middle = zeta(s, q), q - 0.5
    with np.errstate(divide="ignore"):
        plain = np.log(direct)
    correction = np.log1p(-np.minimum(s * (s - 1) / 24 / middle / middle, 0.5))
    tail = -(s - 1) * np.log(middle) - np.log(s - 1) + correction
    return np.asarray(np.where(direct > 1e-290, plain, tail))
