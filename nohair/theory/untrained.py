r"""Untrained networks, predicted from the variances of their weights: no number is fitted.

In a wide network of independent Gaussian weights each sub-block adds to the covariance of the
states what its input's covariance determines. So two matrices are carried from block to block:
:math:`K_{ij} = \frac1d \langle h_i, h_j \rangle` within a run and
:math:`X_{ij} = \frac1d \langle h_i, h'_j \rangle` across the two runs, and
:math:`D^2(t)/d = K_{tt} + K'_{tt} - 2 X_{tt}`. This is derived for width to infinity, zero biases,
unit gains and logits of small variance :math:`s^2`; not proved for networks of finite width.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nohair.errors import Refused
from nohair.theory import gram, relay, symmetric
from nohair.theory.kernels import Activation, kernel
from nohair.theory.symmetric import Array

Residual = Literal["flat", "scaled", "wang"]
Form = Literal["full", "grid"]

FARTHEST = 10**9
MOST_LOGIT = 3.0  # beyond, the series of `gram` has not converged
MOST_FULL = 20_000  # positions; four matrices of that size take 13 GB


@dataclass(frozen=True)
class Initialisation:
    r"""What the prediction needs to know of an architecture and of its random weights.

    Parameters
    ----------
    width
        d, of the residual stream.
    mlp_width
        :math:`d_{ff}`.
    value_width
        Heads times width of a head.
    std
        Of every matrix that reads, and of the embeddings.
    residual
        Of the matrices that write into the stream: ``flat`` (std), ``scaled``
        (:math:`\mathrm{std}/\sqrt{2L}`) or ``wang`` (:math:`2/(L\sqrt d)`).
    activation, gated
        Of the MLP.
    positions
        Whether learned positions are added to the embeddings.
    parallel
        Attention and MLP read the same state.
    scaled_embedding
        Embeddings are multiplied by :math:`\sqrt d`.
    query_key_norm
        Queries and keys are normalised.
    post_norm
        What a sub-block adds is normalised.
    epsilon
        In every norm.
    """

    width: int
    mlp_width: int
    value_width: int
    std: float = 0.02
    residual: Residual = "flat"
    activation: Activation = "gelu_tanh"
    gated: bool = False
    positions: bool = False
    parallel: bool = False
    scaled_embedding: bool = False
    query_key_norm: bool = False
    post_norm: bool = False
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        """Refuse what is no architecture.

        Raises
        ------
        Refused
            A width is no positive whole number; std or epsilon is negative; unknown residual or
            activation.
        """
        for name in ("width", "mlp_width", "value_width"):
            symmetric.whole(name, getattr(self, name))
        for name in ("std", "epsilon"):
            symmetric.amount(name, getattr(self, name))
        if self.residual not in get_args(Residual):
            raise Refused(f"residual = {self.residual!r}: choose {', '.join(get_args(Residual))}")
        if self.activation not in get_args(Activation):
            known = ", ".join(get_args(Activation))
            raise Refused(f"activation = {self.activation!r}: choose {known}")

    @property
    def embedding(self) -> float:
        r""":math:`\sigma_e^2`."""
        return self.std**2 * (self.width if self.scaled_embedding else 1)

    @property
    def position(self) -> float:
        r""":math:`\sigma_p^2`."""
        return self.std**2 if self.positions else 0.0

    @property
    def reading(self) -> float:
        """v: variance of what a row of a matrix reads from a normalised state."""
        return self.width * self.std**2

    @property
    def logit(self) -> float:
        """s²: variance of the attention logits."""
        return 1.0 if self.query_key_norm else self.reading**2

    def writing(self, layers: int) -> float:
        """Variance of the entries of the matrices that write into the stream of L blocks."""
        if self.residual == "wang":
            return 4 / (layers**2 * self.width)
        return self.std**2 / (2 * layers if self.residual == "scaled" else 1)

    def attention(self, layers: int) -> float:
        """A²: what attention multiplies the covariance of averaged inputs by."""
        return self.reading * self.value_width * self.writing(layers)

    def mlp(self, layers: int) -> float:
        """B²: what the MLP multiplies its kernel by."""
        return self.mlp_width * self.writing(layers)

    def hidden(self, correlation: Array) -> Array:
        """F: covariance in the MLP of inputs of unit variance and this correlation."""
        inner = kernel(self.activation, self.reading, correlation)
        return inner * (self.reading * correlation) if self.gated else inner


_LLAMA: dict[str, Any] = {"activation": "silu", "gated": True, "epsilon": 1e-6}
_GEMMA: dict[str, Any] = {
    "gated": True,
    "scaled_embedding": True,
    "post_norm": True,
    "epsilon": 1e-6,
}
INITIALISATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"residual": "scaled", "positions": True},
    "neox": {"residual": "wang", "activation": "gelu", "parallel": True},
    "neox-config": {"activation": "gelu", "parallel": True},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": {**_LLAMA, "query_key_norm": True},
    "gemma2": _GEMMA,
    "gemma3": {**_GEMMA, "query_key_norm": True},
}


def named(
    name: str, width: int, *, mlp_width: int | None = None, value_width: int | None = None
) -> Initialisation:
    r"""Describe a family's random weights, at any width.

    Parameters
    ----------
    name
        ``gpt2``; ``neox``, as published: small-init, :math:`\mathrm{std} = \sqrt{2/5d}`, and
        Wang-init for what writes; ``neox-config``, what transformers draws; ``llama``,
        ``mistral``, ``qwen3``, ``gemma2``, ``gemma3``, flat 0.02.
    width
        d.
    mlp_width, value_width
        4 d and d unless given.

    Raises
    ------
    Refused
        Unknown name; a width that is no positive whole number.
    """
    if name not in INITIALISATIONS:
        raise Refused(f"initialisation {name!r} is unknown; choose {', '.join(INITIALISATIONS)}")
    width = symmetric.whole("width", width)
    std = sqrt(2 / (5 * width)) if name == "neox" else 0.02
    rest: dict[str, Any] = {"std": std, **INITIALISATIONS[name]}
    mlp_width = 4 * width if mlp_width is None else mlp_width
    return Initialisation(width, mlp_width, width if value_width is None else value_width, **rest)


def distance(
    init: Initialisation,
    layers: int,
    prompt_tokens: int,
    t: ArrayLike,
    *,
    form: Form = "grid",
    collisions: float = 0.0,
) -> Array:
    r"""Predict the distance between two random prompts, at every block.

    Parameters
    ----------
    init
        From `named`, or your own.
    layers, prompt_tokens
        L, P.
    t
        Whole positions from 1.
    form
        ``grid``: covariances of cells of positions, for t into the millions; within 0.6 % of
        ``full``, which carries all positions.
    collisions
        Probability that two tokens drawn at different places are the same.

    Returns
    -------
    numpy.ndarray
        Root mean square distance, in the residual stream's units, (L, \*t.shape).

    Raises
    ------
    Refused
        A count is no positive whole number; a t below 1 or with a fraction, or so large that
        rounding hides the distance (from about 1e7 on); more positions than the full form can
        hold; weights that make logits too large for the theory.
    """
    layers, prompt_tokens = _check(init, layers, prompt_tokens)
    if not 0 <= symmetric.amount("collisions", collisions) <= 1:
        raise Refused(f"collisions = {collisions:g}: give a probability from 0 to 1")
    at = symmetric.positions(t)
    if (at % 1).any():
        raise Refused(f"t = {at[at % 1 > 0].flat[0]:g}: tokens stand at whole positions")
    horizon = int(at.max(initial=1))
    if horizon > FARTHEST:
        raise Refused(f"t = {horizon:g}: rounding hides the distance there; stay below 1e7")
    if form == "full" and prompt_tokens + horizon > MOST_FULL:
        raise Refused(
            f"form = 'full' holds {MOST_FULL} positions, not {prompt_tokens + horizon}; use 'grid'"
        )
    if form not in get_args(Form):
        raise Refused(f"form = {form!r}: choose full or grid")
    cells = gram.Cells(prompt_tokens, horizon, fine=form == "full")
    apart, own = collisions * init.embedding, init.embedding + init.position
    other = np.where(cells.prompt, apart + init.position, own)
    grams = [cells.covariance(apart, np.full_like(other, own)), cells.covariance(apart, other)]
    squares = list(gram.propagate(_block(init, layers), layers, cells, grams))
    text = ~cells.prompt
    places = cells.middle[text] - prompt_tokens
    lost = places[(np.stack(squares)[:, text] == 0).any(axis=0)]
    if collisions < 1 and lost.size and lost.min() <= horizon:
        raise Refused(
            f"t = {horizon:g}: from t of about {lost.min():.0e} on the distance is lost in the "
            "rounding of the covariances; give smaller t"
        )
    # D is smooth in log t, and the cells of the first positions hold one each.
    log_t, known = np.log(at), np.log(places)
    smallest = np.finfo(float).tiny  # where prompts that share a token leave no distance
    logs = [np.interp(log_t, known, np.log(np.maximum(s[text], smallest))) for s in squares]
    return np.asarray(sqrt(init.width) * np.exp(np.stack(logs) / 2))


def between(
    init: Initialisation,
    layers: int,
    first: ArrayLike,
    second: ArrayLike,
    prompt_tokens: int,
) -> Array:
    """Predict the distance between two given texts, which tokens repeat taken into account.

    Parameters
    ----------
    init, layers, prompt_tokens
        As for `distance`.
    first, second
        Token ids of either run, prompt and continuation, (P + T,).

    Returns
    -------
    numpy.ndarray
        Root mean square distance at t = 1 … T, in the residual stream's units, (L, T).

    Raises
    ------
    Refused
        As for `distance`; texts of different lengths, or no longer than the prompt.
    """
    layers, prompt_tokens = _check(init, layers, prompt_tokens)
    a, b = np.asarray(first), np.asarray(second)
    if a.ndim != 1 or a.shape != b.shape or not prompt_tokens < a.size <= MOST_FULL:
        raise Refused(
            f"texts of shape {a.shape} and {b.shape}: give two rows of ids of one length, "
            f"beyond the prompt's {prompt_tokens} and at most {MOST_FULL}"
        )
    cells = gram.Cells(prompt_tokens, a.size - prompt_tokens, fine=True)

    def start(x: NDArray[Any], y: NDArray[Any]) -> Array:
        matrix = init.embedding * np.equal.outer(x, y)
        own = matrix.diagonal() + init.position
        return np.concatenate([matrix, own[None]])

    grams = [start(a, a), start(b, b), start(a, b)]
    squares = gram.propagate(_block(init, layers), layers, cells, grams, gram.APART)
    rows = [np.sqrt(init.width * np.maximum(square[~cells.prompt], 0)) for square in squares]
    return np.stack(rows)


def gains(init: Initialisation, layers: int) -> Array:
    r"""Estimate each block's gain from the size its input has by then: :math:`g_l = A/\sigma_l`.

    The scalar shadow of the covariances, position forgotten: :math:`\sigma^2` and the covariance of
    two states are carried from block to block. For `incoherent`.

    Returns
    -------
    numpy.ndarray
        First block first, (L,).

    Raises
    ------
    Refused
        `layers` is no positive whole number.
    """
    layers, _ = _check(init, layers, 1)
    block = _block(init, layers)
    size, common, found = init.embedding + init.position, 0.0, []
    for _ in range(layers):
        before = common / size
        found.append(sqrt(block.attention / (size + init.epsilon)))
        size, common = size + block.attention * before, common + block.attention * before
        rho = before if block.parallel else common / size
        own, shared = init.hidden(np.array([1.0, rho]))
        size, common = size + block.mlp * own, common + block.mlp * shared
    return np.array(found)


def incoherent(horizon: int, layers: int, prompt_tokens: int, gain: relay.Gain) -> Array:
    r"""Evaluate the incoherent relay: uniform attention, independent random matrices, no norms.

    A linear network :math:`X \to X + C X W_l^\top` with the running mean C and independent
    :math:`W_l` of mean zero with :math:`E|W_l v|^2 = g_l^2 |v|^2` for every v; prompts whose tokens
    differ independently of each other, with mean zero and mean square 1. Paths through different
    sets of blocks do not interfere, hence exactly

    .. math:: E\,D_l(t)^2 = \sum_{k \ge 1} e_k(g_0^2, \dots, g_{l-1}^2)\, q_k(t), \qquad
        q_k(t) = \sum_{j \le P} (C^k)_{tj}^2 .

    Parameters
    ----------
    horizon, layers, prompt_tokens
        T, L, P.
    gain
        One for all blocks, or one for each; `gains` estimates them.

    Returns
    -------
    numpy.ndarray
        Root mean square distance after every block at t = 1 … T, (L, T), in units of the prompts'.

    Raises
    ------
    Refused
        A count is no positive whole number; a gain is negative; gains that disagree with L.
    """
    layers = symmetric.whole("layers", layers)
    weights = chain_weights(horizon, prompt_tokens, layers)
    powers, rows = np.array([1.0]), []
    for g in relay.per_block(layers, gain):
        powers = np.append(powers, 0.0) + float(g) ** 2 * np.append(0.0, powers)
        rows.append(np.sqrt(powers[1:] @ weights[: len(powers) - 1]))
    return np.stack(rows)


def chain_weights(horizon: int, prompt_tokens: int, count: int) -> Array:
    r"""Evaluate :math:`q_1, \dots, q_{count}` at t = 1 … T, (count, T); see `incoherent`.

    Raises
    ------
    Refused
        A number is no positive whole number.
    """
    horizon = symmetric.whole("horizon", horizon)
    prompt_tokens = symmetric.whole("prompt_tokens", prompt_tokens)
    count = symmetric.whole("count", count)
    length = prompt_tokens + horizon
    paths = np.eye(length, prompt_tokens)
    seen = np.arange(1, length + 1)[:, None]
    rows = []
    for _ in range(count):
        paths = paths.cumsum(axis=0) / seen
        rows.append((paths[prompt_tokens:] ** 2).sum(axis=1))
    return np.stack(rows)


def _block(init: Initialisation, layers: int) -> gram.Block:
    return gram.Block(
        attention=init.attention(layers),
        mlp=init.mlp(layers),
        hidden=init.hidden,
        logit=init.logit,
        parallel=init.parallel,
        post_norm=init.post_norm,
        epsilon=init.epsilon,
    )


def _check(init: Initialisation, layers: int, prompt_tokens: int) -> tuple[int, int]:
    if not isinstance(init, Initialisation):
        raise Refused(f"init = {init!r}: give an Initialisation, such as named('gpt2', width=512)")
    if not init.logit <= MOST_LOGIT:
        raise Refused(
            f"std = {init.std:g} at width {init.width} makes logits of variance {init.logit:.2g}: "
            f"the softmax correction holds up to {MOST_LOGIT:g}; take a smaller std or width"
        )
    whole = symmetric.whole
    return whole("layers", layers), whole("prompt_tokens", prompt_tokens)
