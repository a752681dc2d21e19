"""Pictures of measurements: each function takes data and an axis and returns the axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MaxNLocator, SymmetricalLogLocator
from matplotlib_inline.backend_inline import set_matplotlib_formats
from numpy.typing import ArrayLike
from xarray import DataArray

from nohair.claims import Claim
from nohair.decay import ABOVE_FLOOR, Comparison, Fit

# Okabe and Ito's colours, told apart by every common kind of colour vision.
TRAINED, UNTRAINED, CONTROL, THIRD = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK, PAPER, REFERENCE = "#20262d", "#fcfcfa", "#646c75"
# Subjects and stages, in the order in which a figure names them.
COLOURS, MARKS = (TRAINED, UNTRAINED, CONTROL, THIRD, INK), "osD^v"
METRIC_LABELS = {
    "l2": "distance D",
    "relative": "relative distance",
    "angle": "angle between states",
}


def use() -> None:
    """Switch to the book's style, and notebooks to SVG that is the same for the same data."""
    plt.style.use(Path(__file__).with_name("book.mplstyle"))
    set_matplotlib_formats("svg", metadata={"Date": None})


def one_legend(figure: Figure, ncols: int = 2) -> None:
    """Replace the legends of all panels by one below them, each name once."""
    named: dict[str, Artist] = {}
    for ax in figure.axes:
        handles, names = ax.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
        if (own := ax.get_legend()) is not None:
            own.remove()
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=ncols)


def layer_colour(layer: int, layers: int) -> Any:
    """Colour of a block: dark for early ones, light for late ones, readable on paper."""
    return mpl.colormaps["viridis"](Normalize(1, max(layers, 2))(layer) * 0.85)


def experiment(ax: Axes, prompts: int, prompt_tokens: int, horizon: int) -> Axes:
    """Draw the design: different prompts, one continuation, distances between states."""
    rows = [(2.2, "prompt A", TRAINED), (1.0, "prompt B", UNTRAINED)]
    for y, name, colour in rows:
        _box(ax, 0.0, y, 2.5, colour, f"{name}\nP = {prompt_tokens} tokens", "white")
        _box(ax, 2.65, y, 5.2, "#e8eaec", f"the same continuation, t = 1 … {horizon}", INK)
    for x in (3.2, 4.6, 6.0, 7.4):
        ax.annotate("", (x, 1.78), (x, 2.18), arrowprops={"arrowstyle": "<->", "color": INK})
    ax.text(3.95, 1.98, "D(layer, t)", va="center", ha="center", fontsize=9.5, style="italic")
    ax.text(0.0, 0.55, f"{prompts} prompts give {prompts * (prompts - 1) // 2} pairs", fontsize=9.5)
    ax.set(xlim=(-0.1, 8.0), ylim=(0.3, 3.1))
    ax.axis("off")
    return ax


def _box(ax: Axes, x: float, y: float, width: float, face: str, text: str, ink: str) -> None:
    style = "round,pad=0,rounding_size=0.12"
    ax.add_patch(FancyBboxPatch((x, y), width, 0.75, boxstyle=style, facecolor=face, linewidth=0))
    ax.text(x + width / 2, y + 0.375, text, ha="center", va="center", color=ink, fontsize=9.5)


