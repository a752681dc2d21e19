"""How each family of models is put together: the one table of architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nohair.errors import Refused

Config = Any  # transformers' configurations are untyped bags of attributes
Role = Literal["attention", "mlp", "after attention", "after mlp", "query", "key"]
Residual = Literal["flat", "scaled", "wang"]


@dataclass(frozen=True)
class Initialisation:
    """The standard deviations from which a family's training starts, as published.

    Parameters
    ----------
    std
        Of every matrix and embedding, given the configuration.
    residual
        Of the two matrices that write into the residual stream of L blocks: ``flat``, the same
        std; ``scaled``, divided by sqrt(2L); ``wang``, 2/(L sqrt(width)).
    source
        Where the recipe is stated.
    """

    std: Callable[[Config], float]
    residual: Residual
    source: str

    def residual_std(self, config: Config) -> float:
        """Work out the standard deviation of the residual writers."""
        layers = int(config.num_hidden_layers)
        if self.residual == "wang":
            return 2 / (layers * sqrt(config.hidden_size))
        return self.std(config) / (sqrt(2 * layers) if self.residual == "scaled" else 1)


GPT2_SCALED = Initialisation(
    lambda c: 0.02, "scaled", "GPT-2 report: residual writers scaled by 1/sqrt(2L)"
)
OPT_SCALED = Initialisation(
    lambda c: 0.006, "scaled", "OPT report: 0.006, residual writers scaled by 1/sqrt(2L)"
)
SMALL_AND_WANG = Initialisation(
    lambda c: sqrt(2 / (5 * c.hidden_size)),
    "wang",
    "GPT-NeoX-20B report: small-init, and Wang-init for the residual writers",
)
LLAMA_FLAT = Initialisation(
    lambda c: 0.02, "flat", "flat 0.02, the value in Llama's published configurations"
)
UNPUBLISHED = Initialisation(
    lambda c: 0.02, "flat", "not published; flat 0.02 as in the published configurations"
)


class Projection(NamedTuple):
    """Weight (heads, head width, width) and bias (heads, head width), or None, of one reading."""

    weight: Tensor
    bias: Tensor | None


def _separate(query: str, key: str, value: str) -> Callable[[Any], list[tuple[Tensor, Any]]]:
    """Queries, keys and values read by three matrices (rows, width) of these names."""
    return lambda attention: [
        (module.weight, module.bias) for module in map(attention.get_submodule, (query, key, value))
    ]


def _gpt2_fused(attention: Any) -> list[tuple[Tensor, Any]]:
    """All three side by side in one transposed matrix."""
    fused = attention.c_attn
    return list(zip(fused.weight.T.chunk(3), fused.bias.chunk(3), strict=True))


def _neox_fused(attention: Any) -> list[tuple[Tensor, Any]]:
    """All three in one matrix, head by head."""
    fused = attention.query_key_value
    rows = torch.arange(fused.out_features).view(-1, 3, attention.head_size)
    return [
        (fused.weight[index], None if fused.bias is None else fused.bias[index])
        for index in (rows[:, i].flatten() for i in range(3))
    ]


def _opt_separate(attention: Any) -> list[tuple[Tensor, Any]]:
    """OPT scales its queries, not its logits."""
    query, key, value = _separate("q_proj", "k_proj", "v_proj")(attention)
    weight, bias = query
    scale = attention.scaling
    return [(weight * scale, None if bias is None else bias * scale), key, value]


@dataclass(frozen=True)
class Family:
    """One row of the table; paths are relative to the base model or to a block.

    ``norms`` stand in the order in which they act, one alone serves attention and MLP both;
    ``readers`` are the matrices that the MLP reads its input with, the gate first; ``qk_norms``
    are relative to the attention; ``gain_offset`` is what a norm adds to its stored gain; ``drawn``
    is how transformers draws the residual writers of a fresh model.
    """

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
    project: Callable[[Any], list[tuple[Tensor, Any]]]
    readers: tuple[str, ...]
    activation: str
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    gain_offset: float = 0.0
    scaled_embedding: bool = False
    drawn: Residual = "flat"
    placement: Literal["pre", "sandwich"] = "pre"
    parallel: Callable[[Config], bool] = field(default=lambda c: False)
    qk_norm: Callable[[Config], bool] = field(default=lambda c: False)
    obstacle: Callable[[Config], str | None] = field(default=lambda c: None)
    departs: Callable[[Config], tuple[str, ...]] = field(default=lambda c: ())


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
        "project": _separate("q_proj", "k_proj", "v_proj"),
        "readers": ("mlp.gate_proj", "mlp.up_proj"),
        "activation": "mlp.act_fn",
    }
    return Family(**(row | changes))


_GEMMA: dict[str, Any] = {
    "placement": "sandwich",
    "gain_offset": 1.0,
    "scaled_embedding": True,
    "departs": lambda c: ("sandwich norm",),
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
        project=_gpt2_fused,
        readers=("mlp.c_fc",),
        activation="mlp.act",
        drawn="scaled",
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
        project=_neox_fused,
        readers=("mlp.dense_h_to_4h",),
        activation="mlp.act",
        parallel=lambda c: bool(c.use_parallel_residual),
    ),
    "llama": _llama_like("Llama", LLAMA_FLAT),
    "mistral": _llama_like("Mistral", UNPUBLISHED),
    "qwen2": _llama_like("Qwen2", UNPUBLISHED),
    "qwen3": _llama_like("Qwen3", UNPUBLISHED, qk_norm=lambda c: True),
    "gemma2": _llama_like("Gemma 2", UNPUBLISHED, **_GEMMA),
    "gemma3_text": _llama_like("Gemma 3", UNPUBLISHED, qk_norm=lambda c: True, **_GEMMA),
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
        project=_separate("q_proj", "k_proj", "v_proj"),
        readers=("mlp.fc1",),
        activation="mlp.activation_fn",
        qk_norms=("q_layernorm", "k_layernorm"),
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
        project=_opt_separate,
        readers=("fc1",),
        activation="activation_fn",
        obstacle=lambda c: (
            "OPT without pre-norm (opt-350m) has no final norm; take another size of OPT"
            if not c.do_layer_norm_before or c._remove_final_layer_norm
            else f"OPT that reads and writes words of {c.word_embed_proj_dim} numbers, not "
            f"{c.hidden_size}, has one more map after the final norm; take another size of OPT"
            if c.word_embed_proj_dim != c.hidden_size
            else None
        ),
        departs=lambda c: () if c.do_layer_norm_before else ("post-LN",),
    ),
}


# Architectures that cannot be measured here, by the ways in which they leave the theorem's class.
# The names, as in `Family.departs`, are those of `nohair.lab.conditions.DEPARTURES`.
_EXPERTS, _RECURRENT = ("mixture of experts",), ("unnormalised attention",)
OUTSIDE: dict[str, tuple[str, ...]] = {
    "openai-gpt": ("post-LN",),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), ("post-norm",)),
    "glm4": ("sandwich norm",),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "jetmoe"), _EXPERTS),
    **dict.fromkeys(("dbrx", "deepseek_v2", "deepseek_v3", "granitemoe", "gpt_oss"), _EXPERTS),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma"), _RECURRENT),
    **dict.fromkeys(("jamba", "qwen3_next"), _RECURRENT + _EXPERTS),
    **dict.fromkeys(("zamba", "bamba"), _RECURRENT),
    "llama4_text": ("log-n temperature", *_EXPERTS),
    **dict.fromkeys(("bloom", "mpt"), ("ALiBi",)),
}


def departures(config: Config) -> tuple[str, ...]:
    """Name the ways in which an architecture leaves the theorem's class; none for most.

    Raises
    ------
    Refused
        It is neither in `FAMILIES` nor in `OUTSIDE`.
    """
    family = FAMILIES.get(config.model_type)
    if family is not None:
        return family.departs(config)
    if config.model_type not in OUTSIDE:
        raise Refused(
            f"architecture {config.model_type!r} is in neither table of nohair.lab.anatomy; "
            f"known: {', '.join([*FAMILIES, *OUTSIDE])}"
        )
    return OUTSIDE[config.model_type]


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
        The architecture is not in the table, or is a variant that cannot be measured.
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
    windows = _windows(config, layers)
    if 1 in windows:
        raise Refused("sliding_window = 1: no cache keeps so little; give a window of at least 2")
    return Anatomy(
        family=family,
        layers=layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        context=config.max_position_embeddings,
        parallel=family.parallel(config),
        qk_norm=family.qk_norm(config),
        windows=windows,
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


def norms(model: Any) -> list[dict[Role, nn.Module]]:
    """Name the norms of every block by what they do.

    ``attention`` and ``mlp`` stand before these sub-blocks (one module may do both), ``after
    attention`` and ``after mlp`` between them and the residual stream, ``query`` and ``key``
    before the product of the two.
    """
    shape = describe(model.config)
    family = shape.family
    named: list[dict[Role, nn.Module]] = []
    for block in blocks(model):
        found = [block.get_submodule(path) for path in family.norms]
        roles: dict[Role, nn.Module] = {"attention": found[0], "mlp": found[-1]}
        if family.placement == "sandwich":
            roles = {
                "attention": found[0],
                "after attention": found[1],
                "mlp": found[2],
                "after mlp": found[3],
            }
        if shape.qk_norm:
            attention = block.get_submodule(family.attention)
            query, key = (attention.get_submodule(path) for path in family.qk_norms)
            roles |= {"query": query, "key": key}
        named.append(roles)
    return named


def gain(model: Any, norm: nn.Module) -> tuple[Tensor, Tensor | None, float]:
    """Read the gain that a norm multiplies by, the bias that it adds, and its epsilon."""
    parts: Any = norm
    epsilon = parts.variance_epsilon if hasattr(parts, "variance_epsilon") else parts.eps
    offset = describe(model.config).family.gain_offset
    return parts.weight + offset, getattr(parts, "bias", None), float(epsilon)


def projections(model: Any) -> list[tuple[Projection, Projection, Projection, Tensor]]:
    """Cut every block's attention into heads: how each reads queries, keys, values, and writes.

    Queries have `Anatomy.heads` heads, keys and values `Anatomy.kv_heads`; the writers are of
    shape (heads, width, head width).
    """
    shape = describe(model.config)
    family = shape.family
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    cut = []
    for block in blocks(model):
        read = [
            Projection(
                weight.reshape(count, -1, shape.width),
                None if bias is None else bias.reshape(count, -1),
            )
            for (weight, bias), count in zip(
                family.project(block.get_submodule(family.attention)), counts, strict=True
            )
        ]
        written = matrix(block.get_submodule(family.residual_writers[0]))
        query, key, value = read
        writer = written.reshape(shape.width, shape.heads, -1).movedim(1, 0)
        cut.append((query, key, value, writer))
    return cut


def matrix(module: Any) -> Tensor:
    """Weight of a linear map as (out, in), however the module stores it."""
    weight: Tensor = module.weight.T if isinstance(module, Conv1D) else module.weight
    return weight


def rotary_scale(model: Any) -> float:
    """Find the largest factor by which rotary positions stretch queries and keys: 1 for most."""
    found = [
        float(value)
        for module in model.base_model.modules()
        for name, value in vars(module).items()
        if name.endswith("attention_scaling")
    ]
    return max([1.0, *found])
