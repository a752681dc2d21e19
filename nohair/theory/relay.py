r"""The relay model: a linear network whose attention is uniform, solved.

Block by block (l = 0 … L-1, :math:`d_0 = 0`), with P prompt tokens and the gains :math:`g_l`,

.. math::

    d_{l+1}(t) = a\, d_l(t) + \frac{g_l}{P + t} \Bigl( P m_l + \sum_{s \le t} d_l(s) \Bigr) .

This is the theorem's (R) with equality, so `nohair.theory.bound` solves it: its majorant, exact
here, is the solution. What the prompts' own states differ by, :math:`m_l`, is 1 in every block if
they are ``fixed``, and :math:`\prod_{i<l} (a + g_i)` if they are ``evolving``, as they do when the
prompt runs through the same network. Distances are in units of :math:`m_0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf, log, log2
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import digamma, gammaln, logsumexp

from nohair import decay
from nohair.errors import Refused
from nohair.theory import bound, symmetric
from nohair.theory.bound import Block
from nohair.theory.symmetric import Array

PromptStates = Literal["fixed", "evolving"]
Gain = float | Sequence[float]


def blocks(
    layers: int,
    gain: Gain,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
    *,
    held: float = 0.0,
) -> list[Block]:
    """Write the model as constants of (R): carry a, relay g, source g m.

    Parameters
    ----------
    layers
        L.
    gain
        g, one for all blocks or one for each.
    residual
        a, what a block leaves of its input.
    prompt_states
        ``fixed`` or ``evolving``.
    held
        Fraction of the continuation's attention, at every t, that rests on a token which is the
        same in both runs: a sink with a constant share. Prompt states that evolve are taken not to
        see it.

    Raises
    ------
    Refused
        No block; a gain or residual that is negative or not finite; gains that disagree with L;
        a `held` outside [0, 1]; unknown `prompt_states`.
    """
    if not 0 <= symmetric.amount("held", held) <= 1:
        raise Refused(f"held = {held:g}: give a fraction from 0 to 1")
    gains = [(1 - held) * g for g in per_block(layers, gain)]
    sources = prompt_differences(layers, gain, residual, prompt_states)[:-1]
    return [Block(float(residual), g, g * m) for g, m in zip(gains, sources, strict=True)]


def prompt_differences(
    layers: int, gain: Gain, residual: float = 1.0, prompt_states: PromptStates = "fixed"
) -> list[float]:
    """Give m before the first block and after every one, L + 1 numbers.

    Raises
    ------
    Refused
        As for `blocks`.
    """
    evolving = _evolving(prompt_states)
    growth = symmetric.amount("residual", residual)
    values = [1.0]
    for g in per_block(layers, gain):
        values.append(values[-1] * (growth + g) if evolving else 1.0)
    return values


def distance(
    t: ArrayLike,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
    *,
    sink: int = 0,
    held: float = 0.0,
    log: bool = False,
) -> Array:
    r"""Evaluate the distance after the last block, in closed form.

    The relative error is below 1e-12 up to t = 1e12 and 64 blocks.

    Parameters
    ----------
    t
        Positions of at least 1; any shape. Between whole numbers the formula is continued, to
        fewer digits where P + t is small and the network deep: with 12 blocks to four at P = 1
        and eight at P = 8, with 64 blocks and g = 2 to two and five.
    layers, gain, residual, prompt_states, held
        As for `blocks`.
    prompt_tokens
        P.
    sink
        :math:`\Sigma`: tokens, the same in both runs, that take part in every mean of the
        continuation; one token with a larger logit counts as many. Prompt states that evolve are
        taken not to see it.
    log
        Return the natural logarithm instead.

    Raises
    ------
    Refused
        As for `blocks`; a t below 1; P or the sink are no whole numbers; a distance beyond 1e308
        without `log`.
    """
    chain = blocks(layers, gain, residual, prompt_states, held=held)
    return bound.majorant(*_with_sink(chain, prompt_tokens, sink), t, log=log)


def local_exponent(
    t: ArrayLike,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
    *,
    sink: int = 0,
    held: float = 0.0,
) -> Array:
    r"""Evaluate :math:`-d\log D/d\log t` by its exact derivative; parameters as for `distance`.

    Raises
    ------
    Refused
        As for `distance`; or all gains are zero, and the distance with them.
    """
    chain = blocks(layers, gain, residual, prompt_states, held=held)
    return bound.local_exponent(*_with_sink(chain, prompt_tokens, sink), t)


def recursion(
    horizon: int,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
    *,
    sink: int = 0,
    held: float = 0.0,
) -> Array:
    """Simulate the model block by block, in O(L T).

    Returns
    -------
    numpy.ndarray
        Distance after every block at t = 1 … `horizon`, (L, T).

    Raises
    ------
    Refused
        As for `distance`.
    """
    chain = blocks(layers, gain, residual, prompt_states, held=held)
    return np.exp(bound.recursion(*_with_sink(chain, prompt_tokens, sink), horizon))


def exact(
    t: Any,
    layers: int,
    prompt_tokens: int,
    gain: Any,
    residual: Any = 1,
    prompt_states: PromptStates = "fixed",
) -> Any:
    """Evaluate the distance after the last block as a fraction, in O(L t).

    Parameters
    ----------
    t
        One whole number, or an array of them.
    layers, prompt_tokens, prompt_states
        As for `distance`.
    gain, residual
        Whole numbers, fractions, or text such as ``"1/3"``; a float counts as the fraction that it
        is in binary.

    Returns
    -------
    fractions.Fraction or numpy.ndarray
        One fraction, or an array of them of the shape of `t`.

    Raises
    ------
    Refused
        As for `distance`; a t that is no whole number.
    """
    many = np.ndim(gain) == 1
    given = [_fraction("gain", g) for g in gain] if many else _fraction("gain", gain)
    gains = per_block(layers, given)
    prompt_tokens = symmetric.whole("prompt_tokens", prompt_tokens)
    symmetric.amount("residual", _fraction("residual", residual))
    carry, difference = _fraction("residual", residual), Fraction(1)
    evolving = _evolving(prompt_states)
    c: list[Fraction] = []
    for g in gains:
        own, relayed = [carry * x for x in c] + [Fraction(0)], [difference, *c]
        c = [x + g * y for x, y in zip(own, relayed, strict=True)]
        difference *= carry + g if evolving else 1
    places = np.asarray(t, dtype=object)
    for place in places.flat:
        symmetric.whole("t", place)
    values, weights = {}, [Fraction(1)] + [Fraction(0)] * (len(c) - 1)
    for s in range(1, max(map(int, places.flat), default=0) + 1):
        for i in range(1, len(c)):
            weights[i] += weights[i - 1] / (prompt_tokens + s)
        share = Fraction(prompt_tokens, prompt_tokens + s)
        values[s] = share * sum(x * h for x, h in zip(c, weights, strict=True))
    result = np.empty(places.shape, dtype=object)
    for index, place in np.ndenumerate(places):
        result[index] = values[int(place)]
    return result[()]


def limit(
    t: ArrayLike,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
) -> Array:
    r"""Evaluate the limit of a long prompt at fixed t/P.

    With :math:`x = \log(1 + t/P)`, chains of i relays weigh :math:`x^i/i!`. For fixed states,
    a = 1 and one gain this is :math:`g e^{-x} L^{(1)}_{L-1}(-g x)`, a Laguerre polynomial.

    Parameters
    ----------
    t, layers, prompt_tokens, gain, residual, prompt_states
        As for `distance`.

    Raises
    ------
    Refused
        As for `distance`.
    """
    logs = _log_coefficients(layers, prompt_tokens, gain, residual, prompt_states)
    x = np.log1p(symmetric.positions(t) / prompt_tokens)
    chain = np.arange(len(logs)).reshape(-1, *[1] * x.ndim)
    terms = logs.reshape(chain.shape) + chain * np.log(x) - gammaln(chain + 1)
    return np.asarray(np.exp(logsumexp(terms, axis=0) - x))


def asymptote(
    t: ArrayLike,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
    *,
    terms: Literal[1, 2] = 2,
) -> Array:
    r"""Evaluate the first terms for :math:`t \to \infty`.

    .. math::

        D \approx \frac{P}{t} \prod_l g_l \frac{\log^{L-1} t}{(L-1)!} \Bigl[ 1 + \frac{L-1}{\log t}
        \Bigl( \frac{c_{L,L-2}}{c_{L,L-1}} - \psi(P+1) \Bigr) \Bigr]

    The ratio of coefficients is L/g for fixed states, a = 1 and one gain. Useful only for t far
    beyond P and :math:`\log t` far beyond the product in front of it, which is negative where
    :math:`\psi(P+1)`, about log P, is the larger.

    Parameters
    ----------
    t, layers, prompt_tokens, gain, residual, prompt_states
        As for `distance`, but t above 1.
    terms
        1 leaves out the bracket.

    Raises
    ------
    Refused
        As for `distance`; a gain is zero; t is 1; `terms` is neither 1 nor 2.
    """
    logs = _log_coefficients(layers, prompt_tokens, gain, residual, prompt_states)
    if logs[-1] == -inf:
        raise Refused("gain = 0: a block that relays nothing adds no logarithm; leave it out")
    spread = np.log(symmetric.positions(t))
    if (spread == 0).any():
        raise Refused("t = 1: log t is zero there; give t above 1")
    if terms not in (1, 2):
        raise Refused(f"terms = {terms}: choose 1 or 2")
    power = len(logs) - 1
    weight = logs[-1] + power * np.log(spread) - gammaln(len(logs))
    lead = np.exp(log(prompt_tokens) - spread + weight)
    if terms == 1 or power == 0:
        return np.asarray(lead)
    return np.asarray(
        lead * (1 + power * (np.exp(logs[-2] - logs[-1]) - digamma(prompt_tokens + 1)) / spread)
    )


def apparent_alpha(
    window: Sequence[float],
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
    *,
    sink: int = 0,
    held: float = 0.0,
) -> float:
    """Fit a power law to the model over a window, as `nohair.decay.fit` does to a measurement.

    Parameters
    ----------
    window
        First and last t.
    layers, prompt_tokens, gain, residual, prompt_states, sink, held
        As for `distance`.

    Raises
    ------
    Refused
        As for `distance`; the window is reversed, starts before 1, or is too short for a fit.
    """
    start, end = finite_window(window)
    t = spaced(start, end)
    settings = (layers, prompt_tokens, gain, residual, prompt_states)
    curve = distance(t, *settings, sink=sink, held=held)
    fitted = decay.fit(t, curve, (start, end))
    if not fitted.measurable:
        raise Refused(f"window [{start:g}, {end:g}]: {fitted.note}")
    return fitted.alpha


def finite_window(window: Sequence[float]) -> decay.Window:
    """Refuse a window that is none, or has no end.

    Raises
    ------
    Refused
        See above.
    """
    start, end = decay.check_window(window, inf)
    if not end < inf:
        raise Refused(f"window [{start:g}, {end:g}] has no end: give a finite one")
    return start, end


def spaced(start: float, end: float, per_octave: int = 64) -> Array:
    """Choose whole positions in a window, each once, even in log t: enough for a fit."""
    count = int(per_octave * log2(end / start)) + 2
    inside = np.unique(np.geomspace(start, end, count).round())
    return inside[(inside >= start) & (inside <= end)]


def half_life(layers: int, prompt_tokens: int, gain: Gain, residual: float = 1.0) -> float:
    """Find the t at which half of the prompts' own difference is left; states evolve.

    Half of the difference after the last block; 1 if less than half ever arrives, infinite
    beyond 1e290. It grows about as P exp(L g/(a + g)): exponentially with depth.

    Raises
    ------
    Refused
        As for `distance`.
    """
    chain = blocks(layers, gain, residual, "evolving")
    whole = prompt_differences(layers, gain, residual, "evolving")[-1]
    if not whole:
        return 1.0
    half = log(whole / 2)

    def excess(x: float) -> float:
        return float(bound.majorant(chain, prompt_tokens, np.exp(x), log=True)) - half

    last = log(1e290)
    if excess(0.0) <= 0:
        return 1.0
    return float(np.exp(brentq(excess, 0.0, last, xtol=1e-12))) if excess(last) < 0 else inf


def windowed(
    horizon: int,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    window: int,
    residual: float = 1.0,
    prompt_states: PromptStates = "fixed",
) -> Array:
    """Simulate the model with attention over the last W keys only, itself included.

    Zero, exactly, beyond t = L(W - 1).

    Parameters
    ----------
    horizon
        T.
    layers, gain, residual, prompt_states
        As for `blocks`.
    prompt_tokens
        P, at least W - 1: a window that ends before the prompt begins.
    window
        W.

    Returns
    -------
    numpy.ndarray
        Distance after every block at t = 1 … T, (L, T).

    Raises
    ------
    Refused
        As for `distance`; or the window sees past the prompt.
    """
    horizon = symmetric.whole("horizon", horizon)
    window = symmetric.whole("window", window)
    prompt_tokens = symmetric.whole("prompt_tokens", prompt_tokens)
    if prompt_tokens < window - 1:
        raise Refused(
            f"window = {window} sees past a prompt of {prompt_tokens} tokens; "
            f"give at most {prompt_tokens + 1}"
        )
    differences = prompt_differences(layers, gain, residual, prompt_states)
    prompt_keys = np.maximum(window - np.arange(1, horizon + 1), 0)
    now, rows = np.zeros(horizon), []
    for g, m in zip(per_block(layers, gain), differences, strict=False):
        # A convolution and no difference of running sums: what has left the window is gone exactly.
        seen = np.convolve(now, np.ones(min(window, horizon)))[:horizon]
        now = residual * now + g / window * (m * prompt_keys + seen)
        rows.append(now)
    return np.stack(rows)


def reinjected(
    t: ArrayLike,
    layers: int,
    prompt_tokens: int,
    gain: Gain,
    after: int,
    residual: float = 1.0,
) -> Array:
    r"""Evaluate the distance at t tokens past a second copy of the prompt; states are fixed.

    The copy stands after `after` tokens of the continuation. To what follows, both copies and
    all tokens in between are one prompt of :math:`2P + t_1` tokens.

    Parameters
    ----------
    t
        Counted from the end of the copy.
    layers, prompt_tokens, gain, residual
        As for `distance`.
    after
        :math:`t_1`.

    Raises
    ------
    Refused
        As for `distance`; `after` is no whole number.
    """
    after = symmetric.whole("after", after)
    prompt_tokens = symmetric.whole("prompt_tokens", prompt_tokens)
    before = blocks(layers, gain, residual)
    layers = len(before)
    total = 2 * prompt_tokens + after
    chain = [Block(residual, before[0].relay, before[0].relay * 2 * prompt_tokens / total)]
    weights = symmetric.log_complete(after, prompt_tokens, layers + 1)
    for depth in range(1, layers):
        # The sum of D over s = 1 … t_1 raises every chain by one relay: H_i becomes H_{i+1}.
        logs = bound.coefficients(before[:depth], prompt_tokens)[0]
        carried = prompt_tokens * np.exp(logsumexp(logs + weights[1 : depth + 1]))
        g = before[depth].relay
        chain.append(Block(residual, g, g * (2 * prompt_tokens + float(carried)) / total))
    return bound.majorant(chain, total, t)


def per_block(layers: int, gain: Any) -> list[Any]:
    """Repeat one gain for every block, or check that there is one for each; fractions stay such.

    Raises
    ------
    Refused
        `layers` is no whole number; the gains disagree with it, or one is negative.
    """
    layers = symmetric.whole("layers", layers)
    many = np.ndim(gain) == 1
    gains = list(gain) if many else [gain] * layers
    if len(gains) != layers:
        raise Refused(f"gain has {len(gains)} values for {layers} layers: give one, or one each")
    floats = [symmetric.amount("gain", g) for g in gains]
    return gains if isinstance(gains[0], Fraction) else floats


def _with_sink(chain: list[Block], prompt_tokens: int, sink: int) -> tuple[list[Block], int]:
    """Count the sink's tokens as prompt tokens without a difference."""
    prompt_tokens = symmetric.whole("prompt_tokens", prompt_tokens)
    sink = symmetric.whole("sink", sink, least=0)
    share = prompt_tokens / (prompt_tokens + sink)
    return [Block(b.carry, b.relay, share * b.source) for b in chain], prompt_tokens + sink


def _log_coefficients(
    layers: int, prompt_tokens: int, gain: Gain, residual: float, prompt_states: PromptStates
) -> Array:
    symmetric.whole("prompt_tokens", prompt_tokens)
    return bound.coefficients(blocks(layers, gain, residual, prompt_states), prompt_tokens)[0]


def _evolving(prompt_states: str) -> bool:
    if prompt_states not in get_args(PromptStates):
        raise Refused(f"prompt_states = {prompt_states!r}: choose fixed or evolving")
    return prompt_states == "evolving"


def _fraction(name: str, value: Any) -> Fraction:
    try:
        return Fraction(value)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        raise Refused(f"{name} = {value!r}: give a number or a fraction such as 1/3") from None
