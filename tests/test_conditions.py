"""The theorem on networks: never violated, near where it should be, and its conditions judged."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray
from tiny_networks import CONTEXT, NETWORKS, WINDOW, config, network, rows, texts, wrap
from transformers import AutoConfig, OPTConfig

from nohair.errors import Failed, Refused
from nohair.lab import anatomy, conditions
from nohair.lab.conditions import constants, inspect
from nohair.lab.distances import measure
from nohair.lab.models import Subject
from nohair.lab.texts import Texts
from nohair.theory import bound

P, T = 6, 29
PROMPTS = rows(3, P, seed=1)
CONTINUATIONS = rows(2, T, seed=2, kind="text")
SEEDS = (0, 1, 2)
SCALES = (0.1, 1.0, 3.0)
POSITIONS = np.arange(1, T + 1)

Distances = tuple[xr.DataArray, float]

every_network = pytest.mark.parametrize("name", NETWORKS)
with_and_without_bos = pytest.mark.parametrize("bos", [None, 0], ids=["plain", "bos"])


@cache
def scaled(name: str, seed: int, scale: float, bos: int | None) -> Subject:
    """A random network with all its matrices multiplied; biases and gains stay."""
    model = network(name, seed)
    for parameter in {id(p): p for p in model.parameters()}.values():
        if parameter.ndim > 1:
            parameter.mul_(scale)
    return wrap(model, bos=bos)


@cache
def inspected(name: str, seed: int, scale: float, bos: int | None) -> xr.Dataset:
    return look(scaled(name, seed, scale, bos))


def look(subject: Subject, prompts: Texts = PROMPTS, texts: Texts = CONTINUATIONS) -> xr.Dataset:
    return inspect(subject, prompts, texts, chunk=512)


def blocks(report: xr.Dataset, pair: str | None = None, **divided: float) -> list[bound.Block]:
    """Of the recursion; with some of its constants made smaller."""
    return [
        bound.block(**row | {name: row[name] / by for name, by in divided.items()})
        for row in constants(report, pair)
    ]


def distances(
    subject: Subject, prompts: Texts = PROMPTS, texts: Texts = CONTINUATIONS
) -> Distances:
    """D after every block, and how far rounding may put it off."""
    record = measure(subject, prompts, texts, chunk=512, floor=False)
    rounding = 16 * float(np.finfo(np.float32).eps) * float(record.norm.max())
    return record.distance.isel(layer=record.site == "block").astype(float), rounding


@cache
def measured(name: str, seed: int, scale: float, bos: int | None) -> Distances:
    return distances(scaled(name, seed, scale, bos))


def steps(
    found: Distances, report: xr.Dataset, **divided: float
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Each block's D and what (R) allows it, given the D that was measured before the block."""
    (distance, rounding), prompt_tokens = found, report.attrs["prompt_tokens"]
    both = []
    for pair in distance.pair.values:
        before = np.zeros((distance.sizes["continuation"], distance.sizes["t"]))
        for layer, one in enumerate(blocks(report, pair, **divided), start=1):
            after = distance.sel(pair=pair, layer=layer).values
            both.append((after - rounding, bound.step(one, before, prompt_tokens)))
            before = after
    return both


