r"""The theorem's bound on how far a prompt reaches, evaluated from given constants.

Two prompts of P tokens, one continuation. Block by block (l = 1 … L, :math:`D_0 = 0`),

.. math::

    D_l(t) \le A_l D_{l-1}(t) + \frac{1}{P + t} \Bigl[ P S_l + C_l \sum_{s \le t} D_{l-1}(s) \Bigr]
    \tag{R}

.. math::

    D_L(t) \le \frac{P}{P + t} \sum_{i < L} c_{L,i} H_i(t)
    \le K_L \frac{P (1 + \log(1 + t/P))^{L-1}}{P + t} \tag{T}

with :math:`H_i` from `nohair.theory.symmetric`. The book's page "The proof" derives both. Constants
of trained networks multiply to numbers beyond 1e308 within a few dozen blocks, so everything is
computed in logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import maximum_filter1d
from scipy.optimize import brentq
from scipy.special import logsumexp

from nohair.errors import Refused
from nohair.theory import symmetric
from nohair.theory.symmetric import Array


@dataclass(frozen=True)
class Block:
    """One block's constants in (R).

    Parameters
    ----------
    carry
        A: what the state's own difference becomes.
    relay
        C: what the differences of earlier continuation tokens become, when attention is spread.
    source
        S: what the prompt's own differences become. All three in the units of D.
    window
        W, how many keys a query sees, itself included; None where it sees all. With a window
        no key is far, so `relay` is zero, and `carry` multiplies the largest D among the W last
        positions.

    Raises
    ------
    Refused
        A constant is negative or not finite; a window below 1, or one beside a relay.
    """

    carry: float
    relay: float
    source: float
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no constant."""
        for name in ("carry", "relay", "source"):
            _constant(name, getattr(self, name))
        if self.window is not None:
            symmetric.whole("window", self.window)
        if self.window is not None and self.relay:
            raise Refused(f"relay = {self.relay:g} beside a window: give 0, no key there is far")

    @property
    def reach(self) -> int:
        """How far back a key may take any weight, in positions."""
        return 0 if self.window is None else self.window - 1


def block(
    *,
    nu: float,
    gamma: ArrayLike,
    chi: ArrayLike,
    beta: ArrayLike,
    difference: float,
    mu: float = 0.0,
    nu_mlp: float = 0.0,
    parallel: bool = False,
    window: int | None = None,
) -> Block:
    r"""Put one block's constants together from those of its parts.

    Parameters
    ----------
    nu, nu_mlp
        Lipschitz constants of the norms before attention and MLP, on the continuation.
    gamma
        Of each head, :math:`\|W_O W_V\|` (times the Lipschitz constant of a norm that follows).
    chi
        Of each head, :math:`U \sigma \max(\|W_Q\| \sup|k|, \|W_K\| \sup|q|)`, without unit.
    beta
        Of each head: no key that differs between the runs gets more than beta/(P+t) of a query's
        attention. With a window: the prompt's keys together get at most beta P/(P+t).
    difference
        M, mean difference of the prompts' normalised states over nu; with a window, the largest.
    mu
        Lipschitz constant of the MLP (times that of a norm that follows).
    parallel
        Attention and MLP read the same state.
    window
        As in `Block`.

    Raises
    ------
    Refused
        A constant is negative or not finite, or the heads disagree in number.
    """
    for name, value in {
        "nu": nu,
        "nu_mlp": nu_mlp,
        "mu": mu,
        "difference": difference,
        "gamma": gamma,
        "chi": chi,
        "beta": beta,
    }.items():
        _constant(name, value)
    gamma, chi, beta = (np.atleast_1d(np.asarray(x, np.float64)) for x in (gamma, chi, beta))
    if not gamma.shape == chi.shape == beta.shape:
        shapes = ", ".join(str(x.size) for x in (gamma, chi, beta))
        raise Refused(f"gamma, chi, beta are of {shapes} heads: give one of each per head")
    mixed = nu * float(gamma @ (2 * chi if window is None else 1 + 4 * chi))
    spread = nu * float((gamma * (1 + 2 * chi)) @ beta)
    mlp = mu * nu_mlp
    carry = 1 + mlp + mixed if parallel else (1 + mlp) * (1 + mixed)
    relay = spread if parallel else (1 + mlp) * spread
    source = relay * difference
    return Block(carry, relay if window is None else 0.0, source, window)


def step(block: Block, distance: ArrayLike, prompt_tokens: int) -> Array:
    """Bound the distances after a block by those before it, the right side of (R).

    Parameters
    ----------
    block
        Its constants.
    distance
        Before the block, at t = 1 … T on the last axis.
    prompt_tokens
        P.

    Raises
    ------
    Refused
        A distance is negative or not finite; there is none; P is no prompt.
    """
    distance = np.asarray(distance, np.float64)
    symmetric.whole("prompt_tokens", prompt_tokens)
    symmetric.whole("horizon", distance.shape[-1] if distance.ndim else 0)
    _constant("distance", distance)
    t = np.arange(1, distance.shape[-1] + 1)
    share = 1 / (prompt_tokens + t)
    source = np.where(_sees_prompt(block, t), prompt_tokens * share * block.source, 0.0)
    relayed = block.relay * share * distance.cumsum(-1)
    return np.asarray(block.carry * _near(distance, block.reach) + source + relayed)


