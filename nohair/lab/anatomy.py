"""How each family of models is put together: the one table of architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Literal

from torch import nn

from nohair.errors import Refused

Config = Any  # transformers' configurations are untyped bags of attributes


@dataclass(frozen=True)
class Initialisation:
    """The standard deviations from which a family's training starts, as published.

    Parameters
    ----------
    std
        Of every matrix and embedding, given the configuration.
    residual_std
        Of the two matrices that write into the residual stream.
    source
        Where the recipe is stated.
    """

    std: Callable[[Config], float]
    residual_std: Callable[[Config], float]
    source: str


def _flat(std: float, source: str) -> Initialisation:
    return Initialisation(lambda c: std, lambda c: std, source)


def _scaled(std: float, source: str) -> Initialisation:
    return Initialisation(lambda c: std, lambda c: std / sqrt(2 * c.num_hidden_layers), source)


GPT2_SCALED = _scaled(0.02, "GPT-2 report: residual writers scaled by 1/sqrt(2L)")
OPT_SCALED = _scaled(0.006, "OPT report: 0.006, residual writers scaled by 1/sqrt(2L)")
SMALL_AND_WANG = Initialisation(
    lambda c: sqrt(2 / (5 * c.hidden_size)),
    lambda c: 2 / (c.num_hidden_layers * sqrt(c.hidden_size)),
    "GPT-NeoX-20B report: small-init, and Wang-init for the residual writers",
)
LLAMA_FLAT = _flat(0.02, "flat 0.02, the value in Llama's published configurations")
UNPUBLISHED = _flat(0.02, "not published; flat 0.02 as in the published configurations")


@dataclass(frozen=True)
class Family:
    """One row of the table; paths are relative to the base model or to a block."""

    title: str
    blocks: str
    final_norm: str
    attention: str
    mlp: str
    norms: tuple[str, ...]
    residual_writers: tuple[str, str]
    norm: Literal["LayerNorm", "RMSNorm"]
    positions: Literal["learned", "rotary"]
    initialisation: Initialisation
    placement: Literal["pre", "sandwich"] = "pre"
    parallel: Callable[[Config], bool] = field(default=lambda c: False)
    qk_norm: Callable[[Config], bool] = field(default=lambda c: False)
    obstacle: Callable[[Config], str | None] = field(default=lambda c: None)


def _llama_like(title: str, initialisation: Initialisation, **changes: Any) -> Family:
    row: dict[str, Any] = {
        "title": title,
        "blocks": "layers",
        "final_norm": "norm",
        "attention": "self_attn",
        "mlp": "mlp",
        "norms": ("input_layernorm", "post_attention_layernorm"),
        "residual_writers": ("self_attn.o_proj", "mlp.down_proj"),
        "norm": "RMSNorm",
        "positions": "rotary",
        "initialisation": initialisation,
    }
    return Family(**(row | changes))


_SANDWICH: dict[str, Any] = {
    "placement": "sandwich",
    "norms": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        title="GPT-2",
        blocks="h",
        final_norm="ln_f",
        attention="attn",
        mlp="mlp",
        norms=("ln_1", "ln_2"),
        residual_writers=("attn.c_proj", "mlp.c_proj"),
        norm="LayerNorm",
        positions="learned",
        initialisation=GPT2_SCALED,
    ),
    "gpt_neox": Family(
        title="GPT-NeoX",
        blocks="layers",
        final_norm="final_layer_norm",
        attention="attention",
        mlp="mlp",
        norms=("input_layernorm", "post_attention_layernorm"),
        residual_writers=("attention.dense", "mlp.dense_4h_to_h"),
        norm="LayerNorm",
        positions="rotary",
        initialisation=SMALL_AND_WANG,
        parallel=lambda c: bool(c.use_parallel_residual),
    ),
    "llama": _llama_like("Llama", LLAMA_FLAT),
    "mistral": _llama_like("Mistral", UNPUBLISHED),
    "qwen2": _llama_like("Qwen2", UNPUBLISHED),
    "qwen3": _llama_like("Qwen3", UNPUBLISHED, qk_norm=lambda c: True),
    "gemma2": _llama_like("Gemma 2", UNPUBLISHED, **_SANDWICH),
    "gemma3_text": _llama_like("Gemma 3", UNPUBLISHED, qk_norm=lambda c: True, **_SANDWICH),
    "phi": Family(
        title="Phi",
        blocks="layers",
        final_norm="final_layernorm",
        attention="self_attn",
        mlp="mlp",
        norms=("input_layernorm",),
        residual_writers=("self_attn.dense", "mlp.fc2"),
        norm="LayerNorm",
        positions="rotary",
        initialisation=UNPUBLISHED,
        parallel=lambda c: True,
        qk_norm=lambda c: bool(c.qk_layernorm),
    ),
    "opt": Family(
        title="OPT",
        blocks="decoder.layers",
        final_norm="decoder.final_layer_norm",
        attention="self_attn",
        mlp="fc1",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        residual_writers=("self_attn.out_proj", "fc2"),
        norm="LayerNorm",
        positions="learned",
        initialisation=OPT_SCALED,
        obstacle=lambda c: (
            None
            if c.do_layer_norm_before and not c._remove_final_layer_norm
            else "OPT without pre-norm (opt-350m) has no final norm; take another size of OPT"
        ),
    ),
}


@dataclass(frozen=True)
class Anatomy:
    """What measuring needs to know of one model.

    Parameters
    ----------
    family
        Its row in the table, under the configuration's ``model_type``.
    layers, width, heads, kv_heads
        Sizes: blocks, residual stream, query heads and key heads.
    context
        Positions the model was built for.
    parallel
        Attention and MLP read the same state (parallel residual).
    qk_norm
        Queries and keys are normalised before their product.
    windows
        Per block, how many keys a query sees, itself included; None where it sees all.
    softcap
        Cap on the attention logits, or None.
    """

    family: Family
    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    parallel: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    softcap: float | None


def describe(config: Config) -> Anatomy:
    """Look a configuration up in the table.

    Parameters
    ----------
    config
        A transformers configuration of a causal language model.

    Raises
    ------
    Refused
        The architecture is not in the table, or is a variant that has no final norm.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise Refused(
            f"architecture {config.model_type!r} is not in the table of nohair.lab.anatomy; "
            f"known: {', '.join(FAMILIES)}"
        )
    if (obstacle := family.obstacle(config)) is not None:
        raise Refused(obstacle)
    layers = config.num_hidden_layers
    return Anatomy(
        family=family,
        layers=layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        context=config.max_position_embeddings,
        parallel=family.parallel(config),
        qk_norm=family.qk_norm(config),
        windows=_windows(config, layers),
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def blocks(model: Any) -> list[nn.Module]:
    """List the blocks of a causal model; each one's output is a state of the residual stream."""
    family = describe(model.config).family
    return list(model.base_model.get_submodule(family.blocks))


def final_norm(model: Any) -> nn.Module:
    """Find the norm after the last block; its output is what the head reads."""
    family = describe(model.config).family
    module: nn.Module = model.base_model.get_submodule(family.final_norm)
    return module
