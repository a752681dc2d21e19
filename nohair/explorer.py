"""The relay explorer: a reader moves the model's parameters and sees D(t), α(t) and α.

Every number is from `nohair.theory.bias` and `nohair.decay`, computed on a grid beforehand; the
page's JavaScript looks numbers up and shows them. Bokeh comes with the site: `nohair.book.offline`.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import xarray as xr
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, Range1d
from bokeh.models.annotations import BoxAnnotation, Span
from bokeh.plotting import figure as panel
from IPython.display import HTML
from numpy.typing import NDArray

from nohair import decay
from nohair.errors import Refused
from nohair.plots import INK, REFERENCE, TRAINED, UNTRAINED
from nohair.theory import bias

# Of each control: what a sentence says before its value, and its label.
CONTROLS = {
    "layers": ("L = ", "L, layers"),
    "gain": ("g = ", "g, gain"),
    "prompt_tokens": ("P = ", "P, prompt tokens"),
    "strength": ("λ = ", "λ, bias strength"),
    "states": ("prompt states ", "prompt states"),
    "start": ("from ", "window from t"),
    "end": ("to ", "window to t"),
}
SHORTEST = 4  # a window ends at this many times its start, or later
SHOWN, FITTED = 4, 24  # positions per octave; at 24 an α is within 0.003 of a fit to every t
STEP = 1e-3  # of the integers that are shipped: log10 D to 0.12 %, exponents to 0.0005

_SOLID, _DASHED, _DOTTED = (
    {"line_color": colour, "line_dash": dash, "line_width": 2.2}
    for colour, dash in ((TRAINED, "solid"), (UNTRAINED, "dashed"), (REFERENCE, "dotted"))
)


def tabulate(
    layers: Sequence[int] = (1, 2, 4, 6, 8, 12, 16, 24, 32),
    gain: Sequence[float] = (0.125, 0.25, 0.5, 1.0, 2.0),
    prompt_tokens: Sequence[int] = (8, 32, 128, 512),
    strength: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25),
    states: Sequence[Literal["fixed", "evolving"]] = ("fixed", "evolving"),
    starts: Sequence[int] = (4, 16, 64, 256, 1024, 4096, 16_384),
    ends: Sequence[int] = (16, 64, 256, 1024, 4096, 16_384, 65_536),
) -> xr.Dataset:
    """Compute everything that the figure can show.

    Parameters
    ----------
    layers, gain, prompt_tokens, strength, states
        The settings: every combination is computed, as by `nohair.theory.bias.distance`.
    starts, ends
        First and last positions of the windows, each increasing; the last end is the horizon.

    Returns
    -------
    xarray.Dataset
        Over the settings: ``distance`` after the last layer at log-spaced ``t``; ``local``, the
        local exponent, at the positions ``middle``; ``alpha`` of the window (start, end), nan where
        it is too short.

    Raises
    ------
    Refused
        A start has no end, or an end no start, that makes a window; or a setting is refused.
    """
    for name, values in (("starts", starts), ("ends", ends)):
        if not len(values) or (np.diff(values) <= 0).any():
            raise Refused(f"{name} = {tuple(values)}: give increasing positions, at least one")
    if min(ends) < SHORTEST * min(starts) or max(ends) < SHORTEST * max(starts):
        raise Refused(
            f"starts = {tuple(starts)}, ends = {tuple(ends)}: give each start an end, and each end "
            f"a start, {SHORTEST} times as far"
        )
    t, fitted = (_spaced(density, starts, ends) for density in (SHOWN, FITTED))
    wide = np.array(ends) >= SHORTEST * np.array(starts)[:, None]
    distances, exponents, windows = [], [], []
    middle = np.empty(0)
    for g, p, lam, state in product(gain, prompt_tokens, strength, states):
        deep = bias.distance(ends[-1], max(layers), p, g, lam, prompt_states=state)
        for curve in deep[np.array(layers) - 1]:
            distances.append(curve[t - 1])
            middle, exponent = decay.local_exponent(fitted, curve[fitted - 1])
            exponents.append(exponent)
            windows.append(decay.window_grid(fitted, curve[fitted - 1], starts, ends))
    coords: dict[str, list[Any]] = {
        "gain": list(gain),
        "prompt_tokens": list(prompt_tokens),
        "strength": list(strength),
        "states": list(states),
        "layers": list(layers),
    }
    shape = [len(values) for values in coords.values()]

    def over(values: list[NDArray[np.float64]], *dims: str) -> tuple[list[str], Any]:
        return [*coords, *dims], np.reshape(values, (*shape, *values[0].shape))

    table = xr.Dataset(
        {
            "distance": over(distances, "t"),
            "local": over(exponents, "middle"),
            "alpha": over([np.where(wide, grid, np.nan) for grid in windows], "start", "end"),
        },
        coords | {"t": t, "middle": middle, "start": list(starts), "end": list(ends)},
    )
    return table.transpose(*CONTROLS, "t", "middle")


def _spaced(per_octave: int, *needed: Sequence[int]) -> NDArray[np.int64]:
    """Log-spaced positions up to the last of those needed, all of which are among them."""
    last = max(map(max, needed))
    spaced = np.geomspace(1, last, round(per_octave * np.log2(last)) + 1)
    return np.unique(np.concatenate([spaced.round(), *needed]).astype(np.int64))


def figure(table: xr.Dataset, **shown: float | str) -> HTML:
    """Make the figure, a piece of HTML that is the same for the same table.

    Parameters
    ----------
    table
        From `tabulate`.
    **shown
        What is shown first, such as ``layers=12, start=16``: values on the grid. If not named,
        L, g and P start in the middle, λ and the states at their first, with the widest window.

    Raises
    ------
    Refused
        What is to be shown is not on the grid; the table holds numbers too large to ship.
    """
    first = dict.fromkeys(CONTROLS, 0) | {"end": table.sizes["end"] - 1}
    first |= {dim: table.sizes[dim] // 2 for dim in ("layers", "gain", "prompt_tokens")}
    for name, value in shown.items():
        if name not in CONTROLS or value not in (grid := table[name].to_numpy().tolist()):
            known = table[name].to_numpy().tolist() if name in CONTROLS else list(CONTROLS)
            raise Refused(f"{name} = {value} is not on the grid: choose from {known}")
        first[name] = grid.index(value)
    alpha = float(table.alpha.isel(first))
    if np.isnan(alpha):
        raise Refused(
            f"the window of {shown} is too short: end {SHORTEST} times the start or later"
        )
    labels = {dim: [_label(value) for value in table[dim].to_numpy().tolist()] for dim in CONTROLS}
    said = [CONTROLS[dim][0] + labels[dim][first[dim]] for dim in CONTROLS]
    payload = {
        "items": _panels(int(table.t[-1])),
        "labels": list(labels.values()),
        "starts": table.start.to_numpy().tolist(),
        "ends": table.end.to_numpy().tolist(),
        "t": table.t.to_numpy().tolist(),
        "middle": table.middle.to_numpy().round(2).tolist(),
        "rows": _packed(table),
    }
    return HTML(  # type: ignore[no-untyped-call]
        PAGE.format(
            controls="\n".join(_control(dim, labels[dim], first[dim]) for dim in CONTROLS),
            setting=", ".join(said[:-2]),
            alpha=f"{alpha:z.2f}".replace("-", "−"),
            window=" ".join(said[-2:]),
            payload=json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c"),
            script=SCRIPT.replace("SHORTEST", f"{SHORTEST}").replace("STEP", f"{STEP}"),
        )
    )


def _label(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.15g}"


def _control(dim: str, labels: Sequence[str], first: int) -> str:
    sign, name = CONTROLS[dim]
    if dim == "states":
        options = "".join(
            f'<option value="{i}"{" selected" if i == first else ""}>{label}</option>'
            for i, label in enumerate(labels)
        )
        return f'<label><span>{name}</span><select data-sign="{sign}">{options}</select></label>'
    return (  # the value in sight is the slider's aria-valuetext, and need not be said twice
        f'<label><span>{name} <b aria-hidden="true">{labels[first]}</b></span>'
        f'<input type="range" data-sign="{sign}" aria-valuetext="{labels[first]}" '
        f'min="0" max="{len(labels) - 1}" value="{first}"></label>'
    )


def _packed(table: xr.Dataset) -> str:
    """One row per setting, in steps of `STEP`: log10 D(t)/D(1), α(t), α of each window."""
    ratio = np.log10(table.distance / table.distance.isel(t=0))
    # α is shipped as it is printed; that of a window too short is never looked up.
    parts = ratio, table.local, table.alpha.round(2).fillna(0)
    settings = int(np.prod([table.sizes[dim] for dim in tuple(CONTROLS)[:-2]]))
    rows = np.hstack([part.to_numpy().reshape(settings, -1) for part in parts]) / STEP
    if not np.abs(rows).max() < 2**15:  # nor if there is a nan
        raise Refused("a distance or exponent does not fit 16 bits: leave the extreme settings out")
    return base64.b64encode(zlib.compress(rows.round().astype("<i2").tobytes(), 9)).decode()


def _panels(horizon: int) -> list[Any]:
    """Both plots as Bokeh's JSON, without data; ids are counted anew, so they never change."""
    ratio = _panel(horizon, "log", "distance D(t) / D(1)", {"D(t) / D(1)": _SOLID, "1/t": _DOTTED})
    looks = {"α(t)": _SOLID, "window's α": _DASHED}
    local = _panel(horizon, "linear", "local exponent α(t)", looks)
    local.line([1, horizon], [1, 1], legend_label="α = 1", **_DOTTED)
    local.add_layout(Span(dimension="width", location=0, line_color=INK, line_width=0.7))
    text = json.dumps([json_item(plot) for plot in (ratio, local)])
    ids: dict[str, str] = {}
    text = re.sub(r'"p\d+"', lambda id_: ids.setdefault(id_[0], f'"relay-{len(ids)}"'), text)
    return list(json.loads(text))


