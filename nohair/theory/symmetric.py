r"""Weights of relay chains: the symmetric polynomials that dilution sums into.

A chain of i relays ends at position t and passes :math:`s_1 \le \dots \le s_i \le t`; each relay is
one key among P + s. All chains of length i together weigh

.. math:: H_i(t) = \sum_{1 \le s_1 \le \dots \le s_i \le t} \prod_k \frac{1}{P + s_k} ,

the complete homogeneous symmetric polynomial of :math:`1/(P+1), \dots, 1/(P+t)`; about
:math:`\log^i(1 + t/P) / i!`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import zeta

from nohair.errors import Refused

Array = NDArray[np.float64]

SUMMED = 1000  # keys up to here are summed one by one; beyond, the remainder is below rounding


def complete(t: ArrayLike, prompt_tokens: int, count: int) -> Array:
    r"""Evaluate :math:`H_0, \dots, H_{count-1}` at every t.

    By Newton's identity :math:`i H_i = \sum_{k=1}^i p_k H_{i-k}`, whose terms are all positive: no
    digit is lost, up to t = 1e12 and beyond.

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
    t = positions(t, 0)
    check_prompt(prompt_tokens)
    sums = _power_sums(t, prompt_tokens, count - 1)
    weights = [np.ones_like(t)]
    for i in range(1, count):
        terms = [sums[k] * weights[i - k] for k in range(1, i + 1)]
        weights.append(np.sum(terms, axis=0) / i)
    return np.stack(weights)


def slope(t: ArrayLike, prompt_tokens: int, weights: Array) -> Array:
    r"""Derivatives :math:`dH_i/dt` at every t, of what `complete` gave there.

    The sums over keys are continued to real t by :math:`\zeta`:
    :math:`H_i' = \sum_{k \ge 1} \zeta(k+1, P+t+1) H_{i-k}`.
    """
    t = positions(t, 0)
    steps = [zeta(k + 1, prompt_tokens + t + 1) for k in range(1, len(weights))]
    slopes = [np.zeros_like(t)]
    for i in range(1, len(weights)):
        terms = [steps[k - 1] * weights[i - k] for k in range(1, i + 1)]
        slopes.append(np.sum(terms, axis=0))
    return np.stack(slopes)


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


def check_prompt(prompt_tokens: int) -> None:
    """Refuse a prompt of less than one token.

    Raises
    ------
    Refused
        P is below 1 or no whole number.
    """
    if not prompt_tokens >= 1 or prompt_tokens != int(prompt_tokens):
        raise Refused(f"prompt_tokens = {prompt_tokens}: give a whole number of at least 1")


def _power_sums(t: Array, prompt_tokens: int, most: int) -> dict[int, Array]:
    r"""Sums :math:`p_k(t) = \sum_{s \le t} (P+s)^{-k}`, k = 1 … most.

    Term by term while P + s is small, then by the midpoint rule of Euler and Maclaurin. Differences
    of polygamma functions, the textbook way, lose their digits where P is large beside t.
    """
    summed = np.minimum(np.floor(t), max(0, SUMMED - prompt_tokens))
    few = np.arange(1, int(summed.max(initial=0)) + 1, dtype=float)
    at = summed.astype(int)
    begin, end = prompt_tokens + summed + 0.5, prompt_tokens + t + 0.5
    ratio = np.log1p((t - summed) / begin)
    sums = {}
    for k in range(1, most + 1):
        head = np.concatenate([[0.0], np.cumsum((prompt_tokens + few) ** -float(k))])[at]
        whole = ratio if k == 1 else -(begin ** (1 - k)) * np.expm1((1 - k) * ratio) / (k - 1)
        first = k / 24 * (begin ** (-k - 1.0) - end ** (-k - 1.0))
        third = 7 * k * (k + 1) * (k + 2) / 5760 * (begin ** (-k - 3.0) - end ** (-k - 3.0))
        sums[k] = head + whole - first + third
    return sums
