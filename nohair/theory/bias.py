r"""A bias on the prompt's attention logits that works against dilution.

The logits of the prompt's keys are raised by :math:`b(t) = \lambda \log(t/t_0)`. With the
partition sums :math:`S_P` of the prompt and :math:`S_c` of its competitors, both without the bias,
the prompt's share is :math:`\pi = S_P e^b / (S_P e^b + S_c)`, and

.. math::

    -\frac{d\log\pi}{d\log t} = (1 - \pi)(\theta - \lambda), \qquad
    \theta = \frac{d\log(S_c/S_P)}{d\log t} .

So :math:`\lambda > \theta` says that the *share* grows. Of the distance it says this: after block 1
the distance follows its share. At any depth it does so if the prompt's states evolve, there is no
sink, and the share has been monotone from t = 1. Otherwise it need not: with fixed states the
distance may fall while the share grows; with a sink of constant logit it grows from block 2 on
even at constant share; and a bias that begins late leaves a transient that can look like a
reversal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, logit

from nohair import decay
from nohair.errors import Refused
from nohair.theory import bound, relay, symmetric
from nohair.theory.bound import Block
from nohair.theory.relay import Gain, PromptStates
from nohair.theory.symmetric import Array


def share(
    t: ArrayLike,
    prompt_tokens: int,
    strength: float = 0.0,
    *,
    start: float = 16.0,
    onset: float = 1.0,
    sink: float = 0.0,
) -> Array:
    r"""Evaluate the prompt's share of uniform attention under the bias.

    Parameters
    ----------
    t
        Positions of at least 1; any shape.
    prompt_tokens
        P.
    strength
        :math:`\lambda`.
    start
        :math:`t_0`, where the bias is zero.
    onset
        First t that is biased: 1 for "from the beginning", `start` for "from t_0 on".
    sink
        :math:`\Sigma`: competitors that are there from the beginning, in tokens.

    Raises
    ------
    Refused
        A number out of its range; the name and the value are said.
    """
    t = symmetric.positions(t)
    prompt_tokens = symmetric.whole("prompt_tokens", prompt_tokens)
    at = _at_least_one("start", start)
    bias = np.where(t >= _at_least_one("onset", onset), _finite(strength) * np.log(t / at), 0.0)
    competitors = np.log(t + symmetric.amount("sink", sink))
    return np.asarray(expit(np.log(prompt_tokens) + bias - competitors))


def preserving(share: ArrayLike, index: int) -> Array:
    r"""Find the bias under which a share stays what it is at one position, for any attention.

    In one block, its input given. From block 2 on the states answer to the bias, so there the
    share has to be taken again once the blocks before are biased.

    :math:`b(t) = \mathrm{logit}\,\pi(t_0) - \mathrm{logit}\,\pi(t)`. For uniform attention
    :math:`\log(t/t_0)`.

    Parameters
    ----------
    share
        The prompt's share *without* bias, t on the last axis, each between 0 and 1.
    index
        Where on that axis :math:`t_0` is.

    Raises
    ------
    Refused
        A share that is not between 0 and 1: no finite bias moves it.
    """
    given = _shares(share)
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise Refused(f"index = {index!r}: give a whole number")
    if not -given.shape[-1] <= index < given.shape[-1]:
        raise Refused(f"index = {index}: the share has {given.shape[-1]} positions")
    logits = logit(given)
    return np.asarray(logits[..., [index]] - logits)


def theta(t: ArrayLike, share: ArrayLike, strength: float = 0.0) -> Array:
    r"""Find how fast the competitors grow beside the prompt: :math:`\theta(t)`.

    From a share measured *under* the bias, since from block 2 on the states react to it:
    :math:`\theta = \lambda - d\,\mathrm{logit}\,\pi / d\log t`.

    Parameters
    ----------
    t
        Increasing positions, at least two.
    share
        The prompt's share under the bias, t on the last axis.
    strength
        :math:`\lambda` of the bias that was on; 0 for none.

    Raises
    ------
    Refused
        A share that is not between 0 and 1; fewer than two positions.
    """
    t, given = symmetric.positions(t), _shares(share)
    if t.ndim != 1 or t.size < 2 or given.shape[-1] != t.size or not (np.diff(t) > 0).all():
        raise Refused(
            f"t of shape {t.shape} and share of shape {given.shape} do not match: "
            "give at least 2 increasing positions"
        )
    return np.asarray(_finite(strength) - np.gradient(logit(given), np.log(t), axis=-1))


def distance(
    horizon: int,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    strength: float,
    *,
    start: float = 16.0,
    onset: float = 1.0,
    sink: float = 0.0,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
) -> Array:
    """Simulate the relay model under the bias, in O(L T).

    Parameters
    ----------
    horizon
        T.
    layers, gain, residual, prompt_states
        As for `nohair.theory.relay.blocks`.
    prompt_tokens, strength, start, onset, sink
        As for `share`.

    Returns
    -------
    numpy.ndarray
        Distance after every block at t = 1 … T, (L, T).

    Raises
    ------
    Refused
        As for `share` and `nohair.theory.relay.blocks`.
    """
    t = np.arange(1, symmetric.whole("horizon", horizon) + 1)
    prompt = share(t, prompt_tokens, strength, start=start, onset=onset, sink=sink)
    return driven(prompt, layers, gain, sink=sink, residual=residual, prompt_states=prompt_states)


def driven(
    share: ArrayLike,
    layers: int,
    gain: Gain,
    *,
    sink: float = 0.0,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
) -> Array:
    """Simulate the relay model whose prompt has a given share of attention.

    What the prompt leaves is spread evenly over the t tokens of the continuation and the sink.

    Parameters
    ----------
    share
        Of the prompt, at t = 1 … T, each between 0 and 1.
    layers, gain, residual, prompt_states
        As for `nohair.theory.relay.blocks`.
    sink
        As for `share`.

    Returns
    -------
    numpy.ndarray
        Distance after every block, (L, T).

    Raises
    ------
    Refused
        As for `nohair.theory.relay.blocks`; a share that is not between 0 and 1.
    """
    prompt = _shares(share)
    if prompt.ndim > 1:
        raise Refused(f"share of shape {prompt.shape}: give one row, t = 1 … T")
    t = np.arange(1, prompt.size + 1)
    each = (1 - prompt) / (t + symmetric.amount("sink", sink))
    differences = relay.prompt_differences(layers, gain, residual, prompt_states)
    now, rows = np.zeros(prompt.size), []
    for g, m in zip(relay.per_block(layers, gain), differences, strict=False):
        now = residual * now + g * (prompt * m + each * now.cumsum())
        rows.append(now)
    return np.stack(rows)


def exponent(
    window: Sequence[float],
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    strength: float,
    *,
    start: float = 16.0,
    onset: float = 1.0,
    sink: float = 0.0,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
) -> float:
    r"""Fit a power law to the model under the bias over a window, after the last block.

    As the window moves out, this tends to :math:`1 - \lambda` for :math:`0 < \lambda < 1` at every
    depth, and slowly.

    Parameters
    ----------
    window
        First and last t; the simulation runs as far as the last.
    layers, prompt_tokens, gain, strength, start, onset, sink, residual, prompt_states
        As for `distance`.

    Raises
    ------
    Refused
        As for `distance`; the window is reversed, starts before 1, or is too short for a fit.
    """
    first, last = relay.finite_window(window)
    horizon = int(last)
    curves = distance(
        horizon,
        layers,
        prompt_tokens,
        gain,
        strength,
        start=start,
        onset=onset,
        sink=sink,
        residual=residual,
        prompt_states=prompt_states,
    )
    fitted = decay.fit(np.arange(1, horizon + 1), curves[-1], (first, horizon))
    if not fitted.measurable:
        raise Refused(f"window [{first:g}, {last:g}]: {fitted.note}")
    return fitted.alpha


def plateau(
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    start: float,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
) -> Array:
    r"""Evaluate the distances that the bias of strength 1, on from t = 1, holds constant.

    Parameters
    ----------
    layers, gain, residual, prompt_states
        As for `nohair.theory.relay.blocks`.
    prompt_tokens
        P.
    start
        :math:`t_0`; the share is held at :math:`P/(P + t_0)`.

    Returns
    -------
    numpy.ndarray
        After every block, (L,).

    Raises
    ------
    Refused
        As for `share` and `nohair.theory.relay.blocks`.
    """
    held = share([_at_least_one("start", start)], prompt_tokens)
    return driven(held, layers, gain, residual=residual, prompt_states=prompt_states)[:, 0]


def transient(
    t: ArrayLike,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    start: int,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
) -> Array:
    r"""Evaluate the distance when the bias of strength 1 sets in at :math:`t_0`, from there on.

    The deviation from the `plateau` is a relay of its own: :math:`t_0 - 1` tokens in place of the
    prompt, gain :math:`g (1 - \pi_0)`, and for source what the tokens before :math:`t_0` deviate
    by. It decays as :math:`\log^{L-2} t / t`, and may start negative; then the distance *grows*
    towards the plateau.

    Parameters
    ----------
    t
        Positions from `start` on; any shape.
    layers, prompt_tokens, gain, residual, prompt_states
        As for `distance`.
    start
        :math:`t_0`, a whole number of at least 2.

    Raises
    ------
    Refused
        As for `distance`; a t before `start`.
    """
    start = symmetric.whole("start", start, least=2)
    t = symmetric.positions(t, start)
    settings = (layers, prompt_tokens, gain)
    before = bound.recursion(
        relay.blocks(layers, gain, residual, prompt_states), prompt_tokens, start - 1
    )
    level = plateau(*settings, start, residual, prompt_states)
    free = 1 - float(share(start, prompt_tokens))
    # Block l reads what block l - 1 left: zero before the first.
    deviation = np.exp(before).sum(axis=1) - level * (start - 1)
    carried = np.concatenate([[0.0], deviation[:-1]])
    result = np.full(t.shape, level[-1])
    for sign in (1, -1):  # a relay's sources are not negative: two of them, and their difference
        chain = [
            Block(residual, g * free, g * free * max(sign * e, 0.0) / (start - 1))
            for g, e in zip(relay.per_block(layers, gain), carried.tolist(), strict=True)
        ]
        result = result + sign * bound.majorant(chain, start - 1, t - (start - 1))
    return np.asarray(result)


def _shares(share: ArrayLike) -> Array:
    given = symmetric.numbers("share", share)
    wrong = given[~((given > 0) & (given < 1))]
    if given.ndim < 1 or wrong.size:
        shown = f"{wrong.flat[0]:g}" if wrong.size else "a single number"
        raise Refused(f"share = {shown}: give shares between 0 and 1, t on the last axis")
    return given


def _at_least_one(name: str, value: float) -> float:
    if symmetric.amount(name, value) < 1:
        raise Refused(f"{name} = {value:g}: positions start at 1")
    return float(value)


def _finite(strength: float) -> float:
    given = symmetric.numbers("strength", strength)
    if given.ndim or not np.isfinite(given):
        raise Refused(f"strength = {strength}: give one finite number")
    return float(given)