def _panel(horizon: int, scale: Any, label: str, looks: dict[str, dict[str, Any]]) -> Any:
    plot = panel(
        x_axis_type="log",
        y_axis_type=scale,
        x_range=Range1d(start=1, end=horizon),
        y_range=Range1d(start=0.1, end=10),
        x_axis_label="t, position in the continuation",
        y_axis_label=label,
        sizing_mode="stretch_both",
        tools="",
        toolbar_location=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    shade: dict[str, Any] = {"fill_color": REFERENCE, "fill_alpha": 0.12, "line_color": None}
    plot.add_layout(BoxAnnotation(name="window", left=1, right=1, **shade))
    for name, (legend, look) in zip(("curve", "rule"), looks.items(), strict=True):
        source = ColumnDataSource({"x": [], "y": []}, name=name)
        plot.line("x", "y", source=source, legend_label=legend, **look)
    plot.add_layout(plot.legend[0], "above")
    plot.legend.update(orientation="horizontal", location="left", spacing=12, padding=0, margin=4)
    plot.legend.update(border_line_color=None, background_fill_color=None, label_text_color=INK)
    plot.grid.grid_line_color = "#dfe1e3"
    plot.axis.axis_label_text_font_style = "normal"
    for text in ("axis_label_text_color", "major_label_text_color", "axis_line_color"):
        setattr(plot.axis, text, INK)
    plot.axis.minor_tick_line_color = None
    return plot


PAGE = """\
<div class="nohair-explorer" role="group" aria-label="Relay explorer">
<noscript><style>.nohair-explorer .absent {{ display: none }}</style>
<p>With JavaScript you can move the relay model's parameters here. The left panel shows the distance
D(t) against the position t on logarithmic axes, beside a line that falls as 1/t; the right panel
shows its local exponent α(t), beside α = 1, pure dilution. One setting:
{setting}: α = {alpha} over t {window}.</p></noscript>
<p class="absent">This figure needs the website: make book</p>
<div class="present" hidden>
<div class="panels" role="img" aria-label="Left: distance D(t) divided by D(1), against position t,
logarithmic axes, with the window shaded and 1/t dotted. Right: local exponent α(t), with the
window's α dashed and pure dilution, α = 1, dotted."><div inert></div><div inert></div></div>
<p class="result" aria-live="polite" aria-atomic="true"><span>{setting}:</span>
<strong>α = {alpha}</strong> <span>over t {window}</span></p>
<div class="controls">
{controls}
</div>
</div>
<script type="application/json">{payload}</script>
<script>
{script}
</script>
</div>
"""

SCRIPT = """\
{
  const root = document.currentScript?.parentElement;
  // Bokeh is deferred: it is there by then, if this page has it.
  addEventListener("DOMContentLoaded", async () => {
    if (!window.Bokeh) return;
    const find = (selector) => root.querySelector(selector);
    const data = JSON.parse(find("script").textContent);
    const { labels, starts, ends, t, middle } = data;
    const packed = Uint8Array.from(atob(data.rows), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const table = new Int16Array(await new Response(stream).arrayBuffer());
    const width = t.length + middle.length + starts.length * ends.length;

    find(".absent").hidden = true;
    find(".present").hidden = false;  // before Bokeh measures its place
    const plots = await Promise.all(data.items.map(async (item, i) => {
      const views = await Bokeh.embed.embed_item(item, find(".panels").children[i]);
      return views.roots[0].model;
    }));

    // An axis ends at low and high, or at the next whole step that leaves room for every value.
    const draw = (plot, x, y, span, rule, low, high, step, scale) => {
      const named = (name) => plot.document.get_model_by_name(name);
      const all = [...y, ...rule].map((value) => value / step);
      plot.y_range.setv({
        start: scale(Math.min(low, step * Math.floor(Math.min(...all)))),
        end: scale(Math.max(high, step * Math.ceil(Math.max(...all)))),
      });
      named("curve").data = { x, y: y.map(scale) };
      named("rule").data = { x: span, y: rule.map(scale) };
      named("window").setv({ left: span[0], right: span[1] });
    };

    const controls = [...root.querySelectorAll("input, select")];
    const [start, end] = controls.slice(-2);
    const show = (event) => {
      while (ends[end.value] < SHORTEST * starts[start.value]) {
        event?.target == end ? start.value-- : end.value++;
      }
      const at = controls.map((control) => Number(control.value));
      const values = at.map((i, c) => labels[c][i]);
      controls.filter((control) => control.type == "range").forEach((control) => {
        const value = values[controls.indexOf(control)];
        control.setAttribute("aria-valuetext", value);
        control.parentElement.querySelector("b").textContent = value;
      });
      const setting = at.slice(0, -2).reduce((sum, i, c) => sum * labels[c].length + i, 0);
      const row = [...table.subarray(setting * width, (setting + 1) * width)].map((n) => n * STEP);
      const height = row.splice(0, t.length);
      const local = row.splice(0, middle.length);
      const alpha = row[at.at(-2) * ends.length + at.at(-1)];
      const span = [starts[start.value], ends[end.value]];
      const from = height[t.indexOf(span[0])];
      const dilution = [from, from - Math.log10(span[1] / span[0])];
      draw(plots[0], t, height, span, dilution, -4, 2, 1, (value) => 10 ** value);
      draw(plots[1], middle, local, span, [alpha, alpha], -1, 1.5, 0.5, (value) => value);
      const signs = controls.map((control, c) => control.dataset.sign + values[c]);
      const [before, number, after] = find(".result").children;
      before.textContent = signs.slice(0, -2).join(", ") + ":";
      number.textContent = "α = " + alpha.toFixed(2).replace("-", "−");
      after.textContent = "over t " + signs.slice(-2).join(" ");
    };
    root.addEventListener("input", show);
    show();
  });
}"""