def curves(ax: Axes, mean: DataArray, every: int = 4, title: str = "") -> Axes:
    """Draw D(t), log-log, at every `every`-th block and after the final norm.

    Parameters
    ----------
    ax
        Where to.
    mean
        Mean distance (layer, t) with the coordinates ``floor`` and ``site``.
    every
        Which blocks: the first, then each `every`-th, and always the last.
    title
        Above the axis.
    """
    t = mean.t.to_numpy()
    shown = np.unique(np.geomspace(1, t[-1], 160).round().astype(int)) - 1  # log-spaced
    blocks, final = mean.sel(layer=mean.site == "block"), mean.sel(layer=mean.site == "final")
    layers = blocks.sizes["layer"]
    for layer in sorted({1, *range(every, layers + 1, every), layers}):
        label = f"block {layer}" if layer in (1, layers) else None
        colour = layer_colour(layer, layers)
        ax.loglog(t[shown], blocks.sel(layer=layer)[shown], color=colour, lw=1.2, label=label)
    ax.loglog(t[shown], final[0, shown], color=INK, ls=(0, (5, 1.5)), lw=1.6, label="final norm")
    floor, lowest = ABOVE_FLOOR * mean.floor.to_numpy(), float(mean.where(mean > 0).min())
    if (floor > 0).any():
        low, high = floor[floor > 0].min(), floor.max()
        label = f"{ABOVE_FLOOR:g} × floor, at most {high:.0e}"
        ax.axhspan(low, high, color=THIRD, alpha=0.3, lw=0, label=label)
    ax.set_ylim(bottom=lowest / 30)  # a floor far below is named, not shown
    late = t[len(t) // 8 :]
    reference = 1.5 * float(blocks[0, len(t) // 8]) * late[0] / late
    ax.loglog(late, reference, color=REFERENCE, ls=":", label="1/t")
    label = METRIC_LABELS[mean.attrs.get("metric", "l2")]
    ax.set(xlabel="t, position in the continuation", ylabel=label, title=title)
    ax.legend(ncols=2)
    return ax


def pair(ax: Axes, means: Mapping[str, DataArray], window: tuple[float, float]) -> Axes:
    """Draw D(t) of one site for a few subjects, by name, with 1/t and the window shaded."""
    for (name, mean), colour in zip(means.items(), (TRAINED, UNTRAINED, CONTROL), strict=False):
        ax.loglog(mean.t, mean, color=colour, label=name)
    first = next(iter(means.values()))
    late = first.t[first.t >= window[0]]
    reference = float(first.sel(t=late[0])) * float(late[0]) / late
    ax.loglog(late, reference, color=REFERENCE, ls=":", label="pure dilution, 1/t")
    ax.axvspan(*window, color=REFERENCE, alpha=0.08, lw=0)
    ax.set(xlabel="t, position in the continuation", ylabel="distance D after the final norm")
    ax.legend(loc="lower left")
    return ax


def alphas(ax: Axes, profiles: Mapping[str, Sequence[Fit]], claims: Sequence[Claim] = ()) -> Axes:
    """Draw α against depth with intervals; the last point of each profile is the final norm.

    Parameters
    ----------
    ax
        Where to.
    profiles
        A list of fits, block by block and then the final norm, by name.
    claims
        Reported ranges to shade.
    """
    shades = (TRAINED, UNTRAINED)
    for claim, shade in zip(claims, shades, strict=False):
        assert claim.low is not None
        assert claim.high is not None
        ax.axhspan(claim.low, claim.high, color=shade, alpha=0.13, lw=0)
        text = f"{claim.text.lower()}, as reported"
        end = max(map(len, profiles.values())) + 0.6
        ax.text(end, claim.high, text, va="top", ha="right", fontsize=8.5, color=shade)
    for (name, fits), colour, mark in zip(
        profiles.items(), (TRAINED, UNTRAINED, CONTROL, THIRD, INK), "osD^v", strict=False
    ):
        alpha, low, high = np.array([(f.alpha, f.low, f.high) for f in fits]).T
        depth = np.arange(1, len(fits) + 1)
        ax.fill_between(depth[:-1], low[:-1], high[:-1], color=colour, alpha=0.22, lw=0)
        ax.plot(depth[:-1], alpha[:-1], color=colour, marker=mark, ms=3.4, label=name)
        error = [[alpha[-1] - low[-1]], [high[-1] - alpha[-1]]]
        ax.errorbar(depth[-1] + 0.6, alpha[-1], error, color=colour, marker=mark, ms=5, mfc=PAPER)
    ax.axhline(1, color=REFERENCE, ls=":")
    ax.text(1, 1.0, "pure dilution", va="bottom", fontsize=8.5, color=REFERENCE)
    ax.axhline(0, color=INK, lw=0.7)
    ax.set(xlabel="block (open mark: after the final norm)", ylabel="α")
    ax.set_ylim(top=max(1.3, ax.get_ylim()[1]))  # the legend lies above every curve
    ax.legend(loc="upper right", ncols=len(profiles))
    return ax


def local(
    ax: Axes,
    exponents: Mapping[str, tuple[ArrayLike, ArrayLike]],
    intervals: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]],
) -> Axes:
    """Draw local exponents, given as (t, α(t)) by name, over their intervals (t, low, high)."""
    colours = (TRAINED, INK, UNTRAINED, THIRD, CONTROL)
    for (name, (t, alpha)), colour in zip(exponents.items(), colours, strict=False):
        ax.fill_between(*intervals[name], color=colour, alpha=0.15, lw=0)
        ax.semilogx(t, alpha, color=colour, label=name)
    ax.axhline(1, color=REFERENCE, ls=":")
    ax.axhline(0, color=INK, lw=0.7)
    ax.set(xlabel="t, position in the continuation", ylabel="local exponent α(t)")
    ax.set_ylim(bottom=min(-0.5, ax.get_ylim()[0]))  # the legend lies below every curve
    ax.legend(loc="lower right", ncols=2)
    return ax


def rates(
    ax: Axes,
    measured: Mapping[str, tuple[ArrayLike, ArrayLike]],
    intervals: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]],
    laws: Mapping[str, tuple[ArrayLike, ArrayLike]],
) -> Axes:
    """Draw measured local exponents, by name, with known intervals, beside those of laws, dashed.

    Laws come in the order of the subjects they belong to; one more belongs to none.
    """
    for (name, (t, alpha)), colour in zip(measured.items(), (TRAINED, UNTRAINED), strict=False):
        if name in intervals:
            ax.fill_between(*intervals[name], color=colour, alpha=0.2, lw=0)
        ax.semilogx(t, alpha, color=colour, label=name)
    for (name, (t, alpha)), colour in zip(
        laws.items(), (TRAINED, UNTRAINED, REFERENCE), strict=False
    ):
        ax.semilogx(t, alpha, color=colour, ls="--", label=name)
    ax.axhline(1, color=REFERENCE, ls=":")
    ax.axhline(0, color=INK, lw=0.7)
    ax.set(xlabel="t, position in the continuation", ylabel="local exponent α(t)", ylim=(-6, 1.4))
    ax.legend(loc="lower right")
    return ax