def closest(pairs: list[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float:
    """Largest ratio of a distance to its bound; above one (R) is violated."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(max(np.nanmax(np.where(d > 0, d / most, 0)) for d, most in pairs))


# The theorem


@with_and_without_bos
@every_network
def test_recursion_is_never_violated(name: str, bos: int | None) -> None:
    ratios = {
        scale: max(
            closest(steps(measured(name, seed, scale, bos), inspected(name, seed, scale, bos)))
            for seed in SEEDS
        )
        for scale in SCALES
    }
    print(name, bos, {scale: f"{ratio:.2g}" for scale, ratio in ratios.items()})
    assert max(ratios.values()) <= 1
    assert min(ratios.values()) > 0, "nothing was compared"


@with_and_without_bos
@every_network
def test_majorant_is_never_violated(name: str, bos: int | None) -> None:
    for seed in SEEDS:
        for scale in SCALES:
            distance, rounding = measured(name, seed, scale, bos)
            report = inspected(name, seed, scale, bos)
            for pair in distance.pair.values:
                chain = blocks(report, pair)
                last = (
                    distance.sel(pair=pair).isel(layer=-1).max("continuation") - rounding
                ).values
                recursion = bound.recursion(chain, P, T)
                for layer in range(len(chain)):
                    one = distance.sel(pair=pair).isel(layer=layer).max("continuation") - rounding
                    assert (log(one.values) <= recursion[layer] + 1e-9).all()
                assert (log(last) <= bound.majorant(chain, P, POSITIONS, log=True) + 1e-9).all()
                if any(one.window is None for one in chain):
                    assert (log(last) <= bound.rate(chain, P, POSITIONS, log=True) + 1e-9).all()


@pytest.mark.parametrize("name", ["gpt2", "phi", "mistral", "gemma3_text"])
def test_largest_difference_serves_every_pair(name: str) -> None:
    distance, rounding = measured(name, 0, 0.1, None)
    report = inspected(name, 0, 0.1, None)
    chain = blocks(report)
    most = bound.majorant(chain, P, POSITIONS, log=True)
    assert (
        log(distance.isel(layer=-1).max(("pair", "continuation")).values - rounding) <= most
    ).all()
    each = [bound.majorant(blocks(report, p), P, POSITIONS, log=True) for p in report.pair.values]
    assert (most >= np.max(each, axis=0) - 1e-12).all()


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(x, out=np.full_like(x, -np.inf), where=x > 0)


# Planted networks that come as near the bound as it lets them


def orthogonal(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found: torch.Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return found


def flat(layers: int = 1, size: float = 10.0, write: float = 1.0) -> Subject:
    """Llama with one head that attends evenly, writes a rotation of the values, and no MLP.

    Every token has the rms `size`, so that the norm stretches all differences alike.
    """
    model = network(
        "llama",
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=layers,
        rms_norm_eps=0.0,
    )
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, model.base_model.embed_tokens.weight.shape, generator=generator)
    model.base_model.embed_tokens.weight.copy_(size * (2.0 * signs - 1))
    for block in model.base_model.layers:
        block.input_layernorm.weight.fill_(1)
        block.self_attn.q_proj.weight.zero_()
        block.self_attn.v_proj.weight.copy_(torch.eye(32))
        block.self_attn.o_proj.weight.copy_(write * orthogonal(32))
        block.mlp.down_proj.weight.zero_()
    model.base_model.norm.weight.fill_(1)
    return wrap(model)


REPEATED = texts(np.array([[17] * P, [201] * P]))  # all differences in one direction: they add up


def test_bound_is_reached_where_attention_is_flat_and_prompts_differ_in_one_direction() -> None:
    subject = flat()
    report = look(subject, REPEATED)
    ratio = closest(steps(distances(subject, REPEATED), report))
    print(f"flat network: {ratio:.6f} of the bound")
    assert 0.999 < ratio <= 1


@pytest.mark.parametrize("name", ["beta", "difference", "gamma", "nu"])
def test_recursion_is_violated_with_a_smaller(name: str) -> None:
    subject = flat()
    report = look(subject, REPEATED)
    assert closest(steps(distances(subject, REPEATED), report, **{name: 1.01})) > 1


def test_recursion_of_a_random_flat_network_has_teeth() -> None:
    """Prompts of random tokens: their differences cancel to a good part."""
    subject = flat(layers=3)
    report = look(subject)
    ratio = closest(steps(distances(subject), report))
    print(f"flat network, random prompts: {ratio:.3f} of the bound")
    assert 0.05 < ratio <= 1
    for name in ("beta", "difference", "nu"):
        assert closest(steps(distances(subject), report, **{name: 20})) > 1


def test_recursion_is_violated_without_relays() -> None:
    """One token of prompt and fifty that have read it: what they relay outweighs it."""
    prompts, text = texts(np.array([[17], [201]])), rows(1, 55, seed=2, kind="text")
    subject = flat(layers=2, size=1.0, write=3.0)
    report = look(subject, prompts, text)
    distance, rounding = distances(subject, prompts, text)
    before, after = distance.isel(pair=0, continuation=0).values
    one = blocks(report)[1]
    assert (after - rounding <= bound.step(one, before, 1)).all()
    silent = bound.Block(one.carry, 0.0, one.source)
    assert (after > bound.step(silent, before, 1)).any()


def leaning() -> Subject:
    """GPT-2 with one head whose query is a constant along which the two prompts differ a little.

    Their tokens point opposite to the continuation's, so the weight that moves from one to the
    other moves what is written twice as far as a state is long.
    """
    model = network("gpt2", num_attention_heads=1, num_hidden_layers=1, layer_norm_epsilon=0.0)
    base = model.base_model
    across = orthogonal(32)
    across -= across.mean(0)  # no constant part, which the norm would take away
    first, second = torch.linalg.qr(across).Q[:, :2].T
    base.wpe.weight.zero_()
    base.wte.weight.copy_((-first).expand(300, -1))
    base.wte.weight[17] = first
    base.wte.weight[201] = np.cos(0.01) * first + np.sin(0.01) * second
    block = base.h[0]
    block.ln_1.weight.fill_(1)
    block.ln_1.bias.zero_()
    block.attn.c_attn.weight.copy_(torch.cat([0 * torch.eye(32), torch.eye(32), torch.eye(32)], 1))
    block.attn.c_attn.bias.zero_()
    block.attn.c_attn.bias[:32] = 5 * second  # chi = 32 * 5 / sqrt(32) * |first| = 5 or so
    block.attn.c_proj.weight.copy_(torch.eye(32))
    block.attn.c_proj.bias.zero_()
    block.mlp.c_proj.weight.zero_()
    block.mlp.c_proj.bias.zero_()
    return wrap(model)


def test_recursion_is_violated_with_a_smaller_chi() -> None:
    """Weights that move count for most of the distance, and come near their part of the bound."""
    subject = leaning()
    text = rows(1, 50, seed=2, kind="text")
    text.ids[np.isin(text.ids, (17, 201))] = 5
    report = look(subject, REPEATED, text)
    ratio = closest(steps(distances(subject, REPEATED, text), report))
    print(f"weights that move: {ratio:.3f} of the bound; chi {float(report.chi.max()):.3g}")
    assert 0.5 < ratio <= 1
    assert closest(steps(distances(subject, REPEATED, text), report, chi=2)) > 1


def feeding(parallel: bool) -> Subject:
    """GPT-NeoX with one head that attends evenly, and an MLP that multiplies by 100.

    Its ReLUs are all open; nothing turns, so that all that is written has one direction.
    """
    model = network(
        "gpt_neox",
        use_parallel_residual=parallel,
        num_attention_heads=1,
        num_hidden_layers=2,
        intermediate_size=32,
        hidden_act="relu",
    )
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([1.0] * 16 + [-1.0] * 16)
    for row in model.base_model.embed_in.weight:
        row.copy_(10 * signs[torch.randperm(32, generator=generator)])
    one = torch.eye(32)
    for block in model.base_model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.fill_(1)
            norm.bias.zero_()
        attention, mlp = block.attention, block.mlp
        attention.query_key_value.weight.copy_(torch.cat([0 * one, one, one]))
        attention.query_key_value.bias.zero_()
        attention.dense.weight.copy_(one)
        attention.dense.bias.zero_()
        mlp.dense_h_to_4h.weight.copy_(100 * one)
        mlp.dense_h_to_4h.bias.fill_(1000)
        mlp.dense_4h_to_h.weight.copy_(one)
    return wrap(model)


@pytest.mark.parametrize("name", ["mu", "nu_mlp"])
@pytest.mark.parametrize("parallel", [False, True])
def test_recursion_is_violated_with_a_smaller_part_of_the_mlp(parallel: bool, name: str) -> None:
    subject = feeding(parallel)
    report = look(subject, REPEATED)
    ratio = closest(steps(distances(subject, REPEATED), report))
    print(f"with MLP: {ratio:.3f} of the bound")
    assert 0.7 < ratio <= 1
    assert closest(steps(distances(subject, REPEATED), report, **{name: 2})) > 1


# What the next token still shows


@torch.no_grad()
def apart(subject: Subject, prompts: Texts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """TV and KL of the next-token laws of two runs on the first continuation, by t."""
    shared = np.tile(CONTINUATIONS.ids[0], (2, 1))
    ids = torch.from_numpy(np.concatenate([prompts.ids[:2], shared], axis=1))
    logits = subject.model(ids).logits[:, prompts.ids.shape[1] :].double()
    one, other = logits.log_softmax(-1)
    variation = (one.exp() - other.exp()).abs().sum(-1) / 2
    return variation.numpy(), (one.exp() * (one - other)).sum(-1).numpy()


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0])
@every_network
def test_next_tokens_are_no_further_apart_than_the_corollary_says(name: str, scale: float) -> None:
    for seed in SEEDS[:2]:
        subject, report = scaled(name, seed, scale, None), inspected(name, seed, scale, None)
        distance, _ = measured(name, seed, scale, None)
        last = distance.isel(layer=-1, continuation=0, pair=0)
        variation, divergence = apart(subject, PROMPTS)
        most_variation, most_divergence = bound.next_token(last.values, float(report.kappa))
        # float32 logits of two runs, of size one or so
        assert (variation <= most_variation + 1e-6).all()
        assert (divergence <= most_divergence + 1e-6).all()
        assert variation.max() > 1e-5, "nothing was compared"


def test_bounds_on_the_next_token_are_reached() -> None:
    """Two kinds of token, told apart along the direction in which the runs differ."""
    subject = flat()
    distance, _ = distances(subject, REPEATED)
    last = distance.isel(layer=-1, continuation=0, pair=0).values
    with torch.no_grad():
        ids = np.concatenate([REPEATED.ids, np.tile(CONTINUATIONS.ids[0], (2, 1))], axis=1)
        one, other = subject.model.base_model(torch.from_numpy(ids)).last_hidden_state[:, P]
    along = (one - other) / (one - other).norm()
    subject.model.lm_head.weight.copy_(0.1 * along * torch.tensor([1.0, -1.0] * 150)[:, None])
    report = look(subject, REPEATED)
    variation, divergence = apart(subject, REPEATED)
    most_variation, most_divergence = bound.next_token(last, float(report.kappa))
    print(f"TV {variation[0] / most_variation[0]:.3f}, KL {divergence[0] / most_divergence[0]:.3f}")
    assert 0.7 < variation[0] / most_variation[0] <= 1
    assert 0.5 < divergence[0] / most_divergence[0] <= 1


# Planted conditions


def test_biases_alone_make_logits_that_move_nothing() -> None:
    """Queries and keys that are their biases: rotary positions let their product vary."""
    model = network("llama", attention_bias=True)
    for block in model.base_model.layers:
        block.self_attn.q_proj.weight.zero_()
        block.self_attn.k_proj.weight.zero_()
    report = look(wrap(model))
    np.testing.assert_array_equal(report.query_norm, 0)
    np.testing.assert_array_equal(report.key_norm, 0)
    np.testing.assert_array_equal(report.chi, 0)
    for layer, block in enumerate(model.base_model.layers):
        q = block.self_attn.q_proj.bias.view(4, 8).norm(dim=-1)
        k = block.self_attn.k_proj.bias.view(2, 8).norm(dim=-1).repeat_interleave(2)
        allowed = (q * k / np.sqrt(8)).numpy()
        one = report.isel(layer=layer)
        np.testing.assert_allclose(one.logit_bound, allowed, rtol=1e-5)
        np.testing.assert_allclose(one.logit_ceiling, allowed, rtol=1e-5)
        assert (one.logit > 0).all()
        assert (one.logit <= one.logit_bound).all()


@with_and_without_bos
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_even_attention_shares_by_number(name: str, bos: int | None) -> None:
    model = network(name)
    for block, (query, *_) in zip(anatomy.blocks(model), anatomy.projections(model), strict=True):
        query.weight.zero_()
        attention: Any = block.get_submodule(anatomy.FAMILIES[name].attention)
        if query.bias is not None:
            fused = getattr(attention, "c_attn", None) or attention.q_proj
            fused.bias[:32] = 0
    report = look(wrap(model, bos=bos))
    seen = P + POSITIONS + (bos is not None)
    np.testing.assert_allclose(report.share, np.broadcast_to(P / seen, (3, 4, T)), rtol=1e-5)
    np.testing.assert_allclose(report["first"], np.broadcast_to(1 / seen, (3, 4, T)), rtol=1e-5)
    np.testing.assert_allclose(report.beta, ((P + POSITIONS) / seen).max(), rtol=1e-5)
    np.testing.assert_allclose(report.logit, 0, atol=1e-6)


def test_prompt_that_takes_all_has_the_largest_beta() -> None:
    """Every key but the prompt's first is far below it: beta is n where n is largest."""
    model = network("gpt2", num_attention_heads=1)
    base = model.base_model
    base.wpe.weight.zero_()
    for block in base.h:
        block.attn.c_attn.weight.zero_()
        block.attn.c_attn.bias.zero_()
    first = base.h[0]
    first.attn.c_attn.bias[0] = 1e3  # query
    first.attn.c_attn.weight[:, 32:64] = 0
    first.ln_1.weight.fill_(1)
    first.ln_1.bias.zero_()
    spike = torch.zeros(32)
    spike[0] = 1
    base.wte.weight.copy_(torch.randn(300, 32, generator=torch.Generator().manual_seed(0)))
    base.wte.weight[:, 0] = 0
    base.wte.weight[290] = 5 * spike
    first.attn.c_attn.weight[0, 32] = 1  # key
    prompts = PROMPTS.ids.copy()
    prompts[:, 2] = 290
    report = look(wrap(model), texts(prompts))
    assert float(report.beta[0, 0]) == pytest.approx(P + T, rel=1e-4)
    np.testing.assert_allclose(report.share[0, 0], 1, rtol=1e-4)
    np.testing.assert_allclose(report["first"][0, 0], 0, atol=1e-4)


def test_softcap_lets_no_logit_above_it() -> None:
    model = network("gemma2")
    for block in model.base_model.layers:
        block.self_attn.q_proj.weight.mul_(100)
    report = look(wrap(model))
    assert (report.logit <= 2).all()
    assert (report.logit > 1.99).all()
    np.testing.assert_array_equal(report.logit_bound, 2)
    np.testing.assert_array_equal(report.logit_ceiling, 2)


def test_planted_matrices_have_the_norms_they_were_given() -> None:
    """Rows of orthogonal matrices, each head with factors of its own."""
    model = network("llama")
    by_head, by_key_head = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 7.0])
    for layer, block in enumerate(model.base_model.layers):
        read, write = orthogonal(32, layer)[:16], orthogonal(32, 9 + layer)
        block.self_attn.q_proj.weight.copy_(write * by_head.repeat_interleave(8)[:, None])
        block.self_attn.k_proj.weight.copy_(read * by_key_head.repeat_interleave(8)[:, None])
        block.self_attn.v_proj.weight.copy_(read)
        block.self_attn.o_proj.weight.copy_(write)
    report = look(wrap(model))
    np.testing.assert_allclose(report.query_norm, np.tile([1, 2, 3, 4], (3, 1)), rtol=1e-5)
    np.testing.assert_allclose(report.key_norm, np.tile([5, 5, 7, 7], (3, 1)), rtol=1e-5)
    np.testing.assert_allclose(report.gamma, 1, rtol=1e-5)
    for block in model.base_model.layers:
        block.self_attn.v_proj.weight.mul_(by_key_head.repeat_interleave(8)[:, None])
        block.self_attn.o_proj.weight.mul_(by_head.repeat_interleave(8))
    gamma = look(wrap(model)).gamma
    np.testing.assert_allclose(gamma, np.tile([5, 10, 21, 28], (3, 1)), rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_smallest_spread_is_that_of_the_continuation(name: str) -> None:
    """Tokens of planted sizes; the prompt has smaller ones, which do not count."""
    model = network(name)
    embedding = model.get_input_embeddings().weight
    signs = torch.tensor([1.0, -1.0] * 16)
    embedding.copy_(3 * signs.expand_as(embedding))
    embedding[PROMPTS.ids[0, 0]] = 0.01 * signs
    embedding[40] = 0.5 * signs
    shift = 0.0
    if name == "gpt2":
        model.base_model.wpe.weight.zero_()
        shift = 7.0  # LayerNorm takes it away
    embedding += shift
    ids = np.full((2, T), 50)
    ids[1, 13] = 40
    report = look(wrap(model), texts=texts(ids, "text"))
    norm: Any = anatomy.norms(model)[0]["attention"]
    gain, _, epsilon = anatomy.gain(model, norm)
    one = report.sel(layer=1, norm="attention")
    assert float(one.rms) == pytest.approx(0.5, rel=1e-5)
    expected = float(gain.abs().max()) / np.sqrt(0.25 + epsilon)
    assert float(one.nu) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "phi"])
