"""Every fact in the table of architectures, seen in a network that behaves so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny_networks import CONTEXT, NETWORKS, config, network, rows, texts, wrap
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nohair.errors import Refused
from nohair.lab import anatomy, conditions
from nohair.lab.distances import measure

IDS = torch.from_numpy(rows(2, 20, seed=5).ids)

every_network = pytest.mark.parametrize("name", NETWORKS)


def outputs(modules: list[nn.Module], run: Any) -> list[torch.Tensor]:
    """What each module gives out while `run` runs."""
    seen: dict[int, torch.Tensor] = {}

    def keep(i: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[i] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [module.register_forward_hook(keep(i)) for i, module in enumerate(modules)]
    run()
    for handle in handles:
        handle.remove()
    return [seen[i] for i in range(len(modules))]


@torch.no_grad()
def silence(block: nn.Module, path: str) -> None:
    """Let a writer write nothing."""
    for parameter in block.get_submodule(path).parameters():
        parameter.zero_()


def test_every_family_of_the_table_is_tried() -> None:
    assert {name.split()[0] for name in NETWORKS} == set(anatomy.FAMILIES)


@every_network
def test_last_hidden_state_is_after_the_final_norm(name: str) -> None:
    model = network(name)
    found: Any = None

    def run() -> None:
        nonlocal found
        found = model(IDS, output_hidden_states=True, use_cache=False).hidden_states

    *states, final = outputs([*anatomy.blocks(model), anatomy.final_norm(model)], run)
    assert len(states) == len(found) - 1
    for ours, theirs in zip(states[:-1], found[1:-1], strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(final, found[-1])
    torch.testing.assert_close(anatomy.final_norm(model)(states[-1]), found[-1])
    assert (states[-1] - found[-1]).norm() > 0.1 * states[-1].norm()


@every_network
def test_each_block_adds_what_its_two_writers_write(name: str) -> None:
    model = network(name)
    family = anatomy.describe(model.config).family
    before, block = anatomy.blocks(model)[-2:]
    writers = [block.get_submodule(path) for path in family.residual_writers]
    entered, left, *written = outputs([before, block, *writers], lambda: model(IDS))
    if family.placement == "sandwich":
        _, after_attention, _, after_mlp = map(block.get_submodule, family.norms)
        written = [after_attention(written[0]), after_mlp(written[1])]
    attended, computed = (w.view_as(left) for w in written)
    torch.testing.assert_close(left - entered, attended + computed, rtol=1e-4, atol=1e-5)
    assert family.residual_writers[0].startswith(family.attention)


@every_network
def test_blocks_hold_the_named_norms_and_no_others(name: str) -> None:
    model = network(name)
    shape = anatomy.describe(model.config)
    family = shape.family
    for block in anatomy.blocks(model):
        found = {p for p, m in block.named_modules() if "Norm" in type(m).__name__}
        of_queries = {p for p in found if p.startswith(f"{family.attention}.")}
        assert found - of_queries == set(family.norms)
        assert bool(of_queries) == shape.qk_norm


@every_network
def test_kind_of_norm_shows_in_what_it_ignores(name: str) -> None:
    """LayerNorm ignores a constant added to every entry; RMSNorm does not."""
    model = network(name)
    family = anatomy.describe(model.config).family
    states = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    first = anatomy.blocks(model)[0]
    for norm in [*map(first.get_submodule, family.norms), anatomy.final_norm(model)]:
        ignores = torch.allclose(norm(states + 1), norm(states), atol=1e-4)
        assert ignores == (family.norm == "LayerNorm")


@every_network
def test_sandwich_norm_hides_the_scale_of_the_writers(name: str) -> None:
    model = network(name)
    family = anatomy.describe(model.config).family
    before = outputs(anatomy.blocks(model), lambda: model(IDS))[-1]
    for path in family.residual_writers:
        for parameter in anatomy.blocks(model)[-1].get_submodule(path).parameters():
            parameter.mul_(3)
    after = outputs(anatomy.blocks(model), lambda: model(IDS))[-1]
    # what is left in a sandwich is the norm's epsilon, 1e-6 beside a mean square near one
    unchanged = (after - before).norm() < 1e-4 * before.norm()
    assert bool(unchanged) == (family.placement == "sandwich")


@every_network
def test_parallel_mlp_does_not_hear_the_attention(name: str) -> None:
    model = network(name)
    shape = anatomy.describe(model.config)
    block = anatomy.blocks(model)[0]
    heard: list[torch.Tensor] = []
    mlp = block.get_submodule(shape.family.mlp)
    mlp.register_forward_pre_hook(lambda module, args: heard.append(args[0]))
    model(IDS)
    silence(block, shape.family.residual_writers[0])
    model(IDS)
    assert torch.equal(*heard) == shape.parallel


@every_network
def test_sizes_and_positions(name: str) -> None:
    model = network(name)
    shape = anatomy.describe(model.config)
    attention = anatomy.blocks(model)[0].get_submodule(shape.family.attention)
    assert (shape.layers, shape.width, shape.heads, shape.context) == (3, 32, 4, CONTEXT)
    assert shape.kv_heads == (2 if hasattr(attention, "k_proj") and _grouped(attention) else 4)
    learned = [
        m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings < 2 * CONTEXT
    ]
    assert bool(learned) == (shape.family.positions == "learned")
    assert shape.softcap == (2.0 if name == "gemma2" else None)


def _grouped(attention: nn.Module) -> bool:
    queries: Any = attention.get_submodule("q_proj")
    keys: Any = attention.get_submodule("k_proj")
    return bool(queries.out_features == 2 * keys.out_features)


@every_network
def test_windows_bound_how_far_a_prompt_reaches(name: str) -> None:
    """A window of w keys, the query's own included, carries w - 1 positions on per block.

    One prompt token differs; position t of the continuation is t tokens after it, so block l
    can tell at t up to the sum of w - 1 over the blocks so far, and nothing beyond.
    """
    model = network(name)
    shape = anatomy.describe(model.config)
    prompts = texts(np.array([[17], [201]]))
    record = measure(wrap(model), prompts, rows(1, 40, seed=3, kind="text"))
    seen = record.distance.isel(continuation=0, pair=0) > 0
    reach: float = 0
    for layer, window in enumerate(shape.windows, start=1):
        reach += np.inf if window is None else window - 1
        at = seen.sel(layer=layer)
        np.testing.assert_array_equal(at, at.t <= reach, err_msg=f"block {layer}")


def test_unknown_architecture_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(Refused) as refusal:
        anatomy.describe(AutoConfig.for_model("mamba"))
    assert "'mamba'" in str(refusal.value)
    assert all(family in str(refusal.value) for family in anatomy.FAMILIES)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "variant", [{"do_layer_norm_before": False}, {"_remove_final_layer_norm": True}]
)
def test_opt_without_final_norm_is_refused(variant: dict[str, bool]) -> None:
    with pytest.raises(Refused, match="opt-350m"):
        anatomy.describe(config("opt", **variant))


# What the theorem's constants are read from


class Call(NamedTuple):
    """What one block's attention was given, and what its own eager code made of it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    softcap: float | None
    weights: torch.Tensor
    mixed: torch.Tensor  # (runs, positions, heads, head width)


