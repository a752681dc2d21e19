"""The streamed measurement against states taken one by one, and against what must hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray
from refusals import refusal
from tiny_networks import CONTEXT, NETWORKS, network, rows, subject, texts, wrap

from nohair.errors import Failed, Refused
from nohair.lab import anatomy
from nohair.lab.distances import METRICS, measure, metric, within_prompts
from nohair.lab.models import Subject
from nohair.lab.texts import Texts

P, T = 6, 29
PROMPTS = rows(3, P, seed=1)
CONTINUATIONS = rows(2, T, seed=2, kind="text")

# Chunks of one token; that end inside the prompt, with it, and inside the continuation; the whole.
CHUNKS = (1, 4, P, 7, 16, P + T)

# What float32 leaves open: each of the two states is rounded, and the order of the sums differs
# between one prompt at a time and a batch; eight units in the last place of the norm cover it.
ROUNDING = 8 * np.finfo(np.float32).eps

every_network = pytest.mark.parametrize("name", NETWORKS)


@torch.no_grad()
def states(model: Any, prompt: Any, continuation: Any) -> NDArray[np.float64]:
    """States of one prompt's continuation, (site, t, width), by Hugging Face's own means.

    The last block's state is not among the hidden states: it is what the final norm is given.
    """
    last: list[torch.Tensor] = []
    hook = anatomy.final_norm(model).register_forward_pre_hook(lambda m, args: last.append(args[0]))
    ids = torch.tensor([[*prompt, *continuation]])
    _, *blocks, final = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    found = torch.cat([*blocks, *last, final])[:, len(prompt) :]
    return np.asarray(found.double())


def by_hand(
    model: Any, prompts: Texts, continuations: Texts, of: Callable[..., Any] | None = None
) -> NDArray[np.float64]:
    """D of every (site, continuation, pair, t), one prompt at a time and one pair at a time."""
    distance = of or (lambda a, b: np.linalg.norm(a - b, axis=-1))
    per_continuation = []
    for continuation in continuations.ids:
        one_by_one = [states(model, prompt, continuation) for prompt in prompts.ids]
        per_continuation.append([distance(a, b) for a, b in combinations(one_by_one, 2)])
    return np.moveaxis(np.array(per_continuation), 2, 0)


def run(
    model: Any, prompts: Texts = PROMPTS, continuations: Texts = CONTINUATIONS, **options: Any
) -> xr.Dataset:
    whom = model if isinstance(model, Subject) else wrap(model)
    return measure(whom, prompts, continuations, **({"floor": False, "progress": False} | options))


def values(record: xr.Dataset) -> NDArray[np.float64]:
    return np.asarray(record.distance.transpose("layer", "continuation", "pair", "t"), float)


def assert_equal_distances(
    found: NDArray[np.float64], expected: NDArray[np.float64], record: xr.Dataset
) -> None:
    """To 1e-5 of D, and to the rounding of the states where D is small beside them."""
    typical = record.norm.max(("continuation", "prompt", "t")).to_numpy()[:, None, None, None]
    excess = np.abs(found - expected) - 1e-5 * expected - ROUNDING * typical
    assert found.shape == expected.shape
    assert excess.max() < 0, f"D is off by {np.abs(found - expected).max()}"


@every_network
def test_distances_equal_those_of_the_hidden_states(name: str) -> None:
    model = network(name)
    expected = by_hand(model, PROMPTS, CONTINUATIONS)
    for chunk in CHUNKS:
        record = run(model, chunk=chunk)
        assert_equal_distances(values(record), expected, record)


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mistral", "gemma3_text"])
def test_attention_written_out_and_fused_give_the_same_distances(name: str, chunk: int) -> None:
    fused, written = network(name), network(name)
    written.set_attn_implementation("eager")
    assert (fused.config._attn_implementation, written.config._attn_implementation) == (
        "sdpa",
        "eager",
    )
    record = run(fused, chunk=chunk)
    assert_equal_distances(values(run(written, chunk=chunk)), values(record), record)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_norms_equal_those_of_the_hidden_states(name: str) -> None:
    model = network(name)
    record = run(model, chunk=7)
    for c, continuation in enumerate(CONTINUATIONS.ids):
        for k, prompt in enumerate(PROMPTS.ids):
            expected = np.linalg.norm(states(model, prompt, continuation), axis=-1)
            found = record.norm.isel(continuation=c, prompt=k).transpose("layer", "t")
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_labels_say_what_each_row_is() -> None:
    record = run(network("llama"))
    assert record.layer.to_numpy().tolist() == [1, 2, 3, 4]
    assert record.site.to_numpy().tolist() == ["block", "block", "block", "final"]
    assert record.t.to_numpy().tolist() == list(range(1, T + 1))
    assert record.prompt.to_numpy().tolist() == list(PROMPTS.names)
    pairs = [f"{a} | {b}" for a, b in combinations(PROMPTS.names, 2)]
    assert record.pair.to_numpy().tolist() == pairs
    assert record.distance.dtype == np.float32
    assert record.attrs["prompt_tokens"] == P
    assert record.attrs["horizon"] == T
    assert record.attrs["prompts_sha256"] == PROMPTS.sha256
    assert record.attrs["continuations_sha256"] == CONTINUATIONS.sha256


def test_final_site_is_the_norm_of_the_last_block() -> None:
    """CASES 10: the two must not be mistaken for each other."""
    model = network("gpt2")
    record = run(model)
    *_, last, final = states(model, PROMPTS.ids[0], CONTINUATIONS.ids[0])
    found = record.norm.isel(continuation=0, prompt=0)
    np.testing.assert_allclose(found.sel(layer=3), np.linalg.norm(last, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.sel(layer=4), np.linalg.norm(final, axis=-1), rtol=1e-5)
    assert abs(found.sel(layer=3) / found.sel(layer=4) - 1).min() > 0.1


# What must hold of any distance


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gemma3_text"])
def test_same_prompt_twice_is_at_no_distance(name: str) -> None:
    twice = texts(PROMPTS.ids[[0, 1, 0]])
    record = run(network(name), twice, floor=True, chunk=16)
    same = record.distance.isel(pair=1)  # pairs: 01, 02, 12
    assert (same <= 3 * record.floor).all()
    other = record.distance.isel(pair=0, t=slice(0, 5))
    assert (other > 100 * record.floor).all()


@pytest.mark.parametrize("name", ["gpt_neox", "mistral"])
def test_order_of_prompts_orders_the_pairs_and_nothing_else(name: str) -> None:
    model = network(name)
    order = [2, 0, 1]
    straight = run(model)
    permuted = run(model, texts(PROMPTS.ids[order]))
    pairs = list(combinations(range(3), 2))
    where = [pairs.index(tuple(sorted((order[a], order[b])))) for a, b in pairs]  # type: ignore[arg-type]
    assert_equal_distances(values(permuted), values(straight)[:, :, where], straight)


def test_other_prompts_in_the_batch_change_nothing() -> None:
    model = network("llama")
    alone = run(model, texts(PROMPTS.ids[:2]))
    together = run(model)
    assert_equal_distances(values(together)[:, :, :1], values(alone), alone)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_triangle_inequality(name: str) -> None:
    record = run(network(name))
    ab, ac, bc = np.moveaxis(values(record), 2, 0)
    slack = ROUNDING * float(record.norm.max())
    for long, one, other in ((ab, ac, bc), (ac, ab, bc), (bc, ab, ac)):
        assert (long > 0).all()
        assert (long <= one + other + slack).all()


def test_stream_scales_with_all_that_writes_into_it() -> None:
    """Embeddings and writers times 4: states and D times 4 (a power of two, so exactly).

    Every block reads through a norm, which takes the scale out again but for its epsilon.
    """
    model = network("llama", rms_norm_eps=0.0)
    plain = run(model)
    model.base_model.embed_tokens.weight *= 4
    for block in anatomy.blocks(model):
        for path in anatomy.FAMILIES["llama"].residual_writers:
            writer: Any = block.get_submodule(path)
            writer.weight.mul_(4)
    scaled = run(model)
    factor = values(scaled) / values(plain)
    np.testing.assert_allclose(factor[:3], 4, rtol=1e-5)
    np.testing.assert_allclose(factor[3], 1, rtol=1e-5)


@pytest.mark.parametrize("chunk", [7, P + T])
@pytest.mark.parametrize("name", ["opt", "gemma3_text"])
def test_what_comes_later_changes_no_earlier_distance(name: str, chunk: int) -> None:
    model = network(name)
    turn = 11
    changed = CONTINUATIONS.ids.copy()
    changed[:, turn:] = rows(2, T - turn, seed=9).ids
    before = run(model, chunk=chunk)
    after = run(model, continuations=texts(changed, "text"), chunk=chunk)
    early = values(before)[..., :turn]
    assert_equal_distances(values(after)[..., :turn], early, before)
    # at the final norm: the first layers' windows have lost the prompt by then
    assert np.abs(values(after)[-1, ..., turn] / values(before)[-1, ..., turn] - 1).min() > 1e-3


# Metrics


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_metrics_equal_their_definitions(name: str) -> None:
    def relative(a: Any, b: Any) -> Any:
        size = (np.linalg.norm(a, axis=-1) + np.linalg.norm(b, axis=-1)) / 2
        return np.linalg.norm(a - b, axis=-1) / size

    def angle(a: Any, b: Any) -> Any:
        sizes = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        return np.arccos((a * b).sum(axis=-1) / sizes)

    model = network(name)
    record = run(model)
    # relative to 1e-5 as D itself; the angle to 1e-4 since arccos loses half of a small angle's
    # digits in the reference and D's rounding counts twice in the square
    for which, definition, tolerance in (("relative", relative, 1e-5), ("angle", angle, 1e-4)):
        expected = by_hand(model, PROMPTS, CONTINUATIONS, definition)
        found = metric(record, which).transpose("layer", "continuation", "pair", "t")
        assert expected.min() > 0.02
        np.testing.assert_allclose(found, expected, rtol=tolerance, err_msg=which)
    xr.testing.assert_equal(metric(record, "l2").drop_vars("floor"), record.distance)


def test_angle_knows_planted_states() -> None:
    """Right angles, opposite states, equal directions of other lengths; no NaN at the ends."""
    norm = np.array([[1.0, 1.0], [2.0, 2.0], [1.0, 3.0]])
    distance = np.array([np.sqrt(2.0), 4.0, 2.0])
    record = xr.Dataset(
        {
            "distance": (("layer", "continuation", "pair", "t"), distance[None, None, None]),
            "norm": (("layer", "continuation", "prompt", "t"), norm.T[None, None]),
            "floor": (("layer",), [1e-6]),
        }
    ).astype(np.float32)
    found = metric(record, "angle").to_numpy().ravel()
    np.testing.assert_allclose(found, [np.pi / 2, np.pi, 0], atol=1e-3)


def test_every_metric_carries_its_floor() -> None:
    """Flagging 'D under 3 x floor' must mean much the same in all of them."""
    record = run(network("llama"), floor=True)
    for name in METRICS:
        expressed = metric(record, name)
        ratio = (expressed / expressed.floor) / (record.distance / record.floor)
        # an angle measures less than D where norms differ, and norms differ along t
        assert 0.3 < float(ratio.min()) <= float(ratio.max()) < 3, name


def test_unknown_metric_is_refused() -> None:
    with pytest.raises(Refused, match="'cosine' is unknown; choose l2, relative, angle"):
        metric(run(network("llama")), "cosine")


# The floor


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gemma2"])
@pytest.mark.parametrize("chunk", [7, 16, 512])
def test_floor_covers_the_noise_between_two_chunkings(name: str, chunk: int) -> None:
    model = network(name)
    one = run(model, chunk=chunk, floor=True)
    other = run(model, chunk=5)
    noise = abs(one.distance - other.distance).max(("continuation", "pair", "t"))
    assert (noise <= 3 * one.floor).all(), "noise passes for signal"
    early = one.distance.isel(t=slice(0, 2)).min(("continuation", "pair", "t"))
    assert (one.floor < 1e-4 * early).all(), "the floor hides the signal"


def test_floor_of_half_precision_is_the_higher_for_it() -> None:
    full = run(network("llama"), floor=True, chunk=7).floor
    half = run(network("llama", dtype=torch.bfloat16), floor=True, chunk=7).floor
    # 16 bits lie between the two, 2**16; the sums run in float32 in both, so not all of it shows
    assert (half > 1000 * full).all()


@pytest.mark.filterwarnings("error")
def test_floor_that_was_not_asked_for_is_not_a_number() -> None:
    for _ in range(20):  # what memory holds by chance must not be computed with
        assert run(network("llama"), floor=False).floor.isnull().all()


# Lengths and beginnings


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("name", NETWORKS)
def test_context_is_filled_exactly_or_refused_before_any_pass(name: str, bos: int | None) -> None:
    whom = subject(name, bos=bos)
    head = 0 if bos is None else 1
    passes: list[int] = []
    whom.model.base_model.register_forward_pre_hook(lambda module, args: passes.append(1))
    prompts = texts(PROMPTS.ids[:2])
    fitting = rows(1, CONTEXT - P - head, seed=4, kind="text")
    longer = rows(1, CONTEXT - P - head + 1, seed=4, kind="text")
    with pytest.raises(Refused) as refusal:
        run(whom, prompts, longer)
    assert str(CONTEXT) in str(refusal.value)
    assert str(CONTEXT + 1) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not passes
    assert run(whom, prompts, fitting).sizes["t"] == CONTEXT - P - head
    assert passes


@torch.no_grad()
def test_some_families_would_run_on_silently() -> None:
    """Why the length is checked: a rotary model takes one position too many without a word."""
    ids = torch.from_numpy(rows(1, CONTEXT + 1, seed=6).ids)
    assert network("llama")(ids).logits.isfinite().all()


def test_first_token_stands_once_before_every_prompt() -> None:
    whom = subject("llama", bos=0)
    fed: list[torch.Tensor] = []
    whom.model.base_model.register_forward_pre_hook(lambda module, args: fed.append(args[0]))

    def ids(**options: Any) -> NDArray[np.int64]:
        fed.clear()
        record = run(whom, continuations=texts(CONTINUATIONS.ids[:1], "text"), **options)
        assert record.sizes["t"] == T
        found: NDArray[np.int64] = torch.cat(fed, dim=1).numpy()
        assert record.attrs["bos"] == found.shape[1] - P - T
        return found

    shared = np.tile(CONTINUATIONS.ids[0], (3, 1))
    without = np.concatenate([PROMPTS.ids, shared], axis=1)
    for chunk in (1, 7, 512):
        with_bos = ids(chunk=chunk)
        np.testing.assert_array_equal(with_bos[:, 0], 0)
        np.testing.assert_array_equal(with_bos[:, 1:], without)
        np.testing.assert_array_equal(ids(chunk=chunk, bos=False), without)


def test_first_token_shifts_what_is_measured_as_it_does_by_hand() -> None:
    whom = subject("gpt2", bos=0)
    begun = texts(np.concatenate([np.zeros((3, 1), int), PROMPTS.ids], axis=1))
    for chunk in (P, P + 1, 512):
        record = run(whom, chunk=chunk)
        expected = by_hand(whom.model, begun, CONTINUATIONS)
        assert_equal_distances(values(record), expected, record)


def test_tokenizer_without_first_token_gets_none() -> None:
    assert run(subject("llama")).attrs["bos"] == 0


def test_one_prompt_is_refused() -> None:
    with pytest.raises(Refused, match="at least 2 prompts"):
        run(network("llama"), texts(PROMPTS.ids[:1]))


def test_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(Refused, match="chunk 0"):
        run(network("llama"), chunk=0)


# The prompts themselves


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mistral", "gemma3_text"])
def test_prompts_differ_by_what_their_hidden_states_do(name: str, bos: int | None) -> None:
    whom = subject(name, bos=bos)
    head = [] if bos is None else [bos]
    found = within_prompts(whom, PROMPTS)
    each = np.array([states(whom.model, [], [*head, *row]) for row in PROMPTS.ids])
    gaps = [np.linalg.norm(each[a] - each[b], axis=-1) for a, b in combinations(range(3), 2)]
    expected = np.mean(gaps, axis=0) / np.linalg.norm(each, axis=-1).mean(axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=ROUNDING)
    assert found.dims == ("layer", "position")
    assert found.layer.to_numpy().tolist() == [1, 2, 3, 4]
    assert found.position.to_numpy().tolist() == list(range(1, P + len(head) + 1))
    assert (found.sel(position=1) < ROUNDING).all() == (bos is not None)  # all begin alike with BOS
    assert (found.sel(position=slice(1 + len(head), None)) > 0.1).all()


def test_bos_before_prompts_can_be_left_out() -> None:
    without = within_prompts(subject("llama", bos=0), PROMPTS, bos=False)
    xr.testing.assert_equal(without, within_prompts(subject("llama"), PROMPTS))


def test_prompts_that_are_the_same_do_not_differ() -> None:
    same = within_prompts(subject("llama"), texts(PROMPTS.ids[[0, 0]]))
    assert (same < ROUNDING).all()  # rows of one batch may round apart


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_prompts_do_not_differ_from_anything(count: int) -> None:
    few = texts(PROMPTS.ids[:count])
    assert f"{count} prompt" in refusal(lambda: within_prompts(subject("llama"), few))


# What breaks


def poisoned(value: float, block: int | None) -> Any:
    """A network whose block `block` (from 1; None: final norm) puts `value` into its states."""
    model = network("llama")
    norm: Any = anatomy.final_norm(model)
    if block is None:
        norm.weight.data[3] = value
    else:
        writer: Any = anatomy.blocks(model)[block - 1].get_submodule("mlp.down_proj")
        writer.weight.data[3] = value
    return model


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("block", "name"), [(1, "layer 1:"), (3, "layer 3:"), (None, "final norm:")]
)
def test_states_that_are_not_finite_stop_the_run_at_their_layer(
    value: float, block: int | None, name: str
) -> None:
    with pytest.raises(Failed, match=name) as failure:
        run(poisoned(value, block), chunk=7)
    assert "t = 1 " in str(failure.value)
    assert "\n" not in str(failure.value)


def test_overflow_of_half_precision_names_layer_and_position() -> None:
    """One token, late in the text, that float16 no longer holds once block 2 has written."""
    model = network("llama", dtype=torch.float16)
    late = CONTINUATIONS.ids.copy()
    late[:, 20] = 258  # an id that occurs nowhere else
    model.base_model.embed_tokens.weight.data[258] = 65504
    model.base_model.layers[1].mlp.down_proj.weight.data *= 3000
    with pytest.raises(Failed, match=r"layer 2: .* t = 21 .*float16"):
        run(model, continuations=texts(late, "text"))


@pytest.mark.parametrize("chunk", [7, 512])
def test_states_that_are_zero_stop_the_run_at_their_layer(chunk: int) -> None:
    model = network("llama")
    model.base_model.norm.weight.data.zero_()
    with pytest.raises(Failed, match="final norm: states are zero at t = 1 "):
        run(model, chunk=chunk)
    model.base_model.embed_tokens.weight.data.zero_()
    with pytest.raises(Failed, match="layer 1: states are zero at t = 1 "):
        run(model, chunk=chunk)


def test_failed_run_leaves_no_hook_behind() -> None:
    model = poisoned(np.nan, 2)
    with pytest.raises(Failed):
        run(model)
    watched = [*anatomy.blocks(model), anatomy.final_norm(model)]
    assert not any(module._forward_hooks for module in watched)


def test_no_logits_are_made() -> None:
    model = network("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: pytest.fail("the head ran"))
    run(model)
