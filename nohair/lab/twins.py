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
# What transformers calls the activations that `nohair.theory.kernels` knows.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "relu": "relu",
}


def check(twin: str | None) -> None:
    """Refuse a kind of twin that does not exist.

    Raises
    ------
    Refused
        `twin` is neither None nor one of ``init``, ``config``, ``permuted``.
    """
    if twin is not None and twin not in get_args(Twin):
        raise Refused(f"twin {twin!r} does not exist; choose {', '.join(get_args(Twin))}")


def check_drawn(twin: str | None) -> None:
    """Refuse what was not drawn from a recipe.

    Raises
    ------
    Refused
        `twin` is neither ``init`` nor ``config``.
    """
    if twin not in ("init", "config"):
        raise Refused(f"twin {twin!r} has no recipe for its weights; take init or config")


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


def recipe(model: Any, twin: str | None) -> dict[str, Any]:
    """Describe a twin's random weights in the words of `nohair.theory.untrained.Initialisation`.

    Parameters
    ----------
    model
        From `fresh`.
    twin
        ``init`` or ``config``, as it was drawn.

    Raises
    ------
    Refused
        Weights that were not drawn from a recipe; an activation without a kernel.
    """
    check_drawn(twin)
    config = model.config
    shape = anatomy.describe(config)
    family = shape.family
    names = ("hidden_activation", "hidden_act", "activation_function")
    activation = next(getattr(config, n) for n in names if getattr(config, n, None) is not None)
    if activation not in ACTIVATIONS:
        raise Refused(f"activation {activation!r} has no kernel; known: {', '.join(ACTIVATIONS)}")
    block = anatomy.blocks(model)[0]
    written = [anatomy.matrix(block.get_submodule(path)) for path in family.residual_writers]
    published = family.initialisation
    flat = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    return {
        "width": shape.width,
        "value_width": written[0].shape[1],
        "mlp_width": written[1].shape[1],
        "std": published.std(config) if twin == "init" else flat,
        "residual": published.residual if twin == "init" else family.drawn,
        "activation": ACTIVATIONS[activation],
        "gated": len(family.readers) == 2,
        "positions": family.positions == "learned",
        "parallel": shape.parallel,
        "scaled_embedding": family.scaled_embedding,
        "query_key_norm": shape.qk_norm,
        "post_norm": family.placement == "sandwich",
        "epsilon": anatomy.gain(model, anatomy.norms(model)[0]["attention"])[2],
    }


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
