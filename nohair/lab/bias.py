r"""The intervention: a bias on the prompt's attention logits, against dilution.

For a query at continuation position t, every key of the prompt gets :math:`b(t)` added to its
logit, :math:`b = \lambda\log(t/t_0)` unless told otherwise. The bias goes to the model's own
attention through its mask: what a sliding window hides stays hidden; where logits are capped, it
is added after the cap, since before it the cap would undo it. Rows must be of one length, without
padding, as everywhere in this library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from tqdm import tqdm
from transformers import Cache

from nohair.errors import Failed, Refused
from nohair.lab import anatomy, attend, passes
from nohair.lab.models import Subject
from nohair.lab.texts import Texts

Array = NDArray[np.float64]
Schedule = Callable[[Array], Any]
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", attend.NAME)


@contextmanager
def dilution_bias(
    subject: Subject,
    prompt_tokens: int,
    strength: float = 1.0,
    start: float = 16.0,
    *,
    onset: float = 1.0,
    layers: Sequence[int] | None = None,
    head: int | None = None,
    on_head: bool = False,
) -> Iterator[Subject]:
    r"""Add :math:`\lambda\log(t/t_0)` to the logits of the prompt's keys until the block ends.

    Strength 0 touches nothing: the result is that of the plain model bit for bit.

    Parameters
    ----------
    subject
        The model.
    prompt_tokens
        P.
    strength
        :math:`\lambda`; 1 cancels the dilution of uniform attention.
    start
        :math:`t_0`, where the bias is zero; before it, the bias is negative.
    onset
        First t that is biased.
    layers, head, on_head
        As for `prompt_bias`.

    Yields
    ------
    Subject
        The same model; its provenance says what was done to it.

    Raises
    ------
    Refused
        A number out of its range; otherwise as `prompt_bias`.
    """
    if not np.isfinite(strength):
        raise Refused(f"strength = {strength}: give a finite number")
    for name, value in (("start", start), ("onset", onset)):
        if not 1 <= value < inf:
            raise Refused(f"{name} = {value:g}: positions start at 1")

    def schedule(t: Array) -> Array:
        return np.where(t >= onset, strength * np.log(t / start), 0.0)

    about = {"strength": float(strength), "start": float(start), "onset": float(onset)}
    chosen = layers if strength else ()
    with prompt_bias(
        subject, prompt_tokens, schedule, layers=chosen, head=head, on_head=on_head, about=about
    ) as biased:
        yield biased


@contextmanager
def prompt_bias(
    subject: Subject,
    prompt_tokens: int,
    schedule: Schedule | Array,
    *,
    layers: Sequence[int] | None = None,
    head: int | None = None,
    on_head: bool = False,
    about: dict[str, Any] | None = None,
) -> Iterator[Subject]:
    """Add any bias to the logits of the prompt's keys until the block ends.

    The model is as it was afterwards, also after an exception, and so is every other model that
    shares its configuration: nothing but hooks on this one's attention is used.

    Parameters
    ----------
    subject
        The model.
    prompt_tokens
        P.
    schedule
        A function of positions t (from 1, any number of them) whose result broadcasts to (layers,
        heads, positions); or a table of that shape for t = 1 … T, such as `preserving` gives.
    layers
        Which blocks are biased, counted from 1; by default all.
    head
        Tokens before the prompt, which all runs share: by default 1 if the subject has BOS.
    on_head
        Bias these as well.
    about
        What the provenance says of the schedule.

    Raises
    ------
    Refused
        P below 1, no such layer, an attention that takes no bias, a bias of another shape or not
        finite.
    Failed
        The bias let a later token move an earlier state; a table ends before the continuation.
    """
    shape, model = subject.anatomy, subject.model
    if prompt_tokens < 1:
        raise Refused(f"prompt_tokens = {prompt_tokens}: ask for at least 1")
    chosen = range(1, shape.layers + 1) if layers is None else sorted(set(layers))
    if wrong := [layer for layer in chosen if not 1 <= layer <= shape.layers]:
        raise Refused(f"layer {wrong[0]}: {subject.name} has blocks 1 to {shape.layers}")
    kind = model.config._attn_implementation
    if kind not in IMPLEMENTATIONS:
        raise Refused(
            f"attention {kind!r} takes no bias; load {subject.name} with eager, sdpa or "
            "flex_attention"
        )
    before = int(subject.bos is not None) if head is None else head
    keys = slice(0 if on_head else before, before + prompt_tokens)
    hooks = _Hooks(schedule if callable(schedule) else _Table(schedule), keys, subject)
    blocks, path = anatomy.blocks(model), shape.family.attention
    handles = [
        blocks[layer - 1]
        .get_submodule(path)
        .register_forward_pre_hook(hooks.at(layer - 1), with_kwargs=True)
        for layer in chosen
    ]
    try:
        if handles:
            given = inf if callable(schedule) else np.shape(schedule)[-1]  # a table may be short
            _check_causal(subject, keys.stop + int(min(8, given)))
        described = {
            **(about or {"schedule": getattr(schedule, "__name__", "table")}),
            "prompt_tokens": prompt_tokens,
            "layers": "all" if layers is None else list(chosen),
            "on_head": on_head,
        }
        yield replace(subject, provenance=subject.provenance | {"bias": described})
    finally:
        for handle in handles:
            handle.remove()


def preserving(
    subject: Subject,
    prompts: Texts,
    continuations: Texts,
    start: int = 16,
    *,
    chunk: int = 128,
    bos: bool = True,
    progress: bool | None = None,
) -> Array:
    r"""Find the bias under which every head's share of the prompt stays what it is at t_0.

    :math:`b(t) = \mathrm{logit}\,\pi(t_0) - \mathrm{logit}\,\pi(t)`, by layer and head, in one pass
    from the bottom up: each block's share is that of states which the blocks before it, biased
    already, made. Logits of the share are averaged over the prompts first, since one b(t) has to
    serve them all, and b itself over the continuations: with one of those, each head's mean logit
    is constant exactly.

    Parameters
    ----------
    subject
        The model, without a bias.
    prompts, continuations
        Ids of shape (K, P) and (C, T).
    start
        :math:`t_0`, where the bias is zero.
    chunk
        Tokens per forward pass; the first holds t_0.
    bos
        Put the tokenizer's own first token before each prompt, if it has one.
    progress
        Show a bar; by default on a terminal only.

    Returns
    -------
    numpy.ndarray
        For `prompt_bias`: (layers, heads, T); zero where a window shows none of the prompt, or
        nothing else.

    Raises
    ------
    Refused
        t_0 beyond the continuation; P + T beyond the model's positions; no prompt, no
        continuation.
    """
    head = [subject.bos] if bos and subject.bos is not None else []
    (count, prompt_tokens), (rows, horizon) = prompts.ids.shape, continuations.ids.shape
    subject.check_room(prompt_tokens, horizon, len(head))
    if min(sizes := (count, prompt_tokens, rows)) < 1:
        raise Refused("K = {}, P = {}, C = {}: give at least 1 of each".format(*sizes))
    if chunk < 1:
        raise Refused(f"chunk {chunk}: a forward pass needs at least 1 token")
    if not 1 <= start <= horizon:
        raise Refused(f"start = {start}: the continuation has positions 1 to {horizon}")
    first = len(head) + prompt_tokens
    length, opening = first + horizon, max(chunk, first + start)
    chunks = [slice(0, min(opening, length))]
    chunks += [slice(a, min(a + chunk, length)) for a in range(opening, length, chunk)]
    tables, quiet = [], None if progress is None else not progress
    total = len(chunks) * len(continuations.ids)
    with tqdm(total=total, unit="chunk", desc="preserving", disable=quiet, leave=False) as bar:
        for continuation in continuations.ids:
            found = _Preserving(subject, slice(len(head), first), start, horizon)
            ids = passes.batch(head, prompts.ids, continuation)
            with attend.observed(subject, answer=found.answer):
                passes.forward(subject, ids, chunks, found.begin, bar)
            tables.append(found.bias)
    mean: Array = torch.stack(tables).mean(0).double().cpu().numpy()
    return mean


class _Preserving:
    """The bias of every head as it is found, chunk by chunk."""

    def __init__(self, subject: Subject, keys: slice, start: int, horizon: int) -> None:
        shape = subject.anatomy
        self.keys, self.start, self.now = keys, start, slice(0, 0)
        self.bias = torch.zeros(shape.layers, shape.heads, horizon, device=subject.device)
        self.held = torch.zeros(shape.layers, shape.heads, 1, device=subject.device)

    def begin(self, chunk: slice) -> None:
        self.now = chunk

    def answer(self, layer: int, heads: slice, logits: Tensor) -> Tensor:
        skip = max(0, self.keys.stop - self.now.start)
        oldest = self.now.stop - logits.shape[-1]
        begin, end = (max(0, x - oldest) for x in (self.keys.start, self.keys.stop))
        added = torch.zeros_like(logits[:1])
        if skip >= logits.shape[2] or begin == end:
            return added
        asked = logits[:, :, skip:]
        others = torch.cat([asked[..., :begin], asked[..., end:]], -1)
        gap = asked[..., begin:end].logsumexp(-1) - others.logsumexp(-1)
        share = gap.mean(0)  # one bias for all prompts
        t = slice(self.now.start + skip - self.keys.stop, self.now.stop - self.keys.stop)
        if t.start < self.start <= t.stop:
            self.held[layer, heads] = share[:, [self.start - 1 - t.start]]
        bias = torch.nan_to_num(self.held[layer, heads] - share, nan=0.0, posinf=0.0, neginf=0.0)
        self.bias[layer, heads, t] = bias
        added[0, :, skip:, begin:end] = bias[..., None]
        return added


class _Table:
    """A bias given for t = 1 … T, read like a function of t."""

    def __init__(self, values: Array) -> None:
        self.values = np.asarray(values, float)

    def __call__(self, t: Array) -> Array:
        if t[-1] > self.values.shape[-1]:
            raise Failed(
                f"the bias is given up to t = {self.values.shape[-1]}, the model is at "
                f"t = {t[-1]:g}; make the table longer or the continuation shorter"
            )
        found: Array = self.values[..., t.astype(int) - 1]
        return found


class _Hooks:
    """Put the bias into the mask that a block's attention is about to use."""

    def __init__(self, schedule: Schedule, keys: slice, subject: Subject) -> None:
        self.schedule, self.keys, self.subject = schedule, keys, subject

    def at(self, layer: int) -> Callable[[Any, Any, dict[str, Any]], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
            past = 0 if cache is None else int(cache.get_seq_length(layer))
            mask = kwargs.get("attention_mask")
            seen = mask.shape[-1] if mask is not None else past + states.shape[1]
            query = torch.arange(past, past + states.shape[1], device=states.device)
            key = torch.arange(past + states.shape[1] - seen, past + states.shape[1])
            bias = self._bias(layer, query, key.to(states.device), states.dtype)
            if bias is None:
                return None
            if isinstance(mask, BlockMask):
                shape = (len(states), self.subject.anatomy.heads, *bias.shape[2:])
                return args, kwargs | {"position_bias": bias.expand(shape)}
            return args, kwargs | {"attention_mask": _added(mask, bias, query, key)}

        return hook

    def _bias(self, layer: int, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Bias (1, 1 or heads, queries, keys); None where no query or no key is concerned."""
        asked, given = query >= self.keys.stop, (key >= self.keys.start) & (key < self.keys.stop)
        if not (asked.any() and given.any()):
            return None
        t = (query[asked] - self.keys.stop + 1).double().cpu().numpy()
        values, shape = np.asarray(self.schedule(t), float), self.subject.anatomy
        _check_values(values, (shape.layers, shape.heads, len(t)))
        if values.ndim == 3:
            values = values[layer if len(values) > 1 else 0]
        rows = torch.from_numpy(np.atleast_2d(values)).to(query.device, dtype)
        bias = torch.zeros(len(rows), len(query), len(key), device=query.device, dtype=dtype)
        bias[:, asked] = rows[..., None] * given.to(dtype)
        return bias[None]


def _check_values(values: Array, wanted: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(values.shape, wanted) == wanted
    except ValueError:
        fits = False
    if not fits:
        raise Refused(
            f"bias of shape {values.shape}: give one that broadcasts to (layers, heads, positions)"
            f" = {wanted}"
        )
    if not np.isfinite(values).all():
        raise Refused(f"bias = {values[~np.isfinite(values)][0]}: give finite numbers")


def _added(mask: Tensor | None, bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Join a mask, in whichever form the model's attention takes it, and a bias."""
    if mask is None:  # then the kernel itself hides what comes later, and nothing else
        mask = key.to(query.device) <= query[:, None]
    elif len(mask) > 1:
        mask = mask[:1]  # rows are alike: no padding
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
    return torch.where(attend.hides(mask), mask, mask + bias)


@torch.inference_mode()
def _check_causal(subject: Subject, length: int) -> None:
    """See that the bias lets no later token move an earlier state."""
    length = min(length, subject.anatomy.context)
    ids = torch.arange(length, device=subject.device)[None] % subject.model.config.vocab_size
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % subject.model.config.vocab_size
    states = [subject.model.base_model(rows, use_cache=False)[0][:, :-1] for rows in (ids, other)]
    moved = float((states[0] - states[1]).abs().max())
    if moved > 0:
        raise Failed(f"under the bias a later token moves earlier states by {moved:g}; report it")