def test_norms_of_queries_and_keys_set_a_ceiling(name: str) -> None:
    changes: dict[str, Any] = {"qk_layernorm": True} if name == "phi" else {}
    model = network(name, **changes)
    report = look(wrap(model))
    for layer, (named, (query, *_)) in enumerate(
        zip(anatomy.norms(model), anatomy.projections(model), strict=True)
    ):
        width = query.weight.shape[1]
        sizes = []
        for norm in (named["query"], named["key"]):
            gain, bias, _ = anatomy.gain(model, norm)
            offset = 0.0 if bias is None else float(bias.norm())
            sizes.append(np.sqrt(width) * float(gain.abs().max()) + offset)
        ceiling = sizes[0] * sizes[1] / np.sqrt(width)
        np.testing.assert_allclose(report.logit_ceiling.isel(layer=layer), ceiling, rtol=1e-5)
    for parameters in anatomy.projections(model):
        for part in parameters[:2]:
            part.weight.mul_(1000)
    louder = look(wrap(model))
    np.testing.assert_allclose(louder.logit_ceiling, report.logit_ceiling)
    assert (louder.logit <= louder.logit_ceiling).all()


@with_and_without_bos
def test_normalised_queries_and_keys_still_obey_the_recursion(bos: int | None) -> None:
    """Phi with norms that its published sizes do not use, whose bias adds to the ceiling."""
    subject = wrap(network("phi", qk_layernorm=True), bos=bos)
    assert 0 < closest(steps(distances(subject), look(subject))) <= 1


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_stretched_rotary_positions_stretch_what_reads(name: str) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 1.7}
    partial = {"partial_rotary_factor": 0.5} if name == "phi" else {}
    plain = look(wrap(network(name)))
    subject = wrap(network(name, rope_parameters=rope | partial))
    report = look(subject)
    for which in ("query_norm", "key_norm"):
        np.testing.assert_allclose(report[which], 1.7 * plain[which], rtol=1e-6)
    assert (report.logit <= report.logit_bound * (1 + 1e-6)).all()
    assert (report.logit_bound <= report.logit_ceiling).all()
    assert 0 < closest(steps(distances(subject), report)) <= 1


