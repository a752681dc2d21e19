"""Every fact in the table of architectures, seen in a network that behaves so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_networks import CONTEXT, NETWORKS, config, network, rows, texts, wrap
from torch import nn
from transformers import AutoConfig

from nohair.errors import Refused
from nohair.lab import anatomy
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