@contextmanager
def attention_calls(model: Any) -> Iterator[list[Call]]:
    """Collect every call of the attention, which the model's own eager code answers."""
    calls: list[Call] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        own = sys.modules[type(module).__module__].eager_attention_forward
        mixed, weights = own(module, query, key, value, mask, **options)
        scaling, softcap = options["scaling"], options.get("softcap")
        calls.append(Call(query, key, value, scaling, softcap, weights, mixed))
        return mixed, weights

    before = model.config._attn_implementation
    AttentionMaskInterface.register("tests_eager", eager_mask)
    ALL_ATTENTION_FUNCTIONS["tests_eager"] = attend
    model.set_attn_implementation("tests_eager")
    yield calls
    model.set_attn_implementation(before)


def submodules(model: Any, path: str) -> list[nn.Module]:
    """Module of this name in every block."""
    return [block.get_submodule(path) for block in anatomy.blocks(model)]


@every_network
def test_projections_make_the_queries_keys_and_values_of_the_attention(name: str) -> None:
    """Rotation spares the first position, and lengths everywhere."""
    model = network(name, dtype=torch.float64)
    shape = anatomy.describe(model.config)
    norms = anatomy.norms(model)
    with attention_calls(model) as calls:
        read = outputs([named["attention"] for named in norms], lambda: model(IDS))
    for u, named, call, (query, key, value, _) in zip(
        read, norms, calls, anatomy.projections(model), strict=True
    ):
        assert len(query.weight) == shape.heads
        assert len(key.weight) == len(value.weight) == shape.kv_heads
        made = [
            torch.einsum("rtd,hwd->rhtw", u, part.weight)
            + (0 if part.bias is None else part.bias[:, None])
            for part in (query, key, value)
        ]
        if shape.qk_norm:
            made[0], made[1] = named["query"](made[0]), named["key"](made[1])
        if shape.family.title == "OPT":
            assert call.scaling == 1, "its queries carry the scale"
        for ours, theirs in zip(made[:2], (call.query, call.key), strict=True):
            torch.testing.assert_close(ours[:, :, 0], theirs[:, :, 0])
            torch.testing.assert_close(ours.norm(dim=-1), theirs.norm(dim=-1))
            turned = not torch.allclose(ours, theirs, atol=1e-3)
            assert turned == (shape.family.positions == "rotary")
        torch.testing.assert_close(made[2], call.value)


