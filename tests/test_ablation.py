"""Distances under a bias of several strengths, and the strength at which they stop falling."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan
from typing import Any

import numpy as np
import pytest
import xarray as xr
from refusals import refusal
from tiny_networks import rows, subject

from nohair import decay
from nohair.decay import Fit
from nohair.lab import ablation, bias, distances
from nohair.lab.models import Subject

P, T, START = 6, 23, 5.0
PROMPTS = rows(3, P, seed=1)
CONTINUATIONS = rows(2, T, seed=2, kind="text")
VARIABLES = ("distance", "norm", "floor")


def measured(whom: Subject, strengths: Any = (0.0, 1.0), **options: Any) -> xr.Dataset:
    return ablation.measure(
        whom, PROMPTS, CONTINUATIONS, strengths, START, progress=False, **options
    )


def plain(whom: Subject, bos: bool = True) -> xr.Dataset:
    return distances.measure(whom, PROMPTS, CONTINUATIONS, bos=bos, progress=False)


def assert_same(found: xr.Dataset, expected: xr.Dataset) -> None:
    """Bit for bit: the same passes were run."""
    for name in VARIABLES:
        xr.testing.assert_equal(found[name].drop_vars("strength"), expected[name])


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_no_strength_is_the_measurement_without_a_bias(name: str, bos: int | None) -> None:
    whom = subject(name, bos=bos)
    found = measured(whom)
    assert_same(found.sel(strength=0), plain(whom))
    assert not np.array_equal(found.distance.sel(strength=1), found.distance.sel(strength=0))


def test_strengths_stand_in_front_in_the_order_they_were_given() -> None:
    whom, strengths = subject("llama"), (1, 0, -0.5)
    found = measured(whom, strengths)
    assert found.strength.to_numpy().tolist() == list(strengths)
    for name in VARIABLES:
        assert found[name].dims == ("strength", *plain(whom)[name].dims)
    for strength in strengths:
        with bias.dilution_bias(whom, P, strength, START) as biased:
            assert_same(found.sel(strength=strength), plain(biased))


def test_what_all_strengths_share_is_kept_of_their_provenance() -> None:
    expected = plain(subject("llama")).attrs
    found = measured(subject("llama")).attrs
    assert "bias" not in found
    for name in ("model", "prompt_tokens", "horizon", "prompts_sha256", "continuations_sha256"):
        assert found[name] == expected[name]


@pytest.mark.parametrize("options", [{"layers": [1]}, {"onset": 9}, {"on_head": True}])
def test_options_are_those_of_the_bias(options: dict[str, Any]) -> None:
    whom = subject("llama", bos=0)
    found = measured(whom, (1.0,), **options).sel(strength=1)
    with bias.dilution_bias(whom, P, 1.0, START, **options) as biased:
        assert_same(found, plain(biased))
    assert not np.array_equal(found.distance, measured(whom, (1.0,)).distance.sel(strength=1))


def test_the_prompt_begins_at_once_where_no_first_token_is_wanted() -> None:
    whom = subject("llama", bos=0)
    found = measured(whom, (1.0,), bos=False).sel(strength=1)
    with bias.dilution_bias(whom, P, 1.0, START, head=0) as biased:
        assert_same(found, plain(biased, bos=False))


@pytest.mark.parametrize(
    ("strengths", "said"),
    [
        ((), "strengths = []"),
        ((0.0, 1.0, 1.0), "each once"),
        ((0, 0.0), "each once"),
        ((0.0, inf), "strength = inf"),
    ],
)
def test_strengths_that_are_no_row_are_refused(strengths: Any, said: str) -> None:
    assert said in refusal(lambda: measured(subject("llama"), strengths))


# Where the distance stops falling


def planted(*strengths: float, at: float = 1.0, half: float = 0.25) -> dict[float, Fit]:
    """α = at - λ, in an interval of α ± half."""
    t = np.arange(1, 65)
    fit = decay.fit(t, t**-0.5, (4, 64))
    return {x: replace(fit, alpha=at - x, low=at - x - half, high=at - x + half) for x in strengths}


@pytest.mark.parametrize(
    "strengths", [(0.0, 2.0), (0.0, 0.5, 0.75, 1.0, 1.5), (0.0, 0.6, 0.9, 1.1, 1.3)]
)
def test_a_straight_line_stops_where_it_crosses_zero(strengths: tuple[float, ...]) -> None:
    found = ablation.stopping(planted(*strengths))
    assert found == pytest.approx((1.0, 0.75, 1.25), abs=1e-12)


def test_between_strengths_the_exponent_is_a_straight_line() -> None:
    fits = planted(0.0) | {2.0: planted(4.0)[4.0]}  # α = 1 at 0 and -3 at 2
    assert ablation.stopping(fits)[0] == pytest.approx(0.5, abs=1e-12)


def test_the_first_crossing_is_the_one_that_counts() -> None:
    fits = planted(0.0, 2.0) | {3.0: planted(0.0)[0.0], 5.0: planted(2.0)[2.0]}  # 1, -1, 1, -1
    assert ablation.stopping(fits) == pytest.approx((1.0, 0.75, 1.25), abs=1e-12)


def test_what_no_strength_reaches_is_not_a_number() -> None:
    assert all(map(isnan, ablation.stopping(planted(0.0, 0.5))))
    middle, low, high = ablation.stopping(planted(0.0, 0.5, 1.1))
    assert (middle, low) == pytest.approx((1.0, 0.75), abs=1e-12)
    assert isnan(high)


def test_what_has_stopped_already_stops_at_the_first_strength() -> None:
    assert ablation.stopping(planted(0.5, 1.0, at=0.2)) == (0.5, 0.5, 0.5)
    assert ablation.stopping(planted(0.5, 1.0, at=0.5))[0] == 0.5  # α is zero there
