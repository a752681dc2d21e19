"""The interactive figure holds the library's numbers, and the same HTML for the same table."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bokeh.plotting import figure as another_plot

from nohair import decay, explorer
from nohair.errors import Refused
from nohair.theory import bias

SMALL: dict[str, Any] = {
    "layers": (1, 3),
    "gain": (0.5, 1.0),
    "prompt_tokens": (8,),
    "strength": (0.0, 0.5),
    "starts": (4, 16),
    "ends": (64, 256),
}


@pytest.fixture(scope="module")
def table() -> xr.Dataset:
    return explorer.tabulate(**SMALL)


def payload(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', html)
    assert found
    return dict(json.loads(found[1]))


def test_distances_are_those_of_the_theory(table: xr.Dataset) -> None:
    for gain, strength, states in ((0.5, 0.0, "fixed"), (1.0, 0.5, "evolving")):
        theory = bias.distance(256, 3, 8, gain, strength, prompt_states=states)
        shown = table.distance.sel(gain=gain, prompt_tokens=8, strength=strength, states=states)
        for layers in (1, 3):
            at = table.t.to_numpy() - 1
            np.testing.assert_array_equal(shown.sel(layers=layers), theory[layers - 1, at])


@pytest.mark.parametrize(
    ("layers", "gain", "strength"), [(1, 0.5, 0.0), (8, 0.5, 0.25), (16, 1, 0.25)]
)
@pytest.mark.parametrize("states", ["fixed", "evolving"])
def test_exponents_are_those_of_a_fit_to_every_position(
    layers: int, gain: float, strength: float, states: Any
) -> None:
    starts, ends = (4, 16, 1024), (64, 4096, 16_384)
    made = explorer.tabulate((layers,), (gain,), (32,), (strength,), (states,), starts, ends)
    one = made.isel(layers=0, gain=0, prompt_tokens=0, strength=0, states=0)
    curve = bias.distance(16_384, layers, 32, gain, strength, prompt_states=states)[-1]
    t = np.arange(1, 16_385)
    for start in starts:
        for end in ends:
            alpha = float(one.alpha.sel(start=start, end=end))
            if end < 4 * start:
                assert np.isnan(alpha)
            else:
                assert alpha == pytest.approx(decay.fit(t, curve, (start, end)).alpha, abs=0.003)
    middle, exponent = decay.local_exponent(t, curve)
    shown = np.interp(np.log(middle), np.log(one.middle), one.local)
    # The first point lacks the neighbourhood that the others have.
    assert np.abs(shown - exponent)[1:-1].max() < 0.005


def test_what_is_shipped_is_the_table_to_the_promised_digits(table: xr.Dataset) -> None:
    shipped = payload(explorer.figure(table).data)
    rows = np.frombuffer(zlib.decompress(base64.b64decode(shipped["rows"])), "<i2") / 1000
    rows = rows.reshape(16, -1)
    n, m = table.sizes["t"], table.sizes["middle"]
    ratio = (table.distance / table.distance.isel(t=0)).to_numpy().reshape(16, -1)
    assert np.abs(10 ** rows[:, :n] / ratio - 1).max() < 0.0012
    assert np.abs(rows[:, n : n + m] - table.local.to_numpy().reshape(16, -1)).max() < 0.00051
    np.testing.assert_allclose(rows[:, n + m :], table.alpha.to_numpy().reshape(16, -1).round(2))
    assert shipped["labels"][0] == ["1", "3"]
    assert shipped["labels"][-1] == ["64", "256"]


def test_the_sentence_without_javascript_names_the_setting(table: xr.Dataset) -> None:
    html = explorer.figure(table, layers=1, gain=0.5, states="evolving", start=16, end=256).data
    alpha = float(
        table.alpha.isel(layers=0, gain=0, prompt_tokens=0, strength=0).sel(
            states="evolving", start=16, end=256
        )
    )
    still = html.split("<noscript>")[1].split("</noscript>")[0]
    said = "L = 1, g = 0.5, P = 8, λ = 0, prompt states evolving"
    assert f"{said}: α = {alpha:.2f} over t from 16 to 256." in still


def test_the_html_is_the_same_whatever_was_drawn_before(table: xr.Dataset) -> None:
    first = explorer.figure(table).data
    another_plot().line([1, 2], [1, 2])
    assert explorer.figure(table).data == first


def test_the_html_is_the_same_in_another_process(table: xr.Dataset) -> None:
    code = (
        "import hashlib; from nohair import explorer; "
        f"html = explorer.figure(explorer.tabulate(**{SMALL!r})).data; "
        "print(hashlib.sha256(html.encode()).hexdigest())"
    )
    here = hashlib.sha256(explorer.figure(table).data.encode()).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert there.stdout.strip() == here


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"starts": (16, 4)}, r"starts = \(16, 4\): give increasing"),
        ({"ends": ()}, r"ends = \(\): give increasing"),
        ({"starts": (4, 128)}, "give each start an end"),
        ({"ends": (8, 256)}, "give each start an end"),
        ({"gain": (float("nan"),)}, "gain = nan"),
    ],
)
def test_a_grid_without_figure_is_refused(grid: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said) as refusal:
        explorer.tabulate(**SMALL | grid)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({"layers": 2}, r"layers = 2 is not on the grid: choose from \[1, 3\]"),
        ({"depth": 2}, r"depth = 2 is not on the grid: choose from \['layers'"),
    ],
)
def test_what_is_not_on_the_grid_cannot_be_shown(
    table: xr.Dataset, shown: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        explorer.figure(table, **shown)


def test_a_first_window_too_short_is_refused() -> None:
    made = explorer.tabulate(**SMALL | {"starts": (4, 32)})
    with pytest.raises(Refused, match="too short"):
        explorer.figure(made, start=32, end=64)


@pytest.mark.parametrize("value", [1e40, float("nan")])
def test_what_does_not_fit_16_bits_is_refused(table: xr.Dataset, value: float) -> None:
    spoilt = table.copy(deep=True)
    spoilt.distance[0, 0, 0, 0, 0, -1] = value
    with pytest.raises(Refused, match="16 bits"):
        explorer.figure(spoilt)
