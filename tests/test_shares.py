"""Shares of attention, against those read elsewhere and attention written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from refusals import refusal
from test_anatomy import attention_calls
from tiny_networks import CONTEXT, NETWORKS, rows, subject, texts

from nohair.lab import anatomy, attend, conditions, shares
from nohair.lab.models import Subject

P, T, K, C = 6, 23, 3, 2
PROMPTS = rows(K, P, seed=1)
CONTINUATIONS = rows(C, T, seed=2, kind="text")
NAMES = ("share", "sink", "rest")

every_network = pytest.mark.parametrize("name", NETWORKS)
both = pytest.mark.parametrize("bos", [None, 0], ids=["plain", "bos"])


def measured(whom: Subject, **options: Any) -> xr.Dataset:
    return shares.measure(whom, PROMPTS, CONTINUATIONS, **options)


@both
@every_network
def test_shares_are_those_that_inspect_reads(name: str, bos: int | None) -> None:
    whom = subject(name, bos=bos)
    found, read = measured(whom), conditions.inspect(whom, PROMPTS, CONTINUATIONS)
    np.testing.assert_allclose(found.share, read.share.transpose(*found.share.dims), atol=1e-6)
    np.testing.assert_allclose(found.sink, read["first"].transpose(*found.sink.dims), atol=1e-6)


@both
@every_network
def test_shares_and_others_are_those_of_attention_written_out_and_sum_to_one(
    name: str, bos: int | None
) -> None:
    """The model's own eager weights, one run at a time; windows included."""
    whom = subject(name, bos=bos)
    head, runs = int(bos is not None), []
    begin = head + P
    for prompt in PROMPTS.ids:
        for continuation in CONTINUATIONS.ids:
            with torch.no_grad(), attention_calls(whom.model) as calls:
                whom.model(torch.tensor([[0] * head + [*prompt, *continuation]]), use_cache=False)
            a = np.stack([call.weights[0].double().numpy()[:, begin:] for call in calls])
            keys = (slice(head, begin), slice(0, 1), slice(1, begin))
            runs.append([a[..., key].sum(-1) for key in (*keys, slice(begin, None))])
    share, sink, rest, others = np.mean(runs, axis=0)
    for chunk in (1, 5, begin, 512):
        found = measured(whom, chunk=chunk)
        np.testing.assert_allclose(found.share, share, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.sink, sink, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.rest, rest, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.sink + found.rest + others, 1, atol=1e-5)


@both
def test_rest_is_the_prompt_without_the_first_token(bos: int | None) -> None:
    found = measured(subject("llama", bos=bos))
    assert float(found.sink.min()) > 0
    expected = found.share if bos is not None else found.share - found.sink
    np.testing.assert_allclose(found.rest, expected, atol=1e-7)
    assert found.attrs["bos"] == int(bos is not None)


def test_bos_can_be_left_out() -> None:
    without = measured(subject("llama", bos=0), bos=False)
    for name in NAMES:
        np.testing.assert_array_equal(without[name], measured(subject("llama"))[name])


