"""Untrained counterparts of a model: the same shape without what training put into it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from nohair.errors import Refused
from nohair.lab import anatomy

Twin = Literal["init", "config", "permuted"]
MATRICES = (nn.Linear, Conv1D, nn.Embedding)


def check(twin: str | None) -> None:
    """Refuse a kind of twin that does not exist.

    Raises
    ------
    Refused
        `twin` is neither None nor one of ``init``, ``config``, ``permuted``.
    """
    if twin is not None and twin not in get_args(Twin):
        raise Refused(f"twin {twin!r} does not exist; choose {', '.join(get_args(Twin))}")


def fresh(config: Any, twin: str, seed: int, dtype: torch.dtype) -> Any:
    """Make a model of random weights.

    Parameters
    ----------
    config
        A transformers configuration; it is copied, since models share what they are given.
    twin
        ``init``: the family's published initialisation, see `anatomy.FAMILIES`;
        ``config``: whatever ``from_config`` gives for the configuration's own
        ``initializer_range``.
    seed
        Of the weights. The global random state is left as it was.
    dtype
        Of the weights; they are drawn in float32.
    """
    config = deepcopy(config)
    config.quantization_config = None  # a GGUF's mark says nothing about random weights
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if twin == "init":
            _initialise(model)
    return model.to(dtype)


@torch.no_grad()
def _initialise(model: Any) -> None:
    family = anatomy.describe(model.config).family
    std = family.initialisation.std(model.config)
    for module in model.modules():
        if isinstance(module, MATRICES):
            module.weight.normal_(0.0, std)
    residual_std = family.initialisation.residual_std(model.config)
    for block in anatomy.blocks(model):
        for path in family.residual_writers:
            writer: Any = block.get_submodule(path)
            writer.weight.normal_(0.0, residual_std)


@torch.no_grad()
def permute(model: Any, seed: int) -> None:
    """Shuffle the entries within each matrix, in place; vectors (gains, biases) stay.

    What is left of training is the distribution of the entries, matrix by matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim >= 2:
            order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