@every_network
def test_writers_of_the_heads_add_up_to_what_the_attention_writes(name: str) -> None:
    model = network(name, dtype=torch.float64)
    path = anatomy.describe(model.config).family.residual_writers[0]
    modules = submodules(model, path)
    with attention_calls(model) as calls:
        written = outputs(modules, lambda: model(IDS))
    for output, module, call, (*_, writer) in zip(
        written, modules, calls, anatomy.projections(model), strict=True
    ):
        heads = torch.einsum("rthw,hdw->rtd", call.mixed, writer)
        bias = getattr(module, "bias", None)
        torch.testing.assert_close(heads + (0 if bias is None else bias), output)


@every_network
def test_projections_are_the_weights_at_this_moment(name: str) -> None:
    model = network(name)
    before = [
        [part.clone() for part in (q.weight, k.weight, v.weight, o)]
        for q, k, v, o in anatomy.projections(model)
    ]
    for parameter in model.parameters():
        parameter.mul_(2)
    for old, (q, k, v, o) in zip(before, anatomy.projections(model), strict=True):
        for one, other in zip(old, (q.weight, k.weight, v.weight, o), strict=True):
            torch.testing.assert_close(other, 2 * one)


@every_network
def test_gain_bias_and_epsilon_are_all_of_a_norm(name: str) -> None:
    model = network(name, dtype=torch.float64)
    kind = anatomy.describe(model.config).family.norm
    every = {m for named in anatomy.norms(model) for m in named.values()}
    generator = torch.Generator().manual_seed(0)
    for norm in [*every, anatomy.final_norm(model)]:
        gain, bias, epsilon = anatomy.gain(model, norm)
        # so small that epsilon counts for as much as they do
        states = torch.randn(7, len(gain), generator=generator, dtype=torch.float64)
        states *= torch.logspace(-4, 0, 7, dtype=torch.float64)[:, None]
        centred = states - states.mean(-1, keepdim=True) if kind == "LayerNorm" else states
        made = gain * centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        made += 0 if bias is None else bias
        assert (bias is not None) == (kind == "LayerNorm")
        # Gemma computes its norms in float32 whatever it is given
        torch.testing.assert_close(norm(states), made, rtol=1e-5, atol=1e-6)


@every_network
def test_norms_stand_where_their_roles_say(name: str) -> None:
    """By what goes in and out of their neighbours."""
    model = network(name)
    shape = anatomy.describe(model.config)
    family = shape.family
    given: dict[nn.Module, torch.Tensor] = {}
    made: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: Any, options: Any, output: Any) -> None:
        given[module] = args[0] if args else options.get("hidden_states")
        made[module] = output[0] if isinstance(output, tuple) else output

    for module in model.modules():
        module.register_forward_hook(keep, with_kwargs=True)
    with attention_calls(model) as calls:
        model(IDS)
    for block, named, call in zip(anatomy.blocks(model), anatomy.norms(model), calls, strict=True):
        optional = {
            "after attention": family.placement == "sandwich",
            "after mlp": family.placement == "sandwich",
            "query": shape.qk_norm,
            "key": shape.qk_norm,
        }
        assert set(named) == {"attention", "mlp", *(r for r, there in optional.items() if there)}
        attention, mlp = (block.get_submodule(p) for p in (family.attention, family.mlp))
        writers = [block.get_submodule(p) for p in family.residual_writers]
        assert torch.equal(made[named["attention"]], given[attention])
        assert torch.equal(made[named["mlp"]], given[mlp])
        assert torch.equal(given[named["attention"]], given[block])
        if family.placement == "sandwich":
            assert torch.equal(given[named["after attention"]], made[writers[0]])
            assert torch.equal(given[named["after mlp"]], made[writers[1]])
        if shape.qk_norm:
            for role, used in (("query", call.query), ("key", call.key)):
                normed = made[named[role]]  # type: ignore[index]
                heads = normed if normed.shape == used.shape else normed.transpose(1, 2)
                torch.testing.assert_close(heads[:, :, 0], used[:, :, 0])