def test_shares_are_means_over_all_runs() -> None:
    whom = subject("gpt_neox")
    each = [
        shares.measure(whom, texts(prompt[None]), texts(continuation[None], "text"))
        for prompt in PROMPTS.ids
        for continuation in CONTINUATIONS.ids
    ]
    found = measured(whom)
    for name in NAMES:
        mean = np.mean([one[name] for one in each], axis=0)
        np.testing.assert_allclose(found[name], mean, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_a_window_that_is_past_the_prompt_leaves_it_nothing(chunk: int) -> None:
    found = measured(subject("mistral", sliding_window=4, bos=0), chunk=chunk)
    assert (found.share.sel(t=slice(1, 3)) > 0).all()
    assert (found.share.sel(t=slice(4, None)) == 0).all()
    assert (found.sink == 0).all()
    assert np.array_equal(found.rest, found.share)


def test_labels_and_provenance_say_what_was_measured() -> None:
    whom = subject("llama", bos=0)
    found = measured(whom)
    assert found.share.dims == ("layer", "head", "t")
    for name, size in (("layer", 3), ("head", 4), ("t", T)):
        assert found[name].to_numpy().tolist() == list(range(1, size + 1))
    assert found.attrs == whom.provenance | {
        "prompt_tokens": P,
        "horizon": T,
        "bos": 1,
        "prompts_sha256": PROMPTS.sha256,
        "continuations_sha256": CONTINUATIONS.sha256,
    }


def test_no_more_attention_exists_than_one_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, whole = [], attend.observed

    def noted(whom: Subject, read: Any) -> Any:
        def note(group: attend.Group) -> None:
            shapes.append(tuple(group.weights.shape))
            read(group)

        return whole(whom, note)

    monkeypatch.setattr(attend, "observed", noted)
    measured(subject("llama"), chunk=5)  # 4 heads on 2 key heads
    assert tuple(np.max(shapes, axis=0)) == (K, 2, 5, P + T)


@pytest.mark.parametrize(
    ("prompts", "continuations", "options", "said"),
    [
        (PROMPTS, rows(1, CONTEXT, seed=3), {}, f"llama has {CONTEXT} positions"),
        (PROMPTS, texts(CONTINUATIONS.ids[:0]), {}, "C = 0"),
        (PROMPTS, texts(CONTINUATIONS.ids[:, :0]), {}, "T = 0"),
        (texts(PROMPTS.ids[:, :0]), CONTINUATIONS, {}, "P = 0"),
        (texts(PROMPTS.ids[:0]), CONTINUATIONS, {}, "K = 0"),
        (PROMPTS, CONTINUATIONS, {"chunk": 0}, "chunk 0"),
    ],
)
def test_what_has_no_share_is_refused(
    prompts: Any, continuations: Any, options: dict[str, Any], said: str
) -> None:
    whom = subject("llama")
    assert said in refusal(lambda: shares.measure(whom, prompts, continuations, **options))


# How fast the competitors of a share grow

THETAS = np.array([0.4, 1.0, -0.3])
WINDOW = (4, 256)


def planted(exponents: Any, scale: float = 3.0) -> xr.DataArray:
    """π = 1 / (1 + c t^θ), by layer."""
    t = np.arange(1, 257)
    values = 1 / (1 + scale * t ** np.asarray(exponents, float)[:, None])
    coords = {"layer": np.arange(1, 1 + len(values)), "t": t}
    return xr.DataArray(values, coords, ("layer", "t"))


@pytest.mark.parametrize("scale", [0.01, 3.0, 1e4])
def test_a_planted_theta_is_found_in_every_layer(scale: float) -> None:
    # what 1 - π leaves of its digits where it is small
    np.testing.assert_allclose(shares.theta(planted(THETAS, scale), WINDOW), THETAS, atol=1e-9)


@pytest.mark.parametrize("strength", [0.5, 1.3, -0.2])
def test_a_share_under_a_bias_gives_the_theta_that_the_bias_works_against(strength: float) -> None:
    under = planted(THETAS - strength)  # the bias takes λ off the competitors' exponent
    found = shares.theta(under, WINDOW, strength)
    np.testing.assert_allclose(found, THETAS, atol=1e-9)
    np.testing.assert_array_equal(under[:, -1] > under[:, 0], strength > found)


def test_theta_is_read_within_the_window_alone() -> None:
    early, late = planted([0.2]), planted([0.9])
    share = early.where(early.t < 32, late)
    assert shares.theta(share, (1, 31)) == pytest.approx([0.2], abs=1e-9)
    assert shares.theta(share, (32, 256)) == pytest.approx([0.9], abs=1e-9)


def test_uniform_attention_has_theta_one() -> None:
    """Every key counts the same: all that follows the prompt competes, and it grows like t."""
    whom = subject("llama")
    for block in anatomy.blocks(whom.model):
        block.get_submodule("self_attn.q_proj").weight.zero_()
    found = measured(whom).share.mean("head")
    np.testing.assert_allclose(shares.theta(found, (2, T)), 1, atol=1e-5)  # float32 shares


@pytest.mark.parametrize("window", [(4, 257), (0, 16), (16, 4), (4,)])
def test_a_window_outside_the_share_is_refused(window: tuple[int, ...]) -> None:
    assert "window" in refusal(lambda: shares.theta(planted(THETAS), window))
