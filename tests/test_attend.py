"""Attention in the model's place: the same outputs, and readings that fit them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_networks import NETWORKS, network, rows, subject, wrap
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nohair.lab.attend import NAME, Group, observed
from nohair.lab.bias import dilution_bias, prompt_bias

P, T, K = 6, 17, 3
IDS = torch.from_numpy(rows(K, P + T, seed=1).ids)
CHUNKS = (1, 5, 512)

every_network = pytest.mark.parametrize("name", NETWORKS)


@torch.no_grad()
def outputs(model: Any, chunk: int = 512) -> torch.Tensor:
    memory = DynamicCache(config=model.config)
    parts = [
        model(part, cache=memory, use_cache=True).logits for part in torch.split(IDS, chunk, dim=1)
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@every_network
def test_outputs_are_the_models_own(name: str, kind: str, biased: bool) -> None:
    if (name, kind) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no sdpa for Gemma 2")
    whom = subject(name)
    whom.model.set_attn_implementation(kind)
    with dilution_bias(whom, P, strength=float(biased)) as whom:
        own = outputs(whom.model)
        for chunk in CHUNKS:
            with observed(whom):
                found = outputs(whom.model, chunk)
            assert float((found - own).norm() / own.norm()) < 1e-5


@every_network
def test_logits_are_read_without_the_bias_and_weights_with_it(name: str) -> None:
    whom = subject(name)
    groups: list[Group] = []
    with prompt_bias(whom, P, lambda t: 0.3 * t) as biased, observed(biased, groups.append):
        outputs(whom.model)
    bias = torch.zeros(P + T, P + T)
    bias[P:, :P] = 0.3 * torch.arange(1, T + 1)[:, None]
    for group in groups:
        expected = (group.logits + bias).masked_fill(group.hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(group.weights, expected, atol=1e-6, rtol=1e-4)
        made = group.query.double() @ _keys(group).mT * group.scaling
        if whom.anatomy.softcap is not None:
            made = whom.anatomy.softcap * torch.tanh(made / whom.anatomy.softcap)
        torch.testing.assert_close(group.logits.double(), made, atol=1e-4, rtol=1e-4)
    sizes = whom.anatomy.heads // whom.anatomy.kv_heads
    assert [(g.layer, g.heads) for g in groups] == [
        (layer, slice(at, at + sizes)) for layer in range(3) for at in range(0, 4, sizes)
    ]


def _keys(group: Group) -> torch.Tensor:
    return group.key[:, None].double()


@every_network
def test_hidden_is_what_time_and_window_hide(name: str) -> None:
    whom = subject(name)
    groups: list[Group] = []
    with prompt_bias(whom, P, lambda t: -50.0) as biased, observed(biased, groups.append):
        outputs(whom.model)
    i, j = np.indices((P + T, P + T))
    for group in groups:
        window = whom.anatomy.windows[group.layer]
        expected = (j > i) | (i - j >= (window or np.inf))
        assert np.array_equal(group.hidden[0, 0].numpy(), expected)
        assert (group.weights.numpy()[:, :, expected] == 0).all()


def test_an_answer_is_a_bias_of_its_own() -> None:
    whom = subject("llama")
    seen: list[tuple[int, slice]] = []

    def answer(layer: int, heads: slice, logits: torch.Tensor) -> torch.Tensor:
        seen.append((layer, heads))
        assert torch.isneginf(logits[0, 0, 0, 1:]).all()
        bias = torch.zeros_like(logits[:1])
        bias[:, :, P:, :P] = 1.5
        return bias

    with observed(whom, answer=answer):
        found = outputs(whom.model)
    assert seen == [(layer, slice(h, h + 2)) for layer in range(3) for h in (0, 2)]
    with prompt_bias(whom, P, lambda t: 1.5):
        expected = outputs(whom.model)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_model_with_the_same_configuration_runs_on_unread(name: str) -> None:
    """Inside the block it runs by our attention as well, to rounding; bit for bit afterwards."""
    model = network(name)
    other: Any = type(model)(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    assert other.config is model.config
    plain, groups = outputs(other), list[Group]()

    def answer(layer: int, heads: slice, logits: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(logits)

    with observed(wrap(model), groups.append, answer):
        inside = outputs(other)
        assert not groups
        outputs(model)
        assert groups
    assert float((inside - plain).norm() / plain.norm()) < 1e-5
    assert torch.equal(outputs(other), plain)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_is_put_back_after_an_exception(kind: str) -> None:
    whom = subject("llama")
    whom.model.set_attn_implementation(kind)
    plain = outputs(whom.model)

    def read(group: Group) -> None:
        raise KeyboardInterrupt

    def interrupted() -> None:
        with observed(whom, read):
            outputs(whom.model)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert whom.model.config._attn_implementation == kind
    assert NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert torch.equal(outputs(whom.model), plain)