# Arguments of the bound


@every_network
def test_rows_are_what_the_report_says(name: str) -> None:
    report = inspected(name, 0, 1.0, None)
    shape = anatomy.describe(config(name))
    after = report.nu.fillna(1).transpose("layer", "norm")
    for layer, row in enumerate(constants(report)):
        one = report.isel(layer=layer)
        assert row["window"] == shape.windows[layer]
        assert type(row["window"]) in (int, type(None))
        assert row["parallel"] is shape.parallel
        factor = after.isel(layer=layer)
        np.testing.assert_allclose(
            row["gamma"], one.gamma * float(factor.sel(norm="after attention"))
        )
        assert row["mu"] == pytest.approx(float(one.mu * factor.sel(norm="after mlp")))
        assert row["nu"] == float(one.nu.sel(norm="attention"))
        assert row["nu_mlp"] == float(one.nu.sel(norm="mlp"))
        assert row["difference"] == float(one.difference.max())
        assert (row["gamma"] != one.gamma.values).any() == (shape.family.placement == "sandwich")


def test_rows_of_one_pair_have_its_difference() -> None:
    report = inspected("gpt2", 0, 1.0, None)
    for pair in report.pair.values:
        for layer, row in enumerate(constants(report, pair), start=1):
            assert row["difference"] == float(report.difference.sel(pair=pair, layer=layer))
    assert list(report.pair.values) == [
        "prompt-0 | prompt-1", "prompt-0 | prompt-2", "prompt-1 | prompt-2"
    ]  # fmt: skip


