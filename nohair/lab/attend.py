"""Attention computed in the model's place, where its logits and weights can be read.

One group of heads at a time (those of one key head), because what the fused kernels leave behind
has neither logits nor weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nohair.lab import anatomy
from nohair.lab.models import Subject

NAME = "nohair_attention"  # under which transformers finds ours

AttentionMaskInterface.register(NAME, eager_mask)  # additive: windows are the model's own


class Group(NamedTuple):
    """What one group of heads of one layer computed.

    Parameters
    ----------
    layer, heads
        Counted from 0.
    query, key
        (K, heads, chunk, width) and, of the chunk's own positions, (K, chunk, width).
    logits, weights
        (K, heads, chunk, seen): scaled, after rotary positions and softcap, without and before any
        bias; and what the softmax, bias included, made of them.
    hidden
        Whether a query must not see a key, (1 or K, 1, chunk, seen).
    scaling
        Of the logits.
    """

    layer: int
    heads: slice
    query: Tensor
    key: Tensor
    logits: Tensor
    weights: Tensor
    hidden: Tensor
    scaling: float


Read = Callable[[Group], None]
Answer = Callable[[int, slice, Tensor], Tensor]


@contextmanager
def observed(
    subject: Subject, read: Read | None = None, answer: Answer | None = None
) -> Iterator[None]:
    """Let the model use our attention; then undo it.

    A model that shares its configuration uses it as well meanwhile, neither read nor biased here,
    and is as before up to rounding.

    Parameters
    ----------
    subject
        The model.
    read
        Called with every group.
    answer
        Gives a bias, broadcast to the logits, from layer, heads and the logits themselves, hidden
        ones at minus infinity.
    """
    model, path = subject.model, subject.anatomy.family.attention
    layer_of = {block.get_submodule(path): i for i, block in enumerate(anatomy.blocks(model))}

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Softmax attention; queries (K, heads, chunk, width), keys (K, key heads, seen, width)."""
        groups = query.unflatten(1, (key.shape[1], -1))  # type: ignore[no-untyped-call]
        layer = layer_of.get(module)  # None in a model that shares the configuration
        hidden, out = hides(attention_mask[:, :1]), torch.empty_like(groups)
        given = attention_mask.masked_fill(hidden, 0.0)  # what an intervention added, if any
        for g in range(key.shape[1]):
            heads = slice(g * groups.shape[2], (g + 1) * groups.shape[2])
            logits = groups[:, g] @ key[:, g, None].mT * scaling
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            biased = (logits + _of_heads(given, heads)).masked_fill(hidden, -inf)
            if answer is not None and layer is not None:
                biased = biased + answer(layer, heads, biased)
            weights = biased.softmax(-1)
            out[:, g] = weights.to(value.dtype) @ value[:, g, None]
            if read is not None and layer is not None:
                fresh = key[:, g, -query.shape[2] :]
                found = (groups[:, g], fresh, logits, weights, hidden, scaling)
                read(Group(layer, heads, *found))
        return out.flatten(1, 2).transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        ALL_ATTENTION_FUNCTIONS.pop(NAME, None)


def hides(mask: Tensor) -> Tensor:
    """Tell what an additive mask hides from what a bias merely lowers."""
    return mask <= torch.finfo(mask.dtype).min / 2


def _of_heads(mask: Tensor, heads: slice) -> Tensor:
    return mask if mask.shape[1] == 1 else mask[:, heads]
