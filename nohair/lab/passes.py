"""Running one batch of ids through a model, chunk by chunk, while hooks read what passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import DynamicCache

from nohair.errors import Refused
from nohair.lab.models import Subject

Hook = Callable[[Any, Any, Any], None]


def batch(
    head: Sequence[int], prompts: NDArray[np.int64], continuation: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Join BOS, every prompt and the one continuation, as ids: (K, all tokens)."""
    count = len(prompts)
    parts = [np.tile(head, (count, 1)), prompts, np.tile(continuation, (count, 1))]
    return np.concatenate(parts, axis=1).astype(np.int64)


def cuts(length: int, chunk: int) -> list[slice]:
    """Cut `length` positions into chunks.

    Raises
    ------
    Refused
        Chunks of less than one token.
    """
    if chunk < 1:
        raise Refused(f"chunk {chunk}: a forward pass needs at least 1 token")
    return [slice(a, min(a + chunk, length)) for a in range(0, length, chunk)]


@torch.inference_mode()
def forward(
    subject: Subject,
    ids: NDArray[np.int64],
    chunks: Sequence[slice],
    begin: Callable[[slice], None],
    bar: Any,
) -> None:
    """Run the base model (no logits are made), with its own key-value cache between chunks.

    `begin` is told of each chunk before it runs.
    """
    tokens = torch.from_numpy(ids).to(subject.device)
    cache = DynamicCache(config=subject.model.config)
    for chunk in chunks:
        begin(chunk)
        subject.model.base_model(tokens[:, chunk], cache=cache, use_cache=True)
        bar.update()


@contextmanager
def hooked(hooks: Mapping[nn.Module, Hook]) -> Iterator[None]:
    """Let each module's hook see what goes in and out of it, until the block ends."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