def test_pair_that_was_not_inspected_is_refused() -> None:
    with pytest.raises(Refused, match=r"pair 'a \| b' was not inspected.*'prompt-0 \| prompt-1'"):
        constants(inspected("gpt2", 0, 1.0, None), "a | b")


def test_difference_is_at_most_twice_the_largest_state() -> None:
    for name in NETWORKS:
        report = inspected(name, 0, 1.0, None)
        most = 2 * report.state / report.nu.sel(norm="attention")
        assert (report.difference <= most * (1 + 1e-6)).all()


# Verdicts


@every_network
def test_every_condition_is_judged(name: str) -> None:
    subject, report = scaled(name, 0, 1.0, None), inspected(name, 0, 1.0, None)
    judged = conditions.verdicts(subject, report)
    assert [one.condition for one in judged] == [
        "architecture", "bounded logits", "activations away from zero", "dilution"
    ]  # fmt: skip
    assert all(one.why and one.follows and "nan" not in one.why + one.follows for one in judged)
    status = {one.condition: one.status for one in judged}
    sandwich = name.startswith("gemma")
    assert (status["architecture"] == "not of this class") == sandwich
    bounded = subject.anatomy.softcap is not None or subject.anatomy.qk_norm
    assert status["bounded logits"] == ("holds" if bounded else "holds with these constants")
    assert status["activations away from zero"] == "holds with these constants"
    assert status["dilution"] == "holds with these constants"


