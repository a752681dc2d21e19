"""Random networks of every family, small enough to be measured in milliseconds.

Biases, gains and matrices are all drawn at random: an untouched initialisation (zero biases, unit
gains) hides a norm taken twice or left out.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from nohair.lab import anatomy
from nohair.lab.models import Subject
from nohair.lab.texts import Texts

VOCABULARY = 300
CONTEXT = 64
WINDOW = 9
SPECIAL = (0, 1, 258)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_GATED: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {
    **_GATED,
    "head_dim": 16,  # not width / heads
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# model_type, then a word where a family has variants that run other code
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 64, "use_parallel_residual": True},
    "gpt_neox sequential": {"intermediate_size": 64, "use_parallel_residual": False},
    "llama": _GATED,
    "llama tied": {**_GATED, "tie_word_embeddings": True},
    "mistral": {**_GATED, "sliding_window": WINDOW},
    "mistral everywhere": {**_GATED, "sliding_window": None},
    "qwen2": _GATED,
    "qwen2 window": {
        **_GATED,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {**_GATED, "head_dim": 16},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0},  # low enough to bend these logits
    "gemma3_text": _GEMMA,
    "phi": {"intermediate_size": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


def config(name: str, **changes: Any) -> Any:
    """Configuration of one of the `NETWORKS`."""
    shape = deepcopy(_COMMON | NETWORKS[name] | changes)
    return AutoConfig.for_model(name.split()[0], **shape)


def network(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Causal model of one of the `NETWORKS`, every parameter drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name, **changes)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            gain = parameter.ndim == 1 and not path.endswith("bias")
            parameter.copy_(1 + noise if gain else noise)
    return model.to(dtype).requires_grad_(False)


def subject(name: str, seed: int = 0, *, bos: int | None = None, **changes: Any) -> Subject:
    """One of the `NETWORKS` as a subject; `bos` is what its tokenizer puts first."""
    return wrap(network(name, seed, **changes), bos=bos, name=name)


def wrap(model: Any, *, bos: int | None = None, name: str = "tiny") -> Subject:
    """Make a model a subject, with a tokenizer of bytes."""
    shape = anatomy.describe(model.config)
    provenance = {"model": name, "revision": None, "dtype": str(model.dtype)}
    return Subject(name, model, byte_tokenizer(bos is not None), shape, bos, provenance)


def byte_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """Tokenizer of bytes: any text can be read, no file is needed; `SPECIAL` ids are no text.

    The last of these has no role of its own, as the many in the tokenizers of chat models.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<s>", "</s>", "<tool>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def rows(count: int, tokens: int, seed: int, kind: str = "prompt") -> Texts:
    """Random ids, none of them special."""
    ids = np.random.default_rng(seed).integers(2, 258, (count, tokens))
    return texts(ids, kind)


def texts(ids: NDArray[np.int64], kind: str = "prompt") -> Texts:
    """Ids under names of their own."""
    return Texts(ids, tuple(f"{kind}-{i}" for i in range(len(ids))), kind)