def looseness(blocks: Sequence[Block], distance: ArrayLike, prompt_tokens: int) -> Array:
    """Compare (R) with measured distances, block by block: right side over left side.

    Parameters
    ----------
    blocks
        Constants, first block first.
    distance
        Measured after each block, (L, …, T), t = 1 … T.
    prompt_tokens
        P.

    Returns
    -------
    numpy.ndarray
        Of the same shape. Below one the theorem is violated; infinite where the distance is zero.

    Raises
    ------
    Refused
        As many blocks as layers are needed; otherwise as for `step`.
    """
    distance = np.asarray(distance, np.float64)
    _check(blocks, prompt_tokens)
    _constant("distance", distance)
    if len(blocks) != len(distance):
        raise Refused(f"{len(blocks)} blocks, distances after {len(distance)}: give one for each")
    before = np.concatenate([np.zeros_like(distance[:1]), distance[:-1]])
    bounds = [step(one, d, prompt_tokens) for one, d in zip(blocks, before, strict=True)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance > 0, np.stack(bounds) / distance, inf)


def recursion(blocks: Sequence[Block], prompt_tokens: int, horizon: int) -> Array:
    """Iterate (R) with equality, in O(L T).

    Parameters
    ----------
    blocks
        Constants, first block first.
    prompt_tokens, horizon
        P and T.

    Returns
    -------
    numpy.ndarray
        Natural logarithm of the bound after every block, (L, T); -inf where it is zero.

    Raises
    ------
    Refused
        No block, or P or T below 1.
    """
    _check(blocks, prompt_tokens)
    horizon = symmetric.whole("horizon", horizon)
    t = np.arange(1, horizon + 1)
    seen = np.log(prompt_tokens + t)
    share = np.log(prompt_tokens) - seen
    now = np.full(horizon, -inf)
    rows = []
    for one in blocks:
        own = _log(one.carry) + _near(now, one.reach)
        prompt = np.where(_sees_prompt(one, t), _log(one.source) + share, -inf)
        relayed = _log(one.relay) + np.logaddexp.accumulate(now) - seen
        now = np.logaddexp(np.logaddexp(own, prompt), relayed)
        rows.append(now)
    return np.stack(rows)


def majorant(
    blocks: Sequence[Block], prompt_tokens: int, t: ArrayLike, *, log: bool = False
) -> Array:
    """Evaluate the closed form of the bound after the last block, the middle of (T).

    Equal to the last row of `recursion` where no block has a window, and above it elsewhere.

    Parameters
    ----------
    blocks, prompt_tokens
        As for `recursion`.
    t
        Positions, at least 1 and as far as 1e300; any shape. The cost is O(L²) for each.
    log
        Return the natural logarithm instead.

    Raises
    ------
    Refused
        No block; P or a t below 1; a bound beyond 1e308 without `log`.
    """
    _check(blocks, prompt_tokens)
    t = symmetric.positions(t)
    chains, end = coefficients(blocks, prompt_tokens)
    terms = _terms(chains, prompt_tokens, t)
    result = logsumexp(terms, axis=0) - np.log1p(t / prompt_tokens)
    if end is not None:
        result = np.where(t <= end, result, -inf)
    return np.asarray(result) if log else _unlogged(result)


def rate(blocks: Sequence[Block], prompt_tokens: int, t: ArrayLike, *, log: bool = False) -> Array:
    """Evaluate the simplest form of the bound, the right of (T).

    The power of the logarithm is the number of blocks without window, less one.

    Parameters
    ----------
    blocks, prompt_tokens, t, log
        As for `majorant`.

    Raises
    ------
    Refused
        As for `majorant`; or every block has a window, and the distance ends instead of falling.
    """
    _check(blocks, prompt_tokens)
    t = symmetric.positions(t)
    chains, end = coefficients(blocks, prompt_tokens)
    if end is not None:
        raise Refused(f"every block has a window: the distance is zero beyond t = {end}")
    spread = np.log1p(t / prompt_tokens)
    power = len(chains) - 1
    result = logsumexp(chains) + power * np.log1p(spread) - spread
    return np.asarray(result) if log else _unlogged(result)


def local_exponent(blocks: Sequence[Block], prompt_tokens: int, t: ArrayLike) -> Array:
    r"""Local exponent of the majorant, :math:`-d\log/d\log t`, by its exact derivative.

    Parameters
    ----------
    blocks, prompt_tokens, t
        As for `majorant`.

    Raises
    ------
    Refused
        As for `rate`; or every source is zero, and so is the bound.
    """
    _check(blocks, prompt_tokens)
    t = symmetric.positions(t)
    chains, end = coefficients(blocks, prompt_tokens)
    if end is not None:
        raise Refused(f"every block has a window: the distance is zero beyond t = {end}")
    if not np.isfinite(chains).any():
        raise Refused("every source is 0: the bound is zero and has no exponent")
    weights = symmetric.log_complete(t, prompt_tokens, len(chains))
    slopes = symmetric.log_slope(t, prompt_tokens, weights)
    scale = chains.reshape(-1, *[1] * t.ndim)
    rise = np.exp(logsumexp(scale + slopes, axis=0) - logsumexp(scale + weights, axis=0))
    return np.asarray(t / (prompt_tokens + t) - t * rise)