def test_verdicts_say_the_numbers_of_the_report() -> None:
    subject, report = scaled("llama", 0, 1.0, None), inspected("llama", 0, 1.0, None)
    _, logits, zero, dilution = conditions.verdicts(subject, report)
    for number in (report.logit.max(), report.logit_bound.max()):
        assert f"{float(number):.3g}" in logits.why
    assert number_before(" on any text", logits.why) == pytest.approx(
        float(report.logit_ceiling.max()), rel=0.01
    )
    before = report.rms.sel(norm=["attention", "mlp"])
    assert f"smallest rms {float(before.min()):.3g}, before the " in zero.why
    layer, which = np.argwhere(before.values == before.values.min())[0]
    assert f"before the {['attention', 'mlp'][which]} of block {layer + 1};" in zero.why
    assert f"{float(report.final_rms):.3g}" in zero.why
    assert f"at most {float(report.nu.max()):.3g}-fold" in zero.follows
    assert f"{float(report.beta.median()):.3g}" in dilution.why
    assert f"{float(report.beta.max()):.4g}" in dilution.why
    assert f"none can exceed {P + T}" in dilution.why
    layernorm = conditions.verdicts(scaled("gpt2", 0, 1.0, None), inspected("gpt2", 0, 1.0, None))
    assert "smallest deviation" in layernorm[2].why


