"""Reading attention, norms and MLPs while a model runs: largest and smallest, never the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nohair.errors import Failed
from nohair.lab import anatomy, attend, passes
from nohair.lab.distances import pairwise
from nohair.lab.models import Subject

ROLES: tuple[anatomy.Role, ...] = get_args(anatomy.Role)


class Watch:
    """What is collected while a subject runs; layers and heads count from 0.

    By layer and head ``logit``, ``query`` (continuation), ``key`` (all positions; by key head):
    the largest; ``beta``, ``share``, ``first``, ``peak``: see `nohair.lab.conditions.inspect`. By
    layer ``state``: largest norm of what attention reads; ``low``, ``high``: range of what enters
    the MLP's activation, ``up``: largest entry beside it if it is gated; ``scaling`` of the logits;
    ``mean``, ``most`` (layer, pair): differences over the prompt, ``opening``: of its first token.
    With one more layer for the final norm, ``rms`` (layer, role): the smallest that enters a norm,
    and ``entered``: the largest entry of the residual stream before attention.

    Parameters
    ----------
    subject
        The model.
    prompts, head, prompt_tokens, horizon
        K, tokens before the prompt, P, T.
    """

    def __init__(
        self, subject: Subject, prompts: int, head: int, prompt_tokens: int, horizon: int
    ) -> None:
        self.subject, self.shape, self.prompts = subject, subject.anatomy, prompts
        self.head, self.prompt_tokens, self.start = head, prompt_tokens, head + prompt_tokens
        self.now = slice(0, 0)
        layers, heads, keys = self.shape.layers, self.shape.heads, self.shape.kv_heads
        pairs = prompts * (prompts - 1) // 2
        sizes = {
            **dict.fromkeys(("logit", "query", "beta"), (layers, heads)),
            **dict.fromkeys(("share", "first", "peak"), (layers, heads, horizon)),
            **dict.fromkeys(("state", "low", "high", "up", "scaling"), (layers,)),
            **dict.fromkeys(("mean", "most", "opening"), (layers, pairs)),
            "key": (layers, keys),
            "entered": (layers + 1,),
            "rms": (layers + 1, len(ROLES)),
        }
        self.seen = {name: torch.zeros(size, device=subject.device) for name, size in sizes.items()}
        self.seen["rms"] += inf

    def begin(self, chunk: slice) -> None:
        """Take note of which positions come next."""
        self.now = chunk

    def result(self, runs: int) -> dict[str, NDArray[np.float64]]:
        """Give what was seen in `runs` runs of the batch.

        Raises
        ------
        Failed
            A state or a logit was not finite; the layer is named.
        """
        seen = {name: values.double().cpu().numpy() for name, values in self.seen.items()}
        for name in ("share", "first", "peak", "mean"):
            seen[name] /= runs
        read = seen["state"] + seen["logit"].sum(-1) + seen["high"] + seen["up"]
        broken = ~np.isfinite(read + seen["entered"][1:])
        if broken.any():
            raise Failed(
                f"layer {int(broken.argmax()) + 1}: states or logits are not finite in "
                f"{self.subject.model.dtype}; measure in float32, or look at the weights where "
                "that was done"
            )
        return seen

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the model use our attention, and hooks read its norms and MLPs; then undo it."""
        with attend.observed(self.subject, self._read_attention), passes.hooked(self._hooks()):
            yield

    def _hooks(self) -> dict[nn.Module, passes.Hook]:
        model = self.subject.model
        roles: dict[nn.Module, list[tuple[int, anatomy.Role]]] = {}
        for layer, named in enumerate(anatomy.norms(model)):
            for role, norm in named.items():
                roles.setdefault(norm, []).append((layer, role))
        roles[anatomy.final_norm(model)] = [(self.shape.layers, "attention")]
        hooks = {norm: self._at_norm(which) for norm, which in roles.items()}
        for layer, block in enumerate(anatomy.blocks(model)):
            for i, path in enumerate(self.shape.family.readers):
                hooks[block.get_submodule(path)] = self._at_reader(layer, activated=i == 0)
        return hooks

    def _at_norm(self, which: list[tuple[int, anatomy.Role]]) -> passes.Hook:
        """Read what enters a norm, which may have more than one role, and what leaves it."""
        layer_of_first, first = which[0]
        feeds_attention = first == "attention" and layer_of_first < self.shape.layers

        def hook(module: Any, args: Any, output: Tensor) -> None:
            states = args[0].float()
            if first == "attention":
                self._raise("entered", layer_of_first, states.abs().max())
            if self.shape.family.norm == "LayerNorm":
                states = states - states.mean(-1, keepdim=True)
            size = states.square().mean(-1).sqrt()
            for layer, role in which:
                seen = size if role in ("query", "key") else self._continuation(size)
                if seen.numel():
                    self._lower("rms", (layer, ROLES.index(role)), seen.min())
            if feeds_attention:
                self._read_states(layer_of_first, output.float())

        return hook

    def _read_states(self, layer: int, states: Tensor) -> None:
        """Largest norm of what attention reads, and the differences over the prompt."""
        self._raise("state", layer, torch.linalg.vector_norm(states, dim=-1).max())
        begin, end = (max(0, x - self.now.start) for x in (self.head, self.start))
        prompt = states[:, begin:end]
        if prompt.shape[1]:
            gaps = pairwise(prompt)
            self.seen["mean"][layer] += gaps.sum(-1) / self.prompt_tokens
            self._raise("most", layer, gaps.amax(-1))
            if self.now.start <= self.head:
                self._raise("opening", layer, gaps[:, 0])

    def _at_reader(self, layer: int, activated: bool) -> passes.Hook:
        """Read what enters the MLP's activation, or what stands beside it in a gated one."""

        def hook(module: Any, args: Any, output: Tensor) -> None:
            seen = self._continuation(output)
            if seen.numel() and activated:
                self._lower("low", layer, seen.min())
                self._raise("high", layer, seen.max())
            elif seen.numel():
                self._raise("up", layer, seen.abs().max())

        return hook

    def _continuation(self, values: Tensor) -> Tensor:
        """Leave out what comes before the continuation; OPT's MLP has runs and positions in one."""
        length = self.now.stop - self.now.start
        by_run = values.reshape(self.prompts, length, -1)
        return by_run[:, max(0, self.start - self.now.start) :]

    def _raise(self, name: str, at: Any, value: Tensor) -> None:
        self.seen[name][at] = torch.maximum(self.seen[name][at], value)

    def _lower(self, name: str, at: Any, value: Tensor) -> None:
        self.seen[name][at] = torch.minimum(self.seen[name][at], value)

    def _read_attention(self, group: attend.Group) -> None:
        """Read one group of heads, where the continuation asks; of keys, at every position."""
        layer, at = group.layer, (group.layer, group.heads)
        self.seen["scaling"][layer] = group.scaling
        longest = torch.linalg.vector_norm(group.key.float(), dim=-1).amax()
        self._raise("key", (layer, group.heads.start // group.query.shape[1]), longest)
        query, logits, weights, hidden = group.query, group.logits, group.weights, group.hidden
        skip = max(0, self.start - self.now.start)
        if skip >= query.shape[2]:
            return
        query, logits, weights, hidden = (
            x[..., skip:, :] for x in (query, logits, weights, hidden)
        )
        self._raise("logit", at, logits.masked_fill(hidden, 0.0).abs().amax((0, 2, 3)))
        self._raise("query", at, torch.linalg.vector_norm(query.float(), dim=-1).amax((0, 2)))
        oldest = self.now.stop - logits.shape[-1]  # a window's cache has dropped what came before
        shared, end = (max(0, x - oldest) for x in (self.head, self.start))
        share = weights[..., shared:end].sum(-1)
        t = slice(self.now.start + skip - self.start, self.now.stop - self.start)  # from 0
        keys = self.prompt_tokens + torch.arange(t.start + 1, t.stop + 1, device=logits.device)
        windowed = self.shape.windows[layer] is not None
        peak = weights[..., shared:].amax(-1)
        counted = share / self.prompt_tokens if windowed else peak
        self._raise("beta", at, (counted * keys).amax((0, 2)))
        self.seen["share"][*at, t] += share.mean(0)
        self.seen["peak"][*at, t] += peak.mean(0)
        if oldest == 0:
            self.seen["first"][*at, t] += weights[..., 0].mean(0)
