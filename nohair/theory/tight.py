r"""A normalised softmax network that attains the theorem's rate, and nearly its constant.

States are (y, -y, c, -c), norms are RMSNorm with unit gain and no epsilon, queries are zero, so
attention is uniform, and there is no MLP. Heads read :math:`(u_1 - u_2)/2` of the normalised state
u and write G (1, -1, 0, 0). Prompt A has y = m; prompt B and the continuation have y = 0. Run B
stays there, and run A becomes

.. math::

    y_{l+1}(t) = y_l(t) + \frac{G}{P + t} \Bigl[ P \varphi(Y_l) + \sum_{s \le t}
    \varphi(y_l(s)) \Bigr], \qquad \varphi(y) = \frac{\sqrt2\, y}{\sqrt{y^2 + c^2}} ,

with :math:`Y_0 = m`, :math:`Y_{l+1} = Y_l + G \varphi(Y_l)`. Since :math:`\varphi` is linear near
zero, where y goes, this is the relay in the end:

.. math::

    \frac{D_L(t)\, t}{P \log^{L-1} t} \to \cos\bigl(\tfrac12 \arctan\tfrac mc\bigr)
    \frac{M_0 \prod_l C_l}{(L-1)!} ,

the theorem's own leading constant but for a cosine of at least 0.707, which tends to 1 with m/c.
"""

from __future__ import annotations

from math import atan, cos, hypot, sin, sqrt

import numpy as np

from nohair.errors import Refused
from nohair.theory import symmetric
from nohair.theory.bound import Block
from nohair.theory.symmetric import Array


def distance(
    horizon: int,
    layers: int,
    prompt_tokens: int,
    gain: float,
    difference: float,
    background: float = 1.0,
) -> Array:
    r"""Simulate the network, in O(L T).

    Parameters
    ----------
    horizon, layers, prompt_tokens
        T, L, P.
    gain
        G.
    difference
        m, the prompt's.
    background
        c, what keeps the states from zero.

    Returns
    -------
    numpy.ndarray
        :math:`D = \sqrt2\, y` after every block at t = 1 … T, (L, T), in the units of m and c.

    Raises
    ------
    Refused
        A count is no positive whole number; a size is negative or not finite, or c is zero.
    """
    horizon = symmetric.whole("horizon", horizon)
    prompt = _prompt(layers, prompt_tokens, gain, difference, background)
    t = np.arange(1, horizon + 1)
    now, rows = np.zeros(horizon), []
    for own in prompt:
        normalised = sqrt(2) * now / np.hypot(now, background)
        source = prompt_tokens * sqrt(2) * own / hypot(own, background)
        now = now + gain / (prompt_tokens + t) * (source + normalised.cumsum())
        rows.append(sqrt(2) * now)
    return np.stack(rows)


def blocks(
    layers: int, prompt_tokens: int, gain: float, difference: float, background: float = 1.0
) -> list[Block]:
    r"""Give the network's constants in the theorem's (R): :math:`A = 1`, :math:`C = \sqrt2 G/c`.

    :math:`M_l = 2\sqrt2\, c \sin(\tfrac12 \arctan (Y_l/c))`. Parameters and errors as for
    `distance`.
    """
    prompt = _prompt(layers, prompt_tokens, gain, difference, background)
    relay = sqrt(2) * gain / background
    apart = [2 * sqrt(2) * background * sin(atan(own / background) / 2) for own in prompt]
    return [Block(1.0, relay, relay * m) for m in apart]


def sharpness(difference: float, background: float = 1.0) -> float:
    r"""Give the limit of distance over bound: :math:`\cos(\tfrac12 \arctan(m/c))`."""
    _prompt(1, 1, 0.0, difference, background)
    return cos(atan(difference / background) / 2)


def _prompt(
    layers: int, prompt_tokens: int, gain: float, difference: float, background: float
) -> list[float]:
    """Y before every block."""
    layers = symmetric.whole("layers", layers)
    symmetric.whole("prompt_tokens", prompt_tokens)
    sizes = {"gain": gain, "difference": difference, "background": background}
    for name, value in sizes.items():
        symmetric.amount(name, value)
    if not background:
        raise Refused("background = 0: a state of zero has no direction; give c above 0")
    states = [float(difference)]
    for _ in range(1, layers):
        own = states[-1]
        states.append(own + gain * sqrt(2) * own / hypot(own, background))
    return states