def test_what_bounds_the_logits_is_named() -> None:
    capped, normed = (
        conditions.verdicts(scaled(name, 0, 1.0, None), inspected(name, 0, 1.0, None))[1]
        for name in ("gemma2", "qwen3")
    )
    assert "softcap lets no logit exceed 2;" in capped.why
    ceiling = float(inspected("qwen3", 0, 1.0, None).logit_ceiling.max())
    assert "queries and keys are normalised" in normed.why
    assert number_before(" on any text", normed.why) == pytest.approx(ceiling, rel=0.01)


def number_before(mark: str, text: str) -> float:
    return float(text.partition(mark)[0].split()[-1])


@pytest.mark.parametrize(
    ("name", "power"),
    [("gpt2", 2), ("llama", 2), ("mistral everywhere", 2), ("phi", 2), ("qwen2 window", 0)],
)
def test_architectures_within_the_class_are_told_their_rate(name: str, power: int) -> None:
    verdict = conditions.architecture(config(name))
    assert verdict.status == "holds"
    assert f"the bound with {power} powers of the logarithm" in verdict.follows
    if "window" in name:
        assert "all keys in 1 of 3 blocks" in verdict.why
    else:
        assert verdict.why.endswith("softmax over all keys")


def test_windows_everywhere_end_the_distance_where_the_verdict_says() -> None:
    verdict = conditions.architecture(config("mistral"))
    end = 3 * (WINDOW - 1)
    assert verdict.status == "holds"
    assert verdict.why.endswith("a window of keys in every block")
    assert verdict.follows == f"no distance at all beyond t = {end}"
    distance, rounding = measured("mistral", 0, 1.0, None)
    last = distance.isel(layer=-1).max(("pair", "continuation"))
    assert int(last.t[last > rounding].max()) == end  # equal rows of a batch may round apart


