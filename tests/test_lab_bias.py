"""The bias on the prompt's logits: against attention written out, and against what must hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray
from refusals import refusal
from test_anatomy import attention_calls, outputs
from tiny_networks import CONTEXT, NETWORKS, network, rows, subject, texts, wrap
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache

from nohair.errors import Failed
from nohair.lab import anatomy, attend, bias, distances, shares
from nohair.lab.bias import dilution_bias, preserving, prompt_bias
from nohair.lab.models import Subject
from nohair.theory import bias as theory

P, T, K, C, START = 6, 23, 3, 2, 5
PROMPTS = rows(K, P, seed=1)
CONTINUATIONS = rows(C, T, seed=2, kind="text")
ONE_PROMPT, ONE_CONTINUATION = texts(PROMPTS.ids[:1]), texts(CONTINUATIONS.ids[:1], "text")
POSITIONS = np.arange(1.0, T + 1)
CHUNKS = (1, 5, 512)

every_network = pytest.mark.parametrize("name", NETWORKS)


@torch.no_grad()
def states(model: Any, last: int | None = None, chunk: int = 512) -> torch.Tensor:
    """After every block, (block, run, position, width)."""
    shared = np.tile(CONTINUATIONS.ids[0], (K, 1))
    ids = torch.from_numpy(np.concatenate([PROMPTS.ids, shared], 1))
    if last is not None:
        ids[:, -1] = last
    blocks, memory = list(anatomy.blocks(model)), DynamicCache(config=model.config)
    found = [
        torch.stack(outputs(blocks, partial(model.base_model, part, cache=memory, use_cache=True)))
        for part in torch.split(ids, chunk, dim=1)
    ]
    return torch.cat(found, dim=2)


def share(whom: Subject, chunk: int = 512, **options: Any) -> xr.Dataset:
    return shares.measure(whom, PROMPTS, CONTINUATIONS, chunk=chunk, **options)


def distance(whom: Subject, chunk: int = 512, bos: bool = True) -> NDArray[np.float32]:
    record = distances.measure(whom, PROMPTS, CONTINUATIONS, chunk=chunk, bos=bos, floor=False)
    found: NDArray[np.float32] = record.distance.to_numpy()
    return found


def slopes(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """A bias of every layer's and every head's own."""
    layer, head = np.arange(3)[:, None, None], np.arange(4)[:, None]
    return (0.1 + 0.2 * layer - 0.15 * head) * np.log(t / 3)


def hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


# Nothing stays, nothing leaks


@every_network
def test_no_strength_and_no_layer_are_no_intervention_bit_for_bit(name: str) -> None:
    whom = subject(name)
    plain = distance(whom, 7)
    for options in ({"strength": 0.0}, {"strength": 1.0, "layers": ()}):
        with dilution_bias(whom, P, **options) as biased:
            assert np.array_equal(distance(biased, 7), plain)
    with dilution_bias(whom, P) as biased:
        assert not np.array_equal(distance(biased, 7), plain)
    assert np.array_equal(distance(whom, 7), plain)
    assert hooks(whom.model) == 0


def test_an_exception_inside_the_block_leaves_the_model_as_it_was() -> None:
    whom = subject("llama")
    plain = states(whom.model)

    def interrupted() -> None:
        with dilution_bias(whom, P):
            assert hooks(whom.model) == 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert hooks(whom.model) == 0
    assert torch.equal(states(whom.model), plain)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_model_with_the_same_configuration_is_left_alone(name: str) -> None:
    model = network(name)
    other: Any = type(model)(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    assert other.config is model.config
    plain = states(other)
    with dilution_bias(wrap(model), P):
        assert torch.equal(states(other), plain)
        assert not torch.equal(states(model), plain)
    assert torch.equal(states(other), plain)


@every_network
def test_last_token_moves_no_earlier_state(name: str) -> None:
    whom = subject(name)
    with prompt_bias(whom, P, slopes):
        one, other = (states(whom.model, last=token)[:, :, :-1] for token in (7, 8))
    assert torch.equal(one, other)


def test_a_bias_that_lets_later_tokens_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whom = subject("llama")
    plain = states(whom.model)

    def leak(mask: Any, added: torch.Tensor, query: Any, key: Any) -> torch.Tensor:
        return added  # and no mask

    monkeypatch.setattr(bias, "_added", leak)
    with pytest.raises(Failed, match="later token moves earlier states") as failed:
        dilution_bias(whom, P).__enter__()
    assert "\n" not in str(failed.value)
    monkeypatch.undo()
    assert hooks(whom.model) == 0
    assert torch.equal(states(whom.model), plain)


# Uniform attention


def uniform(name: str, **options: Any) -> Subject:
    """W_Q = 0: every key counts the same, and no window ends within reach."""
    if NETWORKS[name].get("sliding_window"):
        options["sliding_window"] = CONTEXT
    whom = subject(name, **options)
    attentions = [
        block.get_submodule(whom.anatomy.family.attention) for block in anatomy.blocks(whom.model)
    ]
    for module in attentions:
        for path, values in module.named_parameters():
            if path.startswith("q_proj"):
                values.zero_()
            elif path.startswith("c_attn"):
                values[..., :32] = 0
            elif path.startswith("query_key_value"):
                values.view(4, 3, 8, -1)[:, 0] = 0
    return whom


@every_network
def test_strength_one_keeps_the_share_of_uniform_attention(name: str) -> None:
    whom = uniform(name)
    np.testing.assert_allclose(share(whom).share - P / (P + POSITIONS), 0, atol=1e-6)
    with dilution_bias(whom, P, 1.0, START) as biased:
        np.testing.assert_allclose(share(biased, 5).share, P / (P + START), atol=1e-6)


@pytest.mark.parametrize("strength", [0, 0.5, 1.3])
@pytest.mark.parametrize("onset", [1, 9])
@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gemma2"])
def test_uniform_attention_follows_the_theory(name: str, onset: int, strength: float) -> None:
    whom = uniform(name, bos=0)
    expected = theory.share(POSITIONS, P, strength, start=START, onset=onset, sink=1)
    with dilution_bias(whom, P, strength, START, onset=onset) as biased:
        found = share(biased)
    np.testing.assert_allclose(found.share - expected, 0, atol=1e-6)
    np.testing.assert_allclose(found.sink - (1 - expected) / (1 + POSITIONS), 0, atol=1e-6)


def test_bos_is_biased_with_the_prompt_where_this_is_asked_for() -> None:
    whom = uniform("llama", bos=0)
    with dilution_bias(whom, P, 1.0, START, on_head=True) as biased:
        found = share(biased)
    np.testing.assert_allclose(found.share, P / (P + 1 + START), atol=1e-6)
    np.testing.assert_allclose(found.sink, 1 / (P + 1 + START), atol=1e-6)
    with dilution_bias(whom, P, 1.0, START, head=0) as biased:  # measured without BOS
        found = share(biased, bos=False)
    np.testing.assert_allclose(found.share, P / (P + START), atol=1e-6)


# Attention written out


@torch.no_grad()
def by_hand(whom: Subject, table: NDArray[np.float64], head: int) -> NDArray[np.float64]:
    """Prompt's share (layer, head, t) in float64 from queries and keys, one run at a time."""
    begin, runs = head + P, []
    for continuation in CONTINUATIONS.ids:
        for prompt in PROMPTS.ids:
            with attention_calls(whom.model) as calls:
                ids = torch.tensor([[0] * head + [*prompt, *continuation]])
                whom.model(ids, use_cache=False)
            found = []
            for layer, (call, window) in enumerate(zip(calls, whom.anatomy.windows, strict=True)):
                q, k = call.query[0].double().numpy(), call.key[0].double().numpy()
                k = np.repeat(k, len(q) // len(k), axis=0)
                s = call.scaling * q @ np.swapaxes(k, 1, 2)
                if call.softcap is not None:
                    s = call.softcap * np.tanh(s / call.softcap)
                for t in range(1, T + 1):
                    s[:, begin + t - 1, head:begin] += table[layer, :, t - 1, None]
                i, j = np.indices(s.shape[1:])
                a = np.where((j <= i) & (i - j < (window or np.inf)), np.exp(s), 0)
                a /= a.sum(-1, keepdims=True)
                # nothing lets in what the window, or time, hides
                assert np.array_equal(call.weights[0].numpy() == 0, a == 0)
                np.testing.assert_allclose(call.weights[0].numpy(), a, atol=1e-6)
                found.append(a[:, begin:, head:begin].sum(-1))
            runs.append(found)
    return np.asarray(np.mean(runs, axis=0))


@pytest.mark.parametrize("bos", [None, 0], ids=["plain", "bos"])
@every_network
def test_shares_under_the_bias_equal_those_of_attention_written_out(
    name: str, bos: int | None
) -> None:
    """Windows, caps and grouped heads included; with chunks of one token, and whole."""
    whom = subject(name, bos=bos)
    with prompt_bias(whom, P, slopes) as biased:
        expected = by_hand(biased, slopes(POSITIONS), int(bos is not None))
        for chunk in CHUNKS:
            found = share(biased, chunk).share.to_numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", [lambda t: np.log(t / START), slopes], ids=["all", "by head"])
@every_network
def test_eager_fused_and_chunked_agree(name: str, schedule: Any) -> None:
    """In float64; but Gemma's norms, and most eager softmaxes, compute in float32 all the same."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    gemma = name.startswith("gemma")
    for kind in ("eager", "sdpa"):
        model = network(name, dtype=torch.float64)
        if (name, kind) == ("gemma2", "sdpa"):
            continue
        model.set_attn_implementation(kind)
        plain = states(model)
        with prompt_bias(wrap(model), P, schedule) as biased:
            found |= {(kind, chunk): states(model, chunk=chunk) for chunk in CHUNKS}
            assert not torch.equal(found[kind, 512], plain)
            with attend.observed(biased):
                found |= {("ours", chunk): states(model, chunk=chunk) for chunk in CHUNKS}
    for (kind, chunk), other in found.items():
        apart = (other - found["ours", 512]).norm(dim=-1) / other.norm(dim=-1)
        slack = 1e-5 if gemma else 2e-6 if kind == "eager" else 1e-12
        assert float(apart.max()) < slack, f"{kind}, chunk {chunk}"


def test_window_of_four_hides_what_it_hid() -> None:
    whom = subject("mistral", sliding_window=4)
    table = np.broadcast_to(10 + slopes(POSITIONS), (3, 4, T))  # far above every logit
    with prompt_bias(whom, P, table) as biased:
        found = share(biased, 5).share.to_numpy()
        np.testing.assert_allclose(found, by_hand(biased, table, 0), rtol=1e-4, atol=1e-6)
        apart = distance(biased)
    assert (found[:, :, 3:] == 0).all()  # at t = 3 the window holds one prompt token
    assert (found[:, :, :3] > 0.9).all()
    assert apart[0, ..., 3:].max() < 1e-6  # a kernel may round the rows of a batch differently
    assert (apart[0, ..., :3] > 0).all()


def test_bias_is_not_capped() -> None:
    """Gemma 2 caps its logits at 2; a bias of 5 moves every logit of a share by 5 all the same."""
    whom = subject("gemma2", sliding_window=CONTEXT)
    with prompt_bias(whom, P, lambda t: 5.0) as biased:
        moved = shares.measure(biased, ONE_PROMPT, ONE_CONTINUATION).share.isel(layer=0)
    plain = shares.measure(whom, ONE_PROMPT, ONE_CONTINUATION).share.isel(layer=0).to_numpy()
    expected = plain * np.exp(5) / (plain * np.exp(5) + 1 - plain)
    np.testing.assert_allclose(moved, expected, rtol=1e-4)


# Which layers, which schedule


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gemma3_text"])
def test_only_the_chosen_layers_are_biased(name: str) -> None:
    whom = subject(name)
    plain, plain_share = states(whom.model), share(whom).share.to_numpy()
    for layer in (1, 2, 3):
        with dilution_bias(whom, P, layers=[layer]) as biased:
            now = states(whom.model)
            found = share(biased).share.to_numpy()
        assert torch.equal(now[: layer - 1], plain[: layer - 1])
        assert not torch.equal(now[layer - 1], plain[layer - 1])
        assert np.array_equal(found[: layer - 1], plain_share[: layer - 1])
    whom = uniform(name)
    with dilution_bias(whom, P, 1.0, START, layers=[1, 2]) as biased:
        found = share(biased).share.to_numpy()
    np.testing.assert_allclose(found[:2], P / (P + START), atol=1e-6)
    np.testing.assert_allclose(found[2] - P / (P + POSITIONS), 0, atol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda t: 0.7,
        lambda t: -0.05 * t,
        lambda t: -np.array([0.5, 0.25, 0.125, 0.0625])[:, None] * t,
        lambda t: np.array([1.0, 0.0, -1.0])[:, None, None],
        slopes,
    ],
    ids=["constant", "slope", "by head", "by layer", "both"],
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_schedule_and_its_table_do_what_they_say(
    schedule: Callable[[Any], Any], chunk: int
) -> None:
    whom = uniform("llama")
    table = np.broadcast_to(schedule(POSITIONS), (3, 4, T))
    expected = P * np.exp(table) / (P * np.exp(table) + POSITIONS)
    for given in (schedule, table):
        with prompt_bias(whom, P, given) as biased:
            np.testing.assert_allclose(share(biased, chunk).share, expected, atol=1e-6)


def test_a_row_is_a_table() -> None:
    whom = uniform("gpt2")
    with prompt_bias(whom, P, np.log(POSITIONS / START)) as biased:
        np.testing.assert_allclose(share(biased).share, P / (P + START), atol=1e-6)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_biases_add_up(kind: str) -> None:
    whom = uniform("mistral")
    whom.model.set_attn_implementation(kind)
    with dilution_bias(whom, P, 0.4, START) as once, dilution_bias(once, P, 0.6, START) as twice:
        np.testing.assert_allclose(share(twice, 5).share, P / (P + START), atol=1e-6)
        nested = distance(twice)
    with dilution_bias(whom, P, 1.0, START) as biased:
        np.testing.assert_allclose(nested, distance(biased), rtol=1e-4)


# Flex attention; it does not compile on every machine, so the hook is asked, not the kernel


def test_flex_attention_gets_the_bias_beside_its_mask() -> None:
    whom = subject("llama")
    given = bias._Hooks(lambda t: np.log(t / START), slice(1, 1 + P), whom)
    length = 1 + P + T
    mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=128,
        seq_lengths=(length, length),
    )
    kwargs = {"hidden_states": torch.zeros(2, length, 32), "attention_mask": mask}
    args, changed = given.at(0)(None, (), kwargs)
    assert args == ()
    assert changed["attention_mask"] is mask
    added = changed["position_bias"]
    assert added.shape == (2, 4, length, length)
    expected = torch.log(torch.arange(1, T + 1) / START)[:, None].expand(T, P)
    torch.testing.assert_close(added[1, 2, 1 + P :, 1 : 1 + P], expected)
    assert added[:, :, : 1 + P].abs().max() == 0
    assert added[..., 0].abs().max() == added[..., 1 + P :].abs().max() == 0


# The bias that preserves each head's share


def kept(whom: Subject, chunk: int = 128, **options: Any) -> NDArray[np.float64]:
    return preserving(whom, ONE_PROMPT, ONE_CONTINUATION, START, chunk=chunk, **options)


@every_network
@pytest.mark.parametrize("chunk", CHUNKS)
def test_mean_logit_of_the_share_stays_what_it_is_at_t_0(name: str, chunk: int) -> None:
    """Several prompts, each measured alone, since it is the mean of their logits that is kept."""
    changes = {"sliding_window": CONTEXT} if NETWORKS[name].get("sliding_window") else {}
    whom = subject(name, bos=0, **changes)
    table = preserving(whom, PROMPTS, ONE_CONTINUATION, START, chunk=chunk)
    assert table.shape == (3, 4, T)
    assert (table[..., START - 1] == 0).all()
    assert np.abs(table).max() > 0.1
    with prompt_bias(whom, P, table) as biased:
        one_by_one = [
            shares.measure(biased, texts(prompt[None]), ONE_CONTINUATION).share
            for prompt in PROMPTS.ids
        ]
    mean = np.mean([np.log(one / (1 - one)) for one in one_by_one], axis=0)
    slack = np.full(mean.shape, 1e-5)
    if (
        name == "gemma3_text"
    ):  # some shares near 1, of which float32 leaves few digits' worth of odds
        slack += np.mean([2e-6 / (one * (1 - one)) for one in one_by_one], axis=0)
    assert (np.abs(mean - mean[..., [START - 1]]) < slack).all()


@every_network
def test_preserving_is_the_logarithm_under_uniform_attention(name: str) -> None:
    found = kept(uniform(name))
    np.testing.assert_allclose(found - np.log(POSITIONS / START), 0, atol=1e-6)


def test_continuations_are_averaged() -> None:
    whom = subject("llama")
    each = [preserving(whom, PROMPTS, texts(ids[None]), START) for ids in CONTINUATIONS.ids]
    both = preserving(whom, PROMPTS, CONTINUATIONS, START)
    np.testing.assert_allclose(both, np.mean(each, axis=0), atol=1e-6)


@pytest.mark.parametrize("name", ["mistral", "qwen2 window", "gemma2", "gemma3_text"])
def test_windows_give_a_finite_table(name: str) -> None:
    whom = subject(name)
    whole = kept(whom)
    assert np.isfinite(whole).all()
    for layer, window in enumerate(whom.anatomy.windows):
        if window is not None:
            assert (whole[layer, :, window - 1 :] == 0).all()
            assert (whole[layer, :, : START - 1] != 0).all()
    for chunk in (1, 4):
        np.testing.assert_allclose(kept(whom, chunk), whole, rtol=1e-5, atol=1e-5)


def test_window_shorter_than_t_0_shows_nothing_to_keep() -> None:
    whom = subject("mistral", sliding_window=4)
    assert (kept(whom) == 0).all()
    assert (kept(whom, chunk=1) == 0).all()


@pytest.mark.parametrize("start", [1, START, T])
def test_t_0_may_be_anywhere(start: int) -> None:
    whom = uniform("gpt2")
    found = preserving(whom, PROMPTS, ONE_CONTINUATION, start, chunk=3)
    np.testing.assert_allclose(found - np.log(POSITIONS / start), 0, atol=1e-6)


def test_table_that_ends_too_early_fails() -> None:
    whom = subject("llama")
    plain = states(whom.model)
    with pytest.raises(Failed, match=r"up to t = 11.* at t = 23") as failed:  # noqa: SIM117
        with prompt_bias(whom, P, np.zeros(11)) as biased:
            share(biased)
    assert "\n" not in str(failed.value)
    assert torch.equal(states(whom.model), plain)


def test_short_table_serves_a_short_continuation() -> None:
    whom, short = uniform("llama"), texts(CONTINUATIONS.ids[:, :3], "text")
    with prompt_bias(whom, P, np.log(POSITIONS[:3] / 2)) as biased:
        found = shares.measure(biased, PROMPTS, short)
    np.testing.assert_allclose(found.share, P / (P + 2), atol=1e-6)


# What is written down, and what is refused


def test_provenance_says_what_was_done() -> None:
    whom = subject("llama", bos=0)
    before = dict(whom.provenance)
    with dilution_bias(whom, P, 0.5, START, onset=2, layers=[2, 1], on_head=True) as biased:
        assert biased.provenance == before | {
            "bias": {
                "strength": 0.5,
                "start": START,
                "onset": 2,
                "prompt_tokens": P,
                "layers": [1, 2],
                "on_head": True,
            }
        }
        record = distances.measure(biased, PROMPTS, CONTINUATIONS, floor=False)
        assert record.attrs["bias"] == share(biased).attrs["bias"] == biased.provenance["bias"]
    with prompt_bias(whom, P, slopes) as biased:
        assert biased.provenance["bias"]["schedule"] == "slopes"
    with prompt_bias(whom, P, np.zeros(T)) as biased:
        assert biased.provenance["bias"]["schedule"] == "table"
    assert whom.provenance == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens = 0"),
        ({"layers": [0]}, "layer 0"),
        ({"layers": [2, 4]}, "layer 4: llama has blocks 1 to 3"),
        ({"strength": float("nan")}, "strength = nan"),
        ({"strength": float("inf")}, "strength = inf"),
        ({"start": 0.5}, r"start = 0.5"),
        ({"start": float("nan")}, r"start = nan"),
        ({"onset": 0}, r"onset = 0"),
    ],
)
def test_what_makes_no_bias_is_refused(options: dict[str, Any], said: str) -> None:
    whom = subject("llama")
    given = {"prompt_tokens": P} | options
    assert said in refusal(lambda: dilution_bias(whom, **given).__enter__())
    assert hooks(whom.model) == 0


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (np.zeros((2, 4, T)), "bias of shape (2, 4, 8)"),
        (np.zeros((5, 4, T)), "broadcasts to (layers, heads, positions) = (3, 4, 8)"),
        (np.zeros((3, 1)).T, "up to t = 3"),
        (lambda t: np.zeros((1, 3, 4, len(t))), "bias of shape (1, 3, 4, 8)"),
        (lambda t: np.zeros(3), "bias of shape (3,)"),
        (lambda t: np.where(t > 4, np.nan, t), "bias = nan"),
    ],
)
def test_bias_that_fits_no_network_is_refused(schedule: Any, said: str) -> None:
    whom = subject("llama")
    if said.startswith("up to"):
        with prompt_bias(whom, P, schedule) as biased, pytest.raises(Failed, match=said):
            share(biased)
    else:
        assert said in refusal(lambda: prompt_bias(whom, P, schedule).__enter__())
    assert hooks(whom.model) == 0


def test_attention_that_takes_no_bias_is_refused() -> None:
    whom = subject("llama")
    whom.model.config._attn_implementation_internal = "flash_attention_2"
    said = refusal(lambda: dilution_bias(whom, P).__enter__())
    assert "'flash_attention_2' takes no bias" in said
    assert "sdpa" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start": T + 1}, f"start = {T + 1}: the continuation has positions 1 to {T}"),
        ({"start": 0}, "start = 0"),
        ({"chunk": 0}, "chunk 0"),
    ],
)
def test_what_cannot_be_preserved_is_refused(options: dict[str, Any], said: str) -> None:
    whom = subject("llama")
    assert said in refusal(lambda: preserving(whom, PROMPTS, CONTINUATIONS, **options))


def test_no_room_is_refused() -> None:
    for nothing in (texts(PROMPTS.ids[:0]), texts(PROMPTS.ids[:, :0])):
        said = refusal(lambda: preserving(subject("llama"), nothing, CONTINUATIONS))  # noqa: B023
        assert "at least 1 of each" in said
    none = texts(CONTINUATIONS.ids[:0], "text")
    assert "C = 0" in refusal(lambda: preserving(subject("llama"), PROMPTS, none))
    long = rows(1, CONTEXT, seed=3)
    assert "positions" in refusal(lambda: preserving(subject("llama"), PROMPTS, long))
