r"""An effective relay: the relay model's own terms, with coefficients fitted to measured distances.

Block by block, with coefficients that are not negative,

.. math::

    D_l(t) \approx A_l D_{l-1}(t) + \frac{P S_l + C_l \sum_{s \le t} D_{l-1}(s)}{P + t}
    + \frac{(W - t)_+ N_l + R_l \sum_{t - W < s \le t} D_{l-1}(s)}{W} ,

the last fraction for heads that see W keys only, as in the theorem's extension; without a window
it is left out. Carry and relay are nearly collinear on smooth curves, so single coefficients mean
little; what the whole explains is what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from nohair import decay
from nohair.errors import Refused
from nohair.theory import symmetric
from nohair.theory.symmetric import Array

ROUNDS = 60  # of reweighted least squares; most fits settle within ten


@dataclass(frozen=True)
class Effective:
    """Fitted coefficients.

    Parameters
    ----------
    coefficients
        (L, 3): carry A, source S, relay C; with a window (L, 5): near source N and near relay R
        too.
    prompt_tokens
        P.
    window
        W, or None.
    """

    coefficients: Array
    prompt_tokens: int
    window: int | None = None

    def chained(self, horizon: int) -> Array:
        """Run the blocks one after another from zero: distance at t = 1 … T, (L, T)."""
        horizon = symmetric.whole("horizon", horizon)
        now, rows = np.zeros(horizon), []
        for row in self.coefficients:
            now = _terms(now, self.prompt_tokens, self.window) @ row
            rows.append(now)
        return np.stack(rows)

    def stepped(self, distance: ArrayLike) -> Array:
        """Apply each block to the measured distance before it, (L, T)."""
        before = _before(_measured(distance))
        if len(before) != len(self.coefficients):
            raise Refused(f"{len(before)} layers measured, {len(self.coefficients)} fitted")
        return np.stack(
            [
                _terms(d, self.prompt_tokens, self.window) @ row
                for d, row in zip(before, self.coefficients, strict=True)
            ]
        )


def fit(
    distance: ArrayLike,
    prompt_tokens: int,
    window: int | None = None,
    *,
    chained: bool = True,
    last: int | None = None,
) -> Effective:
    """Fit the coefficients by least squares on log D over bins that are even in log t.

    Parameters
    ----------
    distance
        Measured after every block, (L, T), t = 1 … T.
    prompt_tokens
        P.
    window
        W, or None for no near keys.
    chained
        Fit each block behind the fitted blocks before it, so that the chain as a whole stays
        close; else behind the measured distance.
    last
        Use t up to here only, to see what the rest is predicted as.

    Raises
    ------
    Refused
        A distance that is not positive or not finite; fewer t than coefficients.
    """
    measured = _measured(distance)
    prompt_tokens = symmetric.whole("prompt_tokens", prompt_tokens)
    if window is not None:
        window = symmetric.whole("window", window, least=2)
    if last is not None:
        measured = measured[:, : symmetric.whole("last", last)]
    if measured.shape[1] < 16:
        raise Refused(f"{measured.shape[1]} positions: a fit needs at least 16")
    now, rows = np.zeros(measured.shape[1]), []
    for before, goal in zip(_before(measured), measured, strict=True):
        terms = _terms(now if chained else before, prompt_tokens, window)
        rows.append(_solve(terms, np.log(goal)))
        now = terms @ rows[-1]
    return Effective(np.stack(rows), prompt_tokens, window)


def explained(distance: ArrayLike, predicted: ArrayLike, *, first: int = 1) -> Array:
    r"""Say what part of the variance of log D over bins a prediction explains, block by block.

    Parameters
    ----------
    distance, predicted
        Measured and predicted, (L, T), t = 1 … T.
    first
        Count t from here on only.

    Returns
    -------
    numpy.ndarray
        :math:`R^2`, (L,); 1 is all, and a constant explains nothing.

    Raises
    ------
    Refused
        Shapes that disagree; a value that is not positive or not finite; less than an octave.
    """
    first = symmetric.whole("first", first)
    measured, given = _measured(distance), _measured(predicted)
    if measured.shape != given.shape:
        raise Refused(f"predicted is of shape {given.shape}, distance of {measured.shape}")
    if first > measured.shape[1] // 2:
        raise Refused(f"first = {first} of {measured.shape[1]} positions: give an octave or more")
    goal, found = _binned(np.log(measured), first), _binned(np.log(given), first)
    rest = ((goal - found) ** 2).sum(axis=1)
    return np.asarray(1 - rest / ((goal - goal.mean(axis=1, keepdims=True)) ** 2).sum(axis=1))


def _solve(terms: Array, goal: Array) -> Array:
    """Nonnegative coefficients for which the logarithm of the sum is closest to `goal`.

    Least squares on a logarithm is a sequence of linear ones, each around the one before.
    """
    aim = _binned(goal)
    weight = 1 / np.exp(goal)
    row, _ = nnls(_binned((terms * weight[:, None]).T).T, np.ones_like(aim))
    best, least = row, np.inf
    for _ in range(ROUNDS):
        now = terms @ row
        if not (now > 0).all():
            break
        off = aim - _binned(np.log(now))
        if (square := float(off @ off)) < least * (1 - 1e-9):
            best, least = row, square
        elif square > least:
            row = (row + best) / 2  # a step too far
            continue
        else:
            break
        slopes = _binned((terms / now[:, None]).T).T
        row, _ = nnls(slopes, slopes @ row + off)
    return np.asarray(best)


def _terms(before: Array, prompt_tokens: int, window: int | None) -> Array:
    """What the coefficients multiply, (T, 3) or (T, 5)."""
    t = np.arange(1, before.size + 1)
    keys = prompt_tokens + t
    columns = [before, prompt_tokens / keys, before.cumsum() / keys]
    if window is not None:
        near = np.convolve(before, np.ones(min(window, before.size)))[: before.size]
        columns += [np.maximum(window - t, 0) / window, near / window]
    return np.stack(columns, axis=1)


def _before(measured: Array) -> Array:
    return np.concatenate([np.zeros_like(measured[:1]), measured[:-1]])


def _binned(values: Array, first: int = 1) -> Array:
    """Average over bins that are even in log t, along the last axis."""
    t = np.arange(1, values.shape[-1] + 1)
    labels = decay.bins(t, (1.0, float(t[-1])))
    _, heads, counts = np.unique(labels[first - 1 :], return_index=True, return_counts=True)
    return np.asarray(np.add.reduceat(values[..., first - 1 :], heads, axis=-1) / counts)


def _measured(distance: ArrayLike) -> Array:
    values = symmetric.numbers("distance", distance)
    if values.ndim != 2 or not values.size:
        raise Refused(f"distance of shape {values.shape}: give (layers, t)")
    wrong = values[~(np.isfinite(values) & (values > 0))]
    if wrong.size:
        raise Refused(f"distance = {wrong.flat[0]:g}: only positive ones have a logarithm")
    return values