OUTSIDE = {
    "post-LN": OPTConfig(do_layer_norm_before=False),
    "post-norm": AutoConfig.for_model("olmo2"),
    "sandwich norm": config("gemma2"),
    "mixture of experts": AutoConfig.for_model("mixtral"),
    "unnormalised attention": AutoConfig.for_model("mamba"),
    "log-n temperature": AutoConfig.for_model("llama4_text"),
    "ALiBi": AutoConfig.for_model("bloom"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_architecture_outside_is_told_its_way_out_and_what_is_left(name: str) -> None:
    verdict = conditions.architecture(OUTSIDE[name])
    assert verdict.status == "not of this class"
    assert verdict.condition == "architecture"
    assert verdict.why.startswith(f"{name}: ")
    assert len(verdict.follows) > 20


def test_every_departure_has_a_reason_of_its_own() -> None:
    assert set(OUTSIDE) == set(conditions.DEPARTURES)
    found = [conditions.architecture(one) for one in OUTSIDE.values()]
    assert len({one.why for one in found}) == len({one.follows for one in found}) == len(found)


@pytest.mark.parametrize("name", anatomy.OUTSIDE)
def test_architectures_with_experts_are_told_so_beside_their_other_ways_out(name: str) -> None:
    """By what transformers' own configuration speaks of."""
    configuration = AutoConfig.for_model(name)
    verdict = conditions.architecture(configuration)
    has_experts = any(word in str(configuration.to_dict()) for word in ("expert", "moe_"))
    assert ("mixture of experts: " in verdict.why) == has_experts
    if name in ("llama4_text", "jamba"):
        others = {"llama4_text": "log-n temperature: ", "jamba": "unnormalised attention: "}
        assert others[name] in verdict.why
        experts = conditions.DEPARTURES["mixture of experts"]
        assert verdict.follows.endswith(f"; {experts.follows}")


def test_architecture_in_neither_table_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="'bert'"):
        conditions.architecture(AutoConfig.for_model("bert"))


def test_sandwich_norm_is_judged_on_what_was_measured_too() -> None:
    subject, report = scaled("gemma2", 0, 1.0, None), inspected("gemma2", 0, 1.0, None)
    first, *_ = conditions.verdicts(subject, report)
    assert first.status == "not of this class"
    assert "second norm divides" in first.why
    assert "measured here" in first.follows
    assert report.nu.sel(norm="after attention").notnull().all()


# Refusals and failures


def test_one_prompt_is_refused() -> None:
    with pytest.raises(Refused, match="at least 2 prompts"):
        look(scaled("llama", 0, 1.0, None), texts(PROMPTS.ids[:1]))


@with_and_without_bos
def test_more_than_the_context_is_refused_with_both_numbers(bos: int | None) -> None:
    head = int(bos is not None)
    subject = scaled("llama", 0, 1.0, bos)
    fitting, longer = (rows(1, CONTEXT - P - head + x, seed=4, kind="text") for x in (0, 1))
    with pytest.raises(Refused) as refusal:
        look(subject, texts=longer)
    assert str(CONTEXT) in str(refusal.value)
    assert str(CONTEXT + 1) in str(refusal.value)
    assert look(subject, texts=fitting).sizes["t"] == CONTEXT - P - head


def test_chunk_of_no_tokens_is_refused() -> None:
    subject = scaled("llama", 0, 1.0, None)
    with pytest.raises(Refused, match="chunk 0"):
        inspect(subject, PROMPTS, CONTINUATIONS, chunk=0)
    assert subject.model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("block", "path"),
    [
        (2, "input_layernorm"),
        (2, "self_attn.q_proj"),
        (2, "self_attn.k_proj"),
        (2, "mlp.gate_proj"),
        (2, "mlp.up_proj"),
        (1, "mlp.down_proj"),
        (3, "mlp.down_proj"),
        (3, "self_attn.v_proj"),
    ],
)
def test_weights_that_are_not_finite_stop_the_run_at_their_layer(
    block: int, path: str, value: float
) -> None:
    model = network("llama")
    poisoned: Any = anatomy.blocks(model)[block - 1].get_submodule(path)
    poisoned.weight[3] = value
    with pytest.raises(Failed, match=f"layer {block}: .*float32") as failure:
        look(wrap(model))
    assert "\n" not in str(failure.value)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("which", ["final norm", "unembedding"])
def test_weights_after_the_blocks_that_are_not_finite_stop_the_run(which: str) -> None:
    model = network("llama")
    final = anatomy.final_norm(model)
    weight: Any = final.weight if which == "final norm" else model.get_output_embeddings().weight
    weight.flatten()[3] = torch.nan
    with pytest.raises(Failed, match=which):
        look(wrap(model))


def test_texts_without_a_token_are_refused() -> None:
    empty = texts(np.empty((3, 0), np.int64))
    with pytest.raises(Refused, match=r"P = 0, C = 2"):
        inspect(scaled("llama", 0, 1.0, None), empty, CONTINUATIONS)
    with pytest.raises(Refused, match=r"T = 0"):
        inspect(scaled("llama", 0, 1.0, None), PROMPTS, empty)


def test_inspection_works_where_gradients_are_switched_off() -> None:
    with torch.inference_mode():
        report = inspect(scaled("llama", 0, 1.0, None), PROMPTS, CONTINUATIONS)
    np.testing.assert_array_equal(report.mu, inspected("llama", 0, 1.0, None).mu)