def turning_point(blocks: Sequence[Block], prompt_tokens: int) -> float:
    """Find the t from which on the majorant falls for good; 1 if it never rises.

    Infinite where that lies beyond 1e290.

    Raises
    ------
    Refused
        As for `local_exponent`.
    """
    _check(blocks, prompt_tokens)
    farthest = min(4.0 * len(blocks) + 8, log(1e290) - log(prompt_tokens))
    far = prompt_tokens * np.expm1(np.linspace(0, farthest, 2000)[1:])
    far = np.concatenate([[1.0], far[far > 1]])
    rising = local_exponent(blocks, prompt_tokens, far) <= 0
    if not rising.any():
        return 1.0
    last = int(np.flatnonzero(rising)[-1])
    if last == len(far) - 1:
        return inf
    x = brentq(
        lambda x: float(local_exponent(blocks, prompt_tokens, np.exp(x))),
        log(far[last]),
        log(far[last + 1]),
        xtol=1e-12,
    )
    return float(np.exp(x))


def next_token(distance: ArrayLike, kappa: float) -> tuple[Array, Array]:
    r"""Bound how far apart the next-token laws of two runs are.

    Parameters
    ----------
    distance
        D after the last block, at any positions.
    kappa
        Largest row norm of the unembedding times the Lipschitz constant of the final norm; divide
        it by the temperature.

    Returns
    -------
    tuple
        Total variation, :math:`\min(1, \kappa D / 2)`, and Kullback–Leibler divergence in nats,
        :math:`\kappa^2 D^2 / 2`.

    Raises
    ------
    Refused
        A negative or not finite number.
    """
    _constant("distance", distance)
    _constant("kappa", kappa)
    gap = kappa * np.asarray(distance, np.float64)
    return np.minimum(1.0, gap / 2), gap**2 / 2


def coefficients(blocks: Sequence[Block], prompt_tokens: int) -> tuple[Array, int | None]:
    """Collect the constants along chains of relays: the c of (T), as natural logarithms.

    Parameters
    ----------
    blocks, prompt_tokens
        As for `recursion`.

    Returns
    -------
    tuple
        One coefficient per number of relays; and where D ends if every block has a window, else
        None.

    Raises
    ------
    Refused
        No block, or P below 1.
    """
    _check(blocks, prompt_tokens)
    # Until a block sees everything D is zero beyond `end`: what that block relays is a finite
    # sum, and costs no logarithm.
    c = np.array([-inf])
    end: int | None = 0
    for one in blocks:
        carry, relay, source = map(_log, (one.carry, one.relay, one.source))
        own, relayed = carry + np.log1p(one.reach / prompt_tokens) + c, relay + c
        if one.window is not None:
            c = own
            end = None if end is None else end + one.reach
        elif end is not None:
            c = np.logaddexp(own, relayed + symmetric.log_complete(end, prompt_tokens, 2)[1])
            end = None
        else:
            c = np.logaddexp(np.append(own, -inf), np.append(-inf, relayed))
        c[0] = np.logaddexp(c[0], source)
    return c, end


def _terms(chains: Array, prompt_tokens: int, t: Array) -> Array:
    weights = symmetric.log_complete(t, prompt_tokens, len(chains))
    return chains.reshape(-1, *[1] * t.ndim) + weights


def _sees_prompt(block: Block, t: NDArray[np.integer]) -> NDArray[np.bool_]:
    return np.ones_like(t, bool) if block.window is None else t <= block.reach


def _near(values: Array, reach: int) -> Array:
    """Largest of the values at t - reach … t, along the last axis."""
    if reach == 0:
        return values
    size = min(reach, values.shape[-1] - 1) + 1
    back = (size - 1) // 2 if size % 2 else size // 2 - 1
    ends = maximum_filter1d(values, size, axis=-1, mode="constant", cval=-inf, origin=back)
    return np.asarray(ends)


def _unlogged(result: Array) -> Array:
    if (largest := result.max(initial=-inf)) > log(np.finfo(float).max):
        raise Refused(
            f"the distance reaches e^{largest:.0f}, beyond the largest float; ask for its "
            "logarithm with log=True"
        )
    return np.asarray(np.exp(result))


def _log(x: ArrayLike) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, np.float64))


def _check(blocks: Sequence[Block], prompt_tokens: int) -> None:
    if not blocks:
        raise Refused("blocks is empty: a network has at least 1")
    symmetric.whole("prompt_tokens", prompt_tokens)


def _constant(name: str, value: ArrayLike) -> None:
    array = symmetric.numbers(name, value)
    wrong = array[~(np.isfinite(array) & (array >= 0))]
    if wrong.size:
        raise Refused(f"{name} = {wrong.flat[0]:g}: constants are finite and not negative")
