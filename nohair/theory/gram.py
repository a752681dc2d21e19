r"""Covariances of the states of a wide random network, carried from block to block.

A covariance over positions is kept for cells of neighbouring positions: one number for each pair of
cells, and one more per cell for a position with itself. With cells of one position each that is
the full matrix; with cells that grow like their distance from where the prompt or the continuation
begins, a few hundred cells reach any horizon.

In memory it is one array: the matrix, and the diagonal as one more row below it. What acts on each
entry alone then acts on both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb

import numpy as np

from nohair.theory.symmetric import Array

STRIP = 64  # rows
RESOLVED = 1e-12  # of a covariance; some thousand roundings
FINE, GROWTH = 40, 0.04  # positions of their own at either beginning, then cells of 4 % of the way


class Cells:
    """Positions 1 … P + T, cut into cells.

    Parameters
    ----------
    prompt_tokens, horizon
        P, T.
    fine
        Give every position a cell of its own.
    """

    def __init__(self, prompt_tokens: int, horizon: int, *, fine: bool) -> None:
        if fine:
            prompt, text = [1] * prompt_tokens, [1] * horizon
        else:
            prompt, text = list(_cut(prompt_tokens)), list(_reach(horizon))
        self.sizes = np.array(prompt + text, float)
        self.middle = self.sizes.cumsum() - (self.sizes - 1) / 2
        self.prompt = np.arange(len(self.sizes)) < len(prompt)
        self._fine = bool((self.sizes == 1).all())
        self._scale = 1 / np.outer(self.middle, self.middle)

    def covariance(self, apart: float, equal: Array) -> Array:
        """Make one: `apart` between any two positions, `equal` (cells,) of one with itself."""
        count = len(self.sizes)
        return np.concatenate([np.full((count, count), apart), equal[None]])

    def mean(self, given: Array) -> Array:
        r"""Average both arguments over all positions up to each: :math:`C M C^\top`."""
        matrix, own = given[:-1], given[-1]
        result = np.empty_like(given)
        summed = result[:-1]
        if self._fine:
            summed[:] = matrix
            np.fill_diagonal(summed, own)
            np.cumsum(summed, axis=0, out=summed)
            np.cumsum(summed, axis=1, out=summed)
        else:
            # What a position has in common with itself alone counts up to the earlier of the two.
            alone = self._sum((own - matrix.diagonal())[:, None])[:, 0]
            cell = np.arange(len(own))
            both = self._sum(self._sum(matrix).T).T
            summed[:] = both + alone[np.minimum.outer(cell, cell)]
        summed *= self._scale
        result[-1] = summed.diagonal()
        return result

    def _sum(self, values: Array) -> Array:
        """Sum over all positions up to the middle of each cell, along the first axis."""
        weights = self.sizes[:, None]
        return (weights * values).cumsum(axis=0) - (weights - 1) / 2 * values


@dataclass(frozen=True)
class Block:
    """What a block of random weights adds to a covariance.

    Parameters
    ----------
    attention
        A²: what the covariance of averaged inputs is multiplied by.
    mlp
        B²: what the kernel of the MLP is multiplied by.
    hidden
        F, the kernel.
    logit
        s²: variance of the attention logits.
    parallel
        Attention and MLP read the same state.
    post_norm
        What a sub-block adds is normalised.
    epsilon
        In every norm.
    """

    attention: float
    mlp: float
    hidden: Callable[[Array], Array]
    logit: float = 0.0
    parallel: bool = False
    post_norm: bool = False
    epsilon: float = 0.0


# Covariances travel together: within a run, and last the one across the two runs. Beside each
# stands which two of them hold the norms of its positions.
ALIKE = ((0, 0), (0, 0))  # both runs have the same covariance
APART = ((0, 0), (1, 1), (0, 1))


def propagate(
    block: Block,
    layers: int,
    cells: Cells,
    grams: Sequence[Array],
    pairs: Sequence[tuple[int, int]] = ALIKE,
) -> Iterator[Array]:
    """Carry covariances through L equal blocks, and yield :math:`D^2/d` per cell after each.

    Zero where the difference of the covariances is lost in their rounding.

    Parameters
    ----------
    block, layers
        What is repeated, and how often.
    cells
        The positions.
    grams
        Covariances at the embeddings.
    pairs
        `ALIKE` or `APART`.
    """
    first, second = pairs[-1]
    for _ in range(layers):
        inputs = _normalised(grams, pairs, block.epsilon)
        read = [block.attention * _attended(u, cells, block.logit) for u in inputs]
        grams = _added(grams, read, pairs, block)
        if not block.parallel:
            inputs = _normalised(grams, pairs, block.epsilon)
        made = [block.mlp * _by_strips(block.hidden, u) for u in inputs]
        grams = _added(grams, made, pairs, block)
        size = grams[first][-1] + grams[second][-1]
        square = size - 2 * grams[-1][-1]
        yield np.where(square > RESOLVED * size, square, 0.0)


def _normalised(
    grams: Sequence[Array], pairs: Sequence[tuple[int, int]], epsilon: float
) -> list[Array]:
    holders = {index for pair in pairs for index in pair}
    roots = {index: 1 / np.sqrt(grams[index][-1] + epsilon) for index in holders}
    scaled = []
    for gram, (i, j) in zip(grams, pairs, strict=True):
        one = np.empty_like(gram)
        np.multiply(gram[:-1], roots[i][:, None], out=one[:-1])
        one[:-1] *= roots[j]
        one[-1] = gram[-1] * roots[i] * roots[j]
        scaled.append(one)
    return scaled


def _added(
    grams: Sequence[Array], more: list[Array], pairs: Sequence[tuple[int, int]], block: Block
) -> list[Array]:
    if block.post_norm:
        more = _normalised(more, pairs, block.epsilon)
    return [gram + extra for gram, extra in zip(grams, more, strict=True)]


def _attended(u: Array, cells: Cells, logit: float) -> Array:
    r"""Covariance of averages under softmax attention with random logits.

    The normalisers of the softmax are replaced by their means, which is meant for logits of small
    variance.
    Logits of two queries have the covariance :math:`s^2 U_{ii'} U_{jj'}`, whose part common to all
    keys cancels. With :math:`b = C U C^\top` and entrywise powers,

    .. math::

        b + \sum_{m \ge 1} \frac{s^{2m}}{m!} U^m \sum_{r \le m} \binom mr (-b)^{m-r}
        \, C U^{r+1} C^\top .
    """
    even = cells.mean(u)
    if not logit:
        return even
    power, averages = u, [even]
    for _ in range(2 if logit <= 0.25 else 8):
        power = power * u
        averages.append(cells.mean(power))
    return _by_strips(partial(_tilted, logit), u, *averages)


def _tilted(logit: float, u: Array, *averages: Array) -> Array:
    """Evaluate the series of `_attended`, entry by entry."""
    total, scale, negative = averages[0].copy(), np.ones_like(u), -averages[0]
    for m in range(1, len(averages)):
        scale *= u
        scale *= logit / m
        inner = averages[0].copy()  # the sum over r by Horner's rule
        for r in range(1, m + 1):
            inner *= negative
            inner += comb(m, r) * averages[r]
        inner *= scale
        total += inner
    return total


def _by_strips(entrywise: Callable[..., Array], *arrays: Array) -> Array:
    """Apply a function of single entries strip by strip, so that what it makes stays in cache."""
    result = np.empty_like(arrays[0])
    for start in range(0, len(result), STRIP):
        strip = slice(start, start + STRIP)
        result[strip] = entrywise(*(array[strip] for array in arrays))
    return result


def _cut(length: int) -> list[int]:
    """Sizes of cells that cover exactly `length` positions."""
    sizes: list[int] = []
    while (done := sum(sizes)) < length:
        size = 1 if done < FINE else int(GROWTH * done)
        sizes.append(min(size, length - done))
    return sizes


def _reach(horizon: int) -> list[int]:
    """Sizes of cells of which the last has its middle at `horizon` or beyond."""
    sizes: list[int] = []
    done = 0
    while not sizes or done - (sizes[-1] - 1) / 2 < horizon:
        sizes.append(1 if done < FINE else int(GROWTH * done))
        done += sizes[-1]
    return sizes