def by_depth(ax: Axes, t: ArrayLike, rows: Mapping[int, ArrayLike], label: str) -> Axes:
    """Draw curves over log t, one for each depth L, dark for shallow and light for deep."""
    for order, (layers, row) in enumerate(rows.items(), start=1):
        colour = layer_colour(order, len(rows))
        ax.semilogx(t, np.asarray(row), color=colour, lw=1.4, label=f"L = {layers}")
    ax.set(xlabel="t, position in the continuation", ylabel=label)
    ax.legend(ncols=2)
    return ax


def lines(
    ax: Axes, series: Mapping[str, tuple[ArrayLike, ArrayLike]], x: str, y: str, skip: int = 0
) -> Axes:
    """Draw lines (x, y) by name, in pairs of one colour, solid and dashed; `skip` first colours."""
    for i, (name, (where, values)) in enumerate(series.items()):
        colour, style = COLOURS[(skip + i // 2) % len(COLOURS)], ("-", "--")[i % 2]
        ax.plot(where, values, color=colour, ls=style, label=name)
    ax.set(xlabel=x, ylabel=y)
    ax.legend()
    return ax


def training_axis(ax: Axes) -> Axes:
    """Let the horizontal axis count steps of training: by doublings, with room for step 0."""
    ax.set_xscale("symlog", linthresh=1, linscale=0.5, base=2)
    ax.xaxis.set_major_locator(SymmetricalLogLocator(base=8, linthresh=1))
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set(xlabel="step of training", xlim=(-0.2, None))
    return ax


def over_training(ax: Axes, series: Mapping[str, Mapping[int, Fit]], title: str = "") -> Axes:
    """Draw α with its interval against the step of training, by name."""
    for (name, fits), colour, mark in zip(series.items(), COLOURS, MARKS, strict=False):
        _band(ax, list(fits), list(fits.values()), colour, mark, name)
    ax.axhline(0, color=INK, lw=0.7)
    ax.axhline(1, color=REFERENCE, ls=":")
    ax.set(ylabel="α", title=title)
    ax.legend()
    return training_axis(ax)


def checkpoints(ax: Axes, rows: Mapping[int, DataArray], title: str = "") -> Axes:
    """Draw D(t), log-log, after one site at several steps of training, from dark to light."""
    for order, (step, row) in enumerate(rows.items(), start=1):
        t = row.t.to_numpy()
        shown = np.unique(np.geomspace(1, t[-1], 160).round().astype(int)) - 1  # log-spaced
        label = f"step {step}" if order in (1, (len(rows) + 1) // 2, len(rows)) else None
        colour = layer_colour(order, len(rows))
        ax.loglog(t[shown], row[shown], color=colour, lw=1.2, label=label)
    ax.set(xlabel="t, position in the continuation", ylabel="distance D", title=title)
    ax.legend(loc="lower left")
    return ax


def doses(
    ax: Axes,
    measured: Mapping[str, Mapping[float, Fit]],
    laws: Mapping[str, Mapping[float, float]],
    x: str,
    title: str = "",
) -> Axes:
    """Draw α against the size of an intervention: measured, with intervals, and laws, dashed."""
    for (name, fits), colour, mark in zip(measured.items(), COLOURS, MARKS, strict=False):
        _band(ax, list(fits), list(fits.values()), colour, mark, name)
    for (name, values), style in zip(laws.items(), ("--", ":", "-."), strict=False):
        ax.plot(list(values), list(values.values()), color=REFERENCE, ls=style, label=name)
    ax.axhline(0, color=INK, lw=0.7)
    ax.set(xlabel=x, ylabel="α", title=title)
    ax.legend()
    return ax


def _band(
    ax: Axes, x: Sequence[float], fits: Sequence[Fit], colour: str, mark: str, name: str
) -> None:
    alpha, low, high = np.array([(f.alpha, f.low, f.high) for f in fits]).T
    ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    ax.plot(x, alpha, color=colour, marker=mark, ms=3.6, label=name)


def signs(ax: Axes, groups: Mapping[str, tuple[ArrayLike, Sequence[Fit]]], x: str, y: str) -> Axes:
    """Scatter fits with their intervals over what should have their sign, by name."""
    for (name, (where, fits)), colour, mark in zip(groups.items(), COLOURS, MARKS, strict=False):
        alpha, low, high = np.array([(f.alpha, f.low, f.high) for f in fits]).T
        error = [alpha - low, high - alpha]
        ax.errorbar(
            where, alpha, error, color=colour, marker=mark, ms=4, ls="", elinewidth=0.8, label=name
        )
    ax.axhline(0, color=INK, lw=0.7)
    ax.axvline(0, color=INK, lw=0.7)
    ax.set(xlabel=x, ylabel=y)
    ax.legend()
    return ax


def agreement(
    ax: Axes, predicted: Mapping[str, ArrayLike], measured: Mapping[str, ArrayLike], title: str = ""
) -> Axes:
    """Draw predictions (layer,) as lines, and measurements (seed, layer) of that name as points.

    Names that are alike up to a comma share a colour; the last of them is solid with circles, those
    before it are dashed with squares.
    """
    kinds = [name.split(", ")[0] for name in predicted]
    for i, (name, line) in enumerate(predicted.items()):
        colour = (TRAINED, UNTRAINED, CONTROL, THIRD)[
            list(dict.fromkeys(kinds)).index(kinds[i]) % 4
        ]
        style, mark = ("--", "s") if kinds[i] in kinds[i + 1 :] else ("-", "o")
        depth = np.arange(1, np.size(line) + 1)
        ax.plot(depth, line, color=colour, ls=style, lw=1.2, label=name)
        for row in np.atleast_2d(measured[name]):
            ax.plot(depth, row, color=colour, ls="", marker=mark, ms=3.2, mfc=PAPER, mew=0.9)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.axhline(0, color=INK, lw=0.7)
    ax.set(xlabel="block", ylabel="α", title=title)
    ax.legend()
    return ax


def fitted(ax: Axes, measured: DataArray, rows: ArrayLike, every: int = 6, title: str = "") -> Axes:
    """Draw measured distances (layer, t) of a few blocks, and what was fitted, dashed."""
    t, layers = measured.t.to_numpy(), measured.sizes["layer"]
    shown = np.unique(np.geomspace(1, t[-1], 160).round().astype(int)) - 1  # log-spaced
    for layer in sorted({1, *range(every, layers + 1, every), layers}):
        colour = layer_colour(layer, layers)
        ax.loglog(
            t[shown], measured.sel(layer=layer)[shown], color=colour, label=f"block {layer}", lw=1.2
        )
        ax.loglog(t[shown], np.asarray(rows)[layer - 1, shown], color=INK, lw=0.9, ls=(0, (4, 2)))
    ax.plot([], [], color=INK, lw=0.9, ls=(0, (4, 2)), label="effective relay")
    ax.set(xlabel="t, position in the continuation", ylabel="distance D", title=title)
    ax.legend(loc="lower left")
    return ax


def by_block(
    ax: Axes,
    series: Mapping[str, ArrayLike],
    label: str,
    reference: Mapping[str, float] | None = None,
) -> Axes:
    """Draw quantities that each block has one of, log, by name; reference levels are dotted."""
    dashes = ("-", "--", ":")
    for i, (name, values) in enumerate(series.items()):
        colour = (TRAINED, UNTRAINED)[i % 2]
        values = np.asarray(values)
        depth = np.arange(1, len(values) + 1)
        ax.semilogy(depth, values, color=colour, ls=dashes[i // 2], lw=1.5, label=name)
    for name, level in (reference or {}).items():
        ax.axhline(level, color=REFERENCE, ls=":")
        ax.text(1, level, name, va="bottom", fontsize=8.5, color=REFERENCE)
    ax.set(xlabel="block", ylabel=label)
    ax.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def shares(
    ax: Axes, share: DataArray, first: DataArray, prompt_tokens: int, every: int = 6
) -> Axes:
    """Draw the prompt's share of attention against t, by block, with that of its first token.

    Parameters
    ----------
    ax
        Where to.
    share, first
        Of the prompt and of the sequence's first token (layer, t).
    prompt_tokens
        P; the dotted line is uniform attention, P/(P + t).
    every
        Which blocks: the first, then each `every`-th, and always the last.
    """
    t, layers = share.t.to_numpy(), share.sizes["layer"]
    shown = np.unique(np.geomspace(1, t[-1], 160).round().astype(int)) - 1  # log-spaced
    for layer in sorted({1, *range(every, layers + 1, every), layers}):
        colour, label = layer_colour(layer, layers), f"block {layer}"
        ax.loglog(t[shown], share.sel(layer=layer)[shown], color=colour, lw=1.2, label=label)
        ax.loglog(t[shown], first.sel(layer=layer)[shown], color=colour, lw=1.0, ls=(0, (3, 2)))
    uniform = prompt_tokens / (prompt_tokens + t)
    ax.loglog(t, uniform, color=REFERENCE, ls=":", label="uniform attention")
    ax.plot([], [], color=INK, lw=1.0, ls=(0, (3, 2)), label="first token alone")
    ax.set(xlabel="t, position in the continuation", ylabel="share of attention")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return ax


def magnitudes(ax: Axes, curves: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Axes:
    """Draw curves so far apart that the axis counts digits: (t, log10) by name, in pairs."""
    for i, (name, (t, exponent)) in enumerate(curves.items()):
        colour, style = (TRAINED, UNTRAINED)[i // 2 % 2], ("-", "--")[i % 2]
        ax.semilogx(t, exponent, color=colour, ls=style, label=name)
    ax.axhline(0, color=INK, lw=0.7)
    ax.set(xlabel="t, position in the continuation", ylabel="log₁₀ of the distance")
    ax.legend(loc="center left")
    return ax


def window_map(ax: Axes, starts: ArrayLike, ends: ArrayLike, grid: ArrayLike) -> Axes:
    """Draw α for every window as a heat map, each value written into its cell."""
    starts, ends, grid = np.asarray(starts), np.asarray(ends), np.asarray(grid)
    image = ax.imshow(grid, cmap="cividis", origin="lower", aspect="auto")
    middle = np.nanmean(image.get_clim())
    for (row, column), alpha in np.ndenumerate(grid):
        if np.isfinite(alpha):
            ink = "white" if alpha < middle else "black"
            ax.text(column, row, f"{alpha:.2f}", ha="center", va="center", color=ink, fontsize=9)
    ax.set_xticks(range(len(ends)), [f"{e:g}" for e in ends])
    ax.set_yticks(range(len(starts)), [f"{s:g}" for s in starts])
    ax.set(xlabel="window ends at t", ylabel="window starts at t")
    ax.grid(visible=False)
    ax.figure.colorbar(image, ax=ax, label="α")
    return ax


def forms(ax: Axes, comparison: Comparison) -> Axes:
    """Draw how far each form stays from the curve (rms of log D); undecided ones are filled."""
    rows = comparison.rows[::-1]
    for y, row in enumerate(rows):
        possible = row["form"] in comparison.undecided
        face = TRAINED if possible else PAPER
        ax.barh(y, float(row["rms"]), color=face, edgecolor=TRAINED, height=0.6)
    ax.set_yticks(range(len(rows)), [f"${row['formula']}$" for row in rows])
    ax.set(xlabel="rms distance from the curve, in log D (filled: not excluded)")
    ax.grid(visible=False, axis="y")
    return ax


def forest(ax: Axes, fits: Mapping[str, Fit], claim: Claim | None = None) -> Axes:
    """Draw one α with its interval per row, and a reported range to compare with."""
    if claim is not None:
        assert claim.low is not None
        assert claim.high is not None
        ax.axvspan(claim.low, claim.high, color=UNTRAINED, alpha=0.13, lw=0)
        text = f"{claim.text.lower()}, as reported"
        ax.text(claim.low, -0.85, text, fontsize=8.5, color=UNTRAINED, va="center")
    for y, fit in enumerate(fits.values()):
        error = [[fit.alpha - fit.low], [fit.high - fit.alpha]]
        ax.errorbar(fit.alpha, y, xerr=error, color=INK, marker="o", ms=4.5, capsize=2.5)
    ax.set_yticks(range(len(fits)), list(fits))
    ax.set_ylim(len(fits) - 0.5, -1.2)
    ax.axvline(0, color=INK, lw=0.7)
    ax.set(xlabel="α, with its interval")
    ax.grid(visible=False, axis="y")
    return ax