@every_network
def test_readers_activation_and_writer_are_all_of_an_mlp(name: str) -> None:
    model = network(name)
    family = anatomy.describe(model.config).family
    for block in anatomy.blocks(model):
        writer = block.get_submodule(family.residual_writers[1])
        activation: Any = block.get_submodule(family.activation)
        hidden: list[torch.Tensor] = []
        handle = writer.register_forward_pre_hook(
            lambda module, args, into=hidden: into.append(args[0])
        )
        read = outputs([block.get_submodule(p) for p in family.readers], lambda: model(IDS))
        handle.remove()
        made = activation(read[0]) * (read[1] if len(read) == 2 else 1)
        torch.testing.assert_close(made, hidden[0])


@every_network
def test_matrix_is_what_a_linear_map_does(name: str) -> None:
    model = network(name, dtype=torch.float64)
    family = anatomy.describe(model.config).family
    generator = torch.Generator().manual_seed(0)
    for path in (*family.residual_writers, *family.readers):
        module: Any = anatomy.blocks(model)[1].get_submodule(path)
        weight = anatomy.matrix(module)
        x = torch.randn(3, weight.shape[1], dtype=torch.float64, generator=generator)
        bias = 0 if module.bias is None else module.bias
        torch.testing.assert_close(x @ weight.T + bias, module(x))


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 1.7}
STRETCHED: dict[str, dict[str, Any]] = {
    "llama": YARN,
    "gpt_neox": YARN | {"partial_rotary_factor": 0.25},
    "gemma3_text": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@every_network
def test_rotary_positions_stretch_nothing(name: str) -> None:
    assert anatomy.rotary_scale(network(name)) == 1


@pytest.mark.parametrize("name", STRETCHED)
def test_stretch_of_rotary_positions_is_found_and_is_reached(name: str) -> None:
    straight, stretched = network(name), network(name, rope_parameters=STRETCHED[name])
    assert anatomy.rotary_scale(stretched) == pytest.approx(1.7)
    with attention_calls(straight) as plain:
        straight(IDS)
    with attention_calls(stretched) as changed:
        stretched(IDS)
    # the first position, where nothing turns; the first block that stretches, whose states agree
    layer = 1 if name == "gemma3_text" else 0
    ratio = changed[layer].query[:, :, 0] / plain[layer].query[:, :, 0]
    assert float(ratio.max()) == pytest.approx(1.7, rel=1e-4)


def test_architectures_outside_are_known_to_transformers_and_not_measured_here() -> None:
    assert not set(anatomy.OUTSIDE) & set(anatomy.FAMILIES)
    assert set(anatomy.OUTSIDE) <= set(CONFIG_MAPPING)
    for name in anatomy.OUTSIDE:
        with pytest.raises(Refused, match=f"'{name}'"):
            anatomy.describe(AutoConfig.for_model(name))


def test_every_departure_has_its_reason_and_every_reason_its_use() -> None:
    named = {way for ways in anatomy.OUTSIDE.values() for way in ways}
    inside = {way for name in NETWORKS for way in anatomy.departures(config(name))}
    assert all(anatomy.OUTSIDE.values())
    assert named | inside == set(conditions.DEPARTURES)


def test_departures_of_the_families() -> None:
    for name in NETWORKS:
        sandwich = ("sandwich norm",) if name.startswith("gemma") else ()
        assert anatomy.departures(config(name)) == sandwich
    assert anatomy.departures(config("opt", do_layer_norm_before=False)) == ("post-LN",)


def test_architecture_in_neither_table_is_refused_by_name() -> None:
    with pytest.raises(Refused) as refusal:
        anatomy.departures(AutoConfig.for_model("bert"))
    assert "'bert'" in str(refusal.value)
    assert all(name in str(refusal.value) for name in [*anatomy.FAMILIES, *anatomy.OUTSIDE])
    assert "\n" not in str(refusal.value)


def test_a_window_of_one_key_is_refused() -> None:
    with pytest.raises(Refused, match=r"sliding_window = 1: .*at least 2"):
        anatomy.describe(config("mistral", sliding_window=1))


def test_opt_with_words_of_another_width_is_refused() -> None:
    with pytest.raises(Refused, match="words of 16 numbers, not 32"):
        anatomy.describe(config("opt", word_embed_proj_dim=16))
