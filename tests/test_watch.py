"""What is read while a network runs, against the network's own eager attention and its states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray
from test_anatomy import attention_calls, outputs
from tiny_networks import NETWORKS, network, rows, wrap
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nohair.lab import anatomy, operators
from nohair.lab.attend import NAME, Group
from nohair.lab.conditions import inspect
from nohair.lab.distances import measure
from nohair.lab.models import Subject
from nohair.lab.texts import Texts
from nohair.lab.watch import Watch

P, T = 6, 23
K, C = 3, 2
PROMPTS = rows(K, P, seed=1)
CONTINUATIONS = rows(C, T, seed=2, kind="text")
CHUNKS = (1, 7, 1 + P + T)

every_network = pytest.mark.parametrize("name", NETWORKS)


def tokens(bos: bool) -> torch.Tensor:
    """All runs on the first continuation, (K, positions)."""
    head = np.zeros((K, int(bos)), int)
    shared = np.tile(CONTINUATIONS.ids[0], (K, 1))
    return torch.from_numpy(np.concatenate([head, PROMPTS.ids, shared], axis=1))


@torch.no_grad()
def states(model: Any, ids: torch.Tensor, chunk: int, watch: Watch | None = None) -> torch.Tensor:
    """After every block and the final norm, (site, run, position, width)."""
    memory = DynamicCache(config=model.config)
    found = []
    for at in range(0, ids.shape[1], chunk):
        part = ids[:, at : at + chunk]
        if watch is not None:
            watch.begin(slice(at, at + part.shape[1]))
        sites = [*anatomy.blocks(model), anatomy.final_norm(model)]
        run = partial(model.base_model, part, cache=memory, use_cache=True)
        found.append(torch.stack(outputs(sites, run)))
    return torch.cat(found, dim=2)


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    yield
    model.set_attn_implementation(before)


# In the model's place


@pytest.mark.parametrize(
    "name", [name for name in NETWORKS if name != "gemma2"]
)  # which refuses sdpa
def test_watched_attention_gives_the_states_of_sdpa_to_rounding(name: str) -> None:
    """In float64; no reading on the way may cost digits."""
    model = network(name, dtype=torch.float64)
    # Gemma's norms compute in float32 whatever they are given
    assert_same_states(model, "sdpa", 1e-5 if name.startswith("gemma") else 1e-12)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@every_network
def test_watched_attention_gives_the_states_of_the_models_own(name: str, kind: str) -> None:
    if (name, kind) != ("gemma2", "sdpa"):
        assert_same_states(network(name), kind, 1e-5)


def assert_same_states(model: Any, kind: str, slack: float) -> None:
    ids = tokens(bos=True)
    with attention(model, kind):
        own = states(model, ids, ids.shape[1])
    for chunk in CHUNKS:
        watch = Watch(wrap(model), K, 1, P, T)
        with watch.installed():
            watched = states(model, ids, chunk, watch)
        difference = (watched - own).norm(dim=-1) / own.norm(dim=-1)
        assert float(difference.max()) < slack, f"chunk {chunk}"


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("fails", [False, True])
def test_attention_and_hooks_are_put_back(before: str, fails: bool) -> None:
    model = network("llama")
    model.set_attn_implementation(before)
    watch = Watch(wrap(model), K, 0, P, T)
    try:
        with watch.installed():
            assert model.config._attn_implementation == NAME
            assert any(module._forward_hooks for module in model.modules())
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert model.config._attn_implementation == before
    assert model.base_model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())
    assert NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys()


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_model_with_the_same_configuration_works_as_before(name: str) -> None:
    model = network(name)
    other: Any = type(model)(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    assert other.config is model.config
    ids = tokens(bos=False)
    before = states(other, ids, 7)
    inspect(wrap(model), PROMPTS, CONTINUATIONS)
    assert torch.equal(states(other, ids, 7), before)
    inspect(wrap(other), PROMPTS, CONTINUATIONS)


@every_network
def test_distances_measured_later_are_the_same_to_the_last_bit(name: str) -> None:
    subject = wrap(network(name))
    before = measure(subject, PROMPTS, CONTINUATIONS, chunk=7)
    inspect(subject, PROMPTS, CONTINUATIONS, chunk=5)
    after = measure(subject, PROMPTS, CONTINUATIONS, chunk=7)
    assert after.equals(before)


# What is read


@torch.no_grad()
def by_hand(model: Any, bos: bool) -> dict[str, NDArray[np.float64]]:
    """All that `inspect` reads, one run at a time, whole, in float64, from what each module does.

    Nothing of `Watch` is used; where parts are (norms, projections) is `test_anatomy`'s business.
    """
    model = model.double()
    shape = anatomy.describe(model.config)
    head, begin = int(bos), int(bos) + P
    named = anatomy.norms(model)
    roles = ("attention", "mlp", "after attention", "after mlp", "query", "key")
    entered: dict[nn.Module, torch.Tensor] = {}
    left: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        entered[module], left[module] = args[0], output

    norms = [*(m for one in named for m in one.values()), anatomy.final_norm(model)]
    handles = [m.register_forward_hook(keep) for m in dict.fromkeys(norms)]
    runs: list[dict[str, Any]] = []
    gaps = []
    for continuation in CONTINUATIONS.ids:
        reads = []
        for prompt in PROMPTS.ids:
            with attention_calls(model) as calls:
                model(torch.tensor([[0] * head + [*prompt, *continuation]]), use_cache=False)
            reads.append(torch.cat([left[one["attention"]] for one in named]).numpy())
            runs.append(_one_run(shape, calls, begin, head))
            rms = np.full((shape.layers, len(roles)), np.inf)
            for layer, one in enumerate(named):
                for role, norm in one.items():
                    size = spread(shape.family.norm, entered[norm])
                    where = size if role in ("query", "key") else size[begin:]
                    rms[layer, roles.index(role)] = where.min()
            runs[-1]["rms"] = rms
            runs[-1]["final_rms"] = spread(shape.family.norm, entered[anatomy.final_norm(model)])[
                begin:
            ].min()
            runs[-1]["state"] = np.linalg.norm(reads[-1], axis=-1).max(-1)
        gaps.append(
            [np.linalg.norm((a - b)[:, head:begin], axis=-1) for a, b in combinations(reads, 2)]
        )
    for handle in handles:
        handle.remove()
    found = {
        name: np.max([run[name] for run in runs], axis=0)
        for name in ("logit", "query", "key", "beta", "state", "scaling")
    }
    found |= {
        name: np.mean([run[name] for run in runs], axis=0) for name in ("share", "first", "peak")
    }
    found |= {name: np.min([run[name] for run in runs], axis=0) for name in ("rms", "final_rms")}
    by_layer = np.moveaxis(np.array(gaps[0]), 1, 0)  # the prompt does not hear its continuation
    windowed = np.array([w is not None for w in shape.windows])[:, None]
    found["gap"] = np.where(windowed, by_layer.max(-1), by_layer.mean(-1))
    found["opening"] = by_layer[..., 0]
    return found


def spread(kind: str, x: torch.Tensor) -> NDArray[np.float64]:
    """Rms or deviation at every position, (positions, …)."""
    x = x[0] if x.ndim > 2 else x
    values = x.numpy()
    values = values - values.mean(-1, keepdims=True) if kind == "LayerNorm" else values
    found: NDArray[np.float64] = np.sqrt((values**2).mean(-1))
    return found


def _one_run(shape: anatomy.Anatomy, calls: Any, begin: int, head: int) -> dict[str, Any]:
    """Of one run, what its attention shows, by layer and head."""
    run: dict[str, list[Any]] = {
        name: [] for name in ("logit", "query", "key", "beta", "share", "first", "peak", "scaling")
    }
    for call, window in zip(calls, shape.windows, strict=True):
        q, k, a = (x[0].numpy() for x in (call.query, call.key, call.weights))
        k = np.repeat(k, len(q) // len(k), axis=0)
        s = call.scaling * q @ np.swapaxes(k, 1, 2)
        s = s if call.softcap is None else call.softcap * np.tanh(s / call.softcap)
        i, j = np.indices(s.shape[1:])
        seen = (j <= i) & ((i - j < window) if window is not None else True)
        assert (a[:, ~seen] == 0).all()
        np.testing.assert_allclose(  # the logits are those of the model's own weights
            a, np.where(seen, np.exp(s), 0) / np.where(seen, np.exp(s), 0).sum(-1, keepdims=True),
            atol=1e-6,
        )  # fmt: skip
        a, s, seen = a[:, begin:], s[:, begin:], seen[begin:]
        n = P + np.arange(1, T + 1)
        share = a[..., head:begin].sum(-1)
        largest = a[..., head:].max(-1) if window is None else share / P
        run["logit"].append(np.abs(s[:, seen]).max(-1))
        run["query"].append(np.linalg.norm(q[:, begin:], axis=-1).max(-1))
        run["key"].append(np.linalg.norm(k, axis=-1).max(-1))
        run["beta"].append((n * largest).max(-1))
        run["share"].append(share)
        run["first"].append(a[..., 0])
        run["peak"].append(a[..., head:].max(-1))
        run["scaling"].append(call.scaling)
    return {name: np.array(values) for name, values in run.items()}


@cache
def reference(name: str, bos: bool) -> dict[str, NDArray[np.float64]]:
    return by_hand(network(name), bos)


@cache
def report(name: str, bos: bool, chunk: int = 1 + P) -> xr.Dataset:
    found = inspect(watched(name, bos), PROMPTS, CONTINUATIONS, chunk=chunk)
    assert found.attrs["bos"] == bos
    return found


def watched(name: str, bos: bool) -> Subject:
    return wrap(network(name), bos=0 if bos else None)


@pytest.mark.parametrize("bos", [False, True], ids=["plain", "bos"])
@every_network
def test_readings_equal_those_of_eager_attention(name: str, bos: bool) -> None:
    found, expected = report(name, bos), reference(name, bos)
    for variable in ("logit", "beta", "share", "first", "peak", "state", "final_rms"):
        # float32 against float64, three blocks deep
        np.testing.assert_allclose(
            found[variable], expected[variable], rtol=1e-4, atol=1e-6, err_msg=variable
        )
    rms = np.where(np.isinf(expected["rms"]), np.nan, expected["rms"])
    np.testing.assert_allclose(found.rms, rms, rtol=1e-4)
    assert list(found.norm.values) == [
        "attention", "mlp", "after attention", "after mlp", "query", "key"
    ]  # fmt: skip


@pytest.mark.parametrize("bos", [False, True], ids=["plain", "bos"])
@every_network
def test_constants_are_made_of_the_readings_and_the_weights(name: str, bos: bool) -> None:
    """By plain singular values of explicit products, and the formulas of the proof."""
    found, seen = report(name, bos), reference(name, bos)
    model = network(name, dtype=torch.float64)
    shape = anatomy.describe(model.config)
    group = shape.heads // shape.kv_heads
    for layer, (named, (query, key, value, writer)) in enumerate(
        zip(anatomy.norms(model), anatomy.projections(model), strict=True)
    ):
        one = found.isel(layer=layer)
        nu = {
            role: float(anatomy.gain(model, norm)[0].abs().max())
            / np.sqrt(
                seen["rms"][layer][list(found.norm.values).index(role)] ** 2
                + anatomy.gain(model, norm)[2]
            )
            for role, norm in named.items()
        }
        for role in found.norm.values:
            if role in nu:
                assert float(one.nu.sel(norm=role)) == pytest.approx(nu[role], rel=1e-4)
            else:
                assert np.isnan(one.nu.sel(norm=role))
        sigma = float(seen["scaling"][layer])
        for h in range(shape.heads):
            at = one.isel(head=h)
            g = h // group
            q, k = float(seen["query"][layer, h]), float(seen["key"][layer, h])
            w_q, w_k = size(query.weight[h]), size(key.weight[g])
            assert float(at.gamma) == pytest.approx(size(writer[h] @ value.weight[g]), rel=1e-9)
            assert float(at.query_norm) == pytest.approx(w_q, rel=1e-6)  # OPT scales in float32
            assert float(at.key_norm) == pytest.approx(w_k, rel=1e-9)
            moved = max(w_q * nu.get("query", 1) * k, w_k * nu.get("key", 1) * q)
            chi = float(seen["state"][layer]) * sigma * moved
            assert float(at.chi) == pytest.approx(chi, rel=1e-3)
            allowed = min(sigma * q * k, shape.softcap or np.inf)
            assert float(at.logit_bound) == pytest.approx(allowed, rel=1e-4)
        np.testing.assert_allclose(one.difference, seen["gap"][layer] / nu["attention"], rtol=1e-4)
        opening = seen["opening"][layer] / nu["attention"]
        np.testing.assert_allclose(one.opening, opening, rtol=1e-4)
    gain, _, epsilon = anatomy.gain(model, anatomy.final_norm(model))
    final = float(gain.abs().max()) / np.sqrt(float(seen["final_rms"]) ** 2 + epsilon)
    longest = float(model.get_output_embeddings().weight.norm(dim=1).max())
    assert float(found.final_nu) == pytest.approx(final, rel=1e-4)
    assert float(found.kappa) == pytest.approx(final * longest, rel=1e-4)


def size(matrix: torch.Tensor) -> float:
    return float(np.linalg.svd(matrix.numpy(), compute_uv=False)[0])


@every_network
def test_no_reading_depends_on_the_chunks(name: str) -> None:
    """Chunks of one token, that end with the prompt, and the whole."""
    whole = report(name, True, chunk=1 + P + T)
    for chunk in (1, 1 + P):
        cut = report(name, True, chunk=chunk)
        assert cut.attrs == whole.attrs
        for variable in whole.data_vars:
            np.testing.assert_allclose(
                cut[variable], whole[variable], rtol=1e-4, atol=1e-6, err_msg=str(variable)
            )


@every_network
def test_largest_logits_keep_to_what_texts_and_weights_allow(name: str) -> None:
    found = report(name, bos=True)
    assert (found.logit > 0).all()
    assert (found.logit <= found.logit_bound * (1 + 1e-5)).all()
    assert (found.logit_bound <= found.logit_ceiling * (1 + 1e-5)).all()


@every_network
def test_mlps_are_bounded_on_the_range_that_was_read(name: str) -> None:
    """Both ends of it occur, on the continuation; the prompt's may lie outside."""
    model = network(name)
    family = anatomy.describe(model.config).family
    watch = Watch(wrap(model), K, 0, P, T)
    ids = tokens(bos=False)
    with watch.installed():
        states(model, ids, 7, watch)
    seen = watch.result(1)
    read = []
    for path in family.readers:
        modules = [block.get_submodule(path) for block in anatomy.blocks(model)]
        whole = torch.stack(outputs(modules, lambda: model(ids)))
        read.append(whole.view(3, K, P + T, -1)[:, :, P:].flatten(1).numpy())
    low, high, up = read[0].min(1), read[0].max(1), np.abs(read[-1]).max(1)
    np.testing.assert_allclose(seen["low"], low, rtol=1e-4)
    np.testing.assert_allclose(seen["high"], high, rtol=1e-4)
    if len(read) == 2:
        np.testing.assert_allclose(seen["up"], up, rtol=1e-4)
    first = Texts(CONTINUATIONS.ids[:1], CONTINUATIONS.names[:1], "text")
    mu = [
        operators.lipschitz_of_mlp(family, block, *ends)
        for block, *ends in zip(anatomy.blocks(model), low, high, up, strict=True)
    ]
    np.testing.assert_allclose(inspect(wrap(model), PROMPTS, first).mu, mu, rtol=1e-4)


def test_no_more_attention_exists_than_one_layers_one_groups_and_one_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []
    read = Watch._read_attention

    def note(self: Watch, group: Group) -> None:
        shapes.append(tuple(group.weights.shape))
        assert group.logits.shape == group.weights.shape
        read(self, group)

    monkeypatch.setattr(Watch, "_read_attention", note)
    inspect(watched("llama", False), PROMPTS, CONTINUATIONS, chunk=5)  # 4 heads on 2 key heads
    longest = P + T
    assert {shape[:2] for shape in shapes} == {(K, 2)}
    assert max(shape[2] for shape in shapes) == 5
    assert max(shape[3] for shape in shapes) == longest
