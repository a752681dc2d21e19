"""Pictures show the data that they are given, and the same data give the same bytes."""

import io
import re
import warnings
from dataclasses import replace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from nohair import claims, decay, plots

mpl.use("Agg")
T = np.arange(1, 513)


@pytest.fixture
def ax():
    plots.use()
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


@pytest.fixture
def mean():
    """Six blocks and the final norm, each a power law of its own exponent."""
    data = np.array([3.0 * T ** -(1 - 0.1 * layer) for layer in range(7)])
    coords = {"layer": np.arange(1, 8), "t": T, "site": ("layer", ["block"] * 6 + ["final"])}
    coords["floor"] = ("layer", np.full(7, 1e-5))
    return xr.DataArray(data, coords, ("layer", "t"), attrs={"metric": "l2"})


def test_curves_draw_first_every_nth_and_last_block_the_final_norm_and_the_reference(ax, mean):
    assert plots.curves(ax, mean, every=2) is ax
    *blocks, final, reference = ax.get_lines()
    ends = [line.get_ydata()[-1] for line in blocks]
    assert ends == [mean.sel(layer=layer, t=T[-1]) for layer in (1, 2, 4, 6)]
    assert final.get_ydata()[-1] == mean[-1, -1]
    x, y = reference.get_data()
    assert y[0] / y[-1] == pytest.approx(x[-1] / x[0])
    assert {"block 1", "block 6", "final norm", "3 × floor, at most 3e-05", "1/t"} == {
        text.get_text() for text in ax.get_legend().get_texts()
    }


@pytest.mark.parametrize(
    ("metric", "named"), [("l2", "distance D"), ("relative", "relative"), ("angle", "angle")]
)
def test_curves_name_the_metric_that_they_show(ax, mean, metric, named):
    plots.curves(ax, mean.assign_attrs(metric=metric))
    assert named in ax.get_ylabel()
    assert ("relative" in ax.get_ylabel()) == (metric == "relative")


def test_the_reference_line_can_be_compared_with_the_first_block(ax, mean):
    plots.curves(ax, mean)
    line = next(line for line in ax.get_lines() if line.get_label() == "1/t")
    x, y = line.get_data()
    beside = float(mean[0].sel(t=x[0], method="nearest"))
    assert 0.5 <= y[0] / beside <= 2


def test_a_floor_far_below_is_named_and_does_not_flatten_the_curves(ax, mean):
    plots.curves(ax, mean.assign_coords(floor=("layer", np.full(7, 1e-12))))
    bottom, top = ax.get_ylim()
    assert float(mean.min()) / 100 <= bottom <= float(mean.min())
    assert top >= float(mean.max())
    named = [text.get_text() for text in ax.get_legend().get_texts() if "floor" in text.get_text()]
    assert len(named) == 1
    assert re.search(r"3 × floor.*3(\.0)?e-12", named[0])


def test_a_distance_of_zero_leaves_a_gap_and_no_warning(ax, mean):
    mean[0, 99] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.curves(ax, mean)
    assert ax.get_ylim()[0] > 0


def test_a_floor_that_was_not_measured_is_not_drawn(ax, mean):
    plots.curves(ax, mean.assign_coords(floor=("layer", np.full(7, np.nan))))
    assert "floor" not in "".join(text.get_text() for text in ax.get_legend().get_texts())


def test_alphas_draw_every_block_and_mark_the_final_norm_apart(ax, mean):
    fits = decay.profile(T, mean, (4, 512))
    reported = claims.load()
    plots.alphas(ax, {"planted": fits}, [reported["C2"], reported["C3"]])
    line = next(line for line in ax.get_lines() if line.get_label() == "planted")
    np.testing.assert_allclose(line.get_ydata(), 1 - 0.1 * np.arange(6), atol=1e-9)


def test_local_draws_each_exponent_inside_its_interval(ax):
    t, alpha = np.array([1.0, 10.0]), np.array([0.2, 0.6])
    plots.local(ax, {"one": (t, alpha)}, {"one": (t, alpha - 0.1, alpha + 0.1)})
    line = next(line for line in ax.get_lines() if line.get_label() == "one")
    np.testing.assert_array_equal(line.get_ydata(), alpha)
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.1, 0.7))


def test_rates_pair_each_law_with_its_subject_by_colour(ax):
    t, alpha = np.array([1.0, 10.0]), np.array([0.2, 0.6])
    measured = {"a": (t, alpha), "b": (t, alpha - 1)}
    intervals = {name: (t, y - 0.1, y + 0.1) for name, (_, y) in measured.items()}
    laws = {"bound a": (t, alpha - 2), "bound b": (t, alpha - 3), "law": (t, alpha - 4)}
    plots.rates(ax, measured, intervals, laws)
    lines = {line.get_label(): line for line in ax.get_lines()}
    for name, (_, values) in (measured | laws).items():
        np.testing.assert_array_equal(lines[name].get_ydata(), values)
    for name in measured:
        assert lines[name].get_color() == lines[f"bound {name}"].get_color()
        assert lines[name].get_linestyle() != lines[f"bound {name}"].get_linestyle()
    assert len(ax.collections) == 2


def test_by_block_draws_one_value_per_block_and_names_the_reference(ax):
    series = {"a": [1.0, 10.0, 100.0], "b": [2.0, 20.0, 200.0], "c": [3.0, 30.0, 300.0]}
    plots.by_block(ax, series, "factor", {"violated below": 1.0})
    *lines, level = ax.get_lines()
    assert [list(line.get_ydata()) for line in lines] == list(series.values())
    assert all(list(line.get_xdata()) == [1, 2, 3] for line in lines)
    assert level.get_ydata()[0] == 1.0
    assert ax.get_yscale() == "log"
    assert [text.get_text() for text in ax.texts] == ["violated below"]
    styles = [(line.get_color(), line.get_linestyle()) for line in lines]
    assert len(set(styles)) == len(styles)


def test_shares_stand_beside_the_uniform_one(ax):
    coords = {"layer": [1, 2], "t": T}
    share = xr.DataArray(np.array([8 / (8 + T), 0.5 + 0 * T]), coords, ("layer", "t"))
    plots.shares(ax, share, share / 8, prompt_tokens=8)
    named = {line.get_label(): line for line in ax.get_lines()}
    uniform, first = named["uniform attention"], named["block 1"]
    np.testing.assert_allclose(first.get_ydata()[[0, -1]], uniform.get_ydata()[[0, -1]])
    assert named["block 2"].get_ydata()[-1] == 0.5
    ends = sorted(line.get_ydata()[-1] for line in ax.get_lines() if len(line.get_ydata()))
    assert ends[0] == pytest.approx(1 / (8 + T[-1]))  # the first token's share, dashed


def test_magnitudes_count_digits_far_beyond_floats(ax):
    plots.magnitudes(ax, {"bound": (T, 400.0 + np.log10(T)), "measured": (T, -np.log10(T))})
    bound, measured, _ = ax.get_lines()
    assert bound.get_ydata()[0] == 400
    assert measured.get_ydata()[-1] == pytest.approx(-np.log10(512))
    assert bound.get_color() == measured.get_color()  # a pair belongs to one subject
    assert bound.get_linestyle() != measured.get_linestyle()
    assert ax.get_yscale() == "linear"


def test_window_map_writes_each_alpha_into_its_cell(ax):
    grid = np.array([[0.25, 0.5], [np.nan, 0.75]])
    plots.window_map(ax, [1, 16], [64, 256], grid)
    assert sorted(text.get_text() for text in ax.texts) == ["0.25", "0.50", "0.75"]


def test_forest_has_one_row_per_fit_in_the_given_order(ax, mean):
    fits = {"one": decay.fit(T, mean[0], (4, 512)), "two": decay.fit(T, mean[3], (4, 512))}
    plots.forest(ax, fits, claims.load()["C3"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "two"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first row is on top


def test_forms_fill_what_is_not_excluded(ax):
    comparison = decay.compare(T, 3 * np.exp(-T / 100.0), (4, 512))
    plots.forms(ax, comparison)
    filled = [bar.get_facecolor()[:3] == mpl.colors.to_rgb(plots.TRAINED) for bar in ax.patches]
    assert sum(filled) == len(comparison.undecided) < len(comparison.rows)


def test_the_same_data_give_the_same_bytes(mean):
    def picture():
        plots.use()
        figure, ax = plt.subplots()
        plots.curves(ax, mean)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
        plt.close(figure)
        return stream.getvalue()

    assert picture() == picture()


@pytest.mark.parametrize("colour", [plots.TRAINED, plots.UNTRAINED, plots.INK, plots.REFERENCE])
def test_lines_stand_out_from_the_paper(colour):
    # WCAG 2.1 asks 3:1 of graphical objects against their ground.
    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    light, dark = luminance(mpl.colors.to_rgb(plots.PAPER)), luminance(mpl.colors.to_rgb(colour))
    assert (light + 0.05) / (dark + 0.05) >= 3


def test_depths_are_named_and_grow_lighter(ax):
    t = np.geomspace(1, 1e12, 50)
    plots.by_depth(ax, t, {1: t**-1.0, 4: t**-0.5, 24: t**-0.1}, "what is left")
    lines = ax.get_lines()
    assert [line.get_label() for line in lines] == ["L = 1", "L = 4", "L = 24"]
    light = [sum(mpl.colors.to_rgb(line.get_color())) for line in lines]
    assert light == sorted(light)
    assert light[0] < light[-1]
    np.testing.assert_array_equal(lines[2].get_ydata(), t**-0.1)
    assert ax.get_xscale() == "log"
    assert ax.get_ylabel() == "what is left"


def test_lines_come_in_pairs_of_one_colour(ax):
    x = np.arange(5)
    series = {f"{p}, {s}": (x, x * p) for p in (1, 2, 3) for s in ("fixed", "evolving")}
    plots.lines(ax, series, "depth", "exponent")
    drawn = ax.get_lines()
    assert [line.get_label() for line in drawn] == list(series)
    for solid, dashed in zip(drawn[::2], drawn[1::2], strict=True):
        assert solid.get_color() == dashed.get_color()
        assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert len({line.get_color() for line in drawn}) == 3
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("depth", "exponent")


def test_skipped_colours_are_those_that_come_first(ax):
    x = np.arange(3)
    plots.lines(ax, dict.fromkeys("abcd", (x, x)), "x", "y")
    plots.lines(ax, {"e": (x, x), "f": (x, x)}, "x", "y", skip=1)
    colours = [line.get_color() for line in ax.get_lines()]
    assert colours[4] == colours[5] == colours[2] != colours[0]


def test_one_legend_names_each_thing_of_all_panels_once():
    plots.use()
    figure, (left, right) = plt.subplots(1, 2)
    x = np.arange(3)
    plots.lines(left, {"both": (x, x), "left": (x, x)}, "x", "y")
    plots.lines(right, {"both": (x, x), "right": (x, x)}, "x", "y")
    plots.one_legend(figure, 3)
    assert left.get_legend() is right.get_legend() is None
    (below,) = figure.legends
    assert [text.get_text() for text in below.get_texts()] == ["both", "left", "right"]
    figure.canvas.draw()
    top = below.get_window_extent().y1
    assert top <= min(ax.get_tightbbox().y0 for ax in (left, right))
    plt.close(figure)


def test_agreement_shows_every_draw_beside_its_prediction(ax):
    predicted = {"P = 8, few": [0.9, 0.5, 0.3], "P = 8, many": [0.7, 0.4, 0.2]}
    measured = {name: np.add(line, [[0.01], [-0.02]]) for name, line in predicted.items()}
    plots.agreement(ax, predicted, measured, title="GPT-2")
    series = [line for line in ax.get_lines() if len(line.get_xdata()) == 3]
    assert len(series) == 2 * (1 + 2)
    for start, (name, line) in zip((0, 3), predicted.items(), strict=True):
        theory, *draws = series[start : start + 3]
        np.testing.assert_allclose(theory.get_ydata(), line)
        np.testing.assert_array_equal(theory.get_xdata(), [1, 2, 3])
        for draw, row in zip(draws, measured[name], strict=True):
            np.testing.assert_allclose(draw.get_ydata(), row)
            assert draw.get_linestyle() == "None"
            assert draw.get_color() == theory.get_color()
    first, second = series[0], series[3]
    assert first.get_color() == second.get_color()
    assert (first.get_linestyle(), second.get_linestyle()) == ("--", "-")
    assert series[1].get_marker() != series[4].get_marker()
    assert all(tick == round(tick) for tick in ax.get_xticks())
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == list(predicted)
    assert ax.get_title(loc="left") == "GPT-2"


def test_prompt_lengths_without_a_second_depth_have_a_colour_each(ax):
    predicted = {"P = 8, 6 blocks": [0.9, 0.5], "P = 32, 6 blocks": [0.7, 0.4]}
    plots.agreement(ax, predicted, {name: [line] for name, line in predicted.items()})
    first, _, second, _ = [line for line in ax.get_lines() if len(line.get_xdata()) == 2][:4]
    assert first.get_color() != second.get_color()
    assert (first.get_linestyle(), second.get_linestyle()) == ("-", "-")


def test_fitted_curves_lie_beside_the_blocks_that_they_belong_to(ax, mean):
    blocks = mean[:6]
    plots.fitted(ax, blocks, 2 * blocks.to_numpy(), every=2, title="trained")
    drawn = [line for line in ax.get_lines() if len(line.get_xdata())]
    assert len(drawn) == 2 * 4  # blocks 1, 2, 4, 6
    for measured, fitted in zip(drawn[::2], drawn[1::2], strict=True):
        np.testing.assert_allclose(fitted.get_ydata(), 2 * measured.get_ydata())
    assert [line.get_ydata()[-1] for line in drawn[::2]] == [
        blocks.sel(layer=layer, t=T[-1]) for layer in (1, 2, 4, 6)
    ]
    names = {text.get_text() for text in ax.get_legend().get_texts()}
    assert names == {"block 1", "block 2", "block 4", "block 6", "effective relay"}


def planted(*exponents):
    """Fits of power laws, in intervals that reach 0.1 down and 0.2 up."""
    exact = [decay.fit(T, T**-a, (4, 512)) for a in map(float, exponents)]
    return [replace(fit, low=fit.alpha - 0.1, high=fit.alpha + 0.2) for fit in exact]


def bands(ax):
    """Lowest and highest y of every band."""
    edges = [band.get_paths()[0].vertices[:, 1] for band in ax.collections]
    return [(y.min(), y.max()) for y in edges]


def legend(ax):
    """The lines that the legend names, in its order."""
    lines = {line.get_label(): line for line in ax.get_lines()}
    return {text.get_text(): lines[text.get_text()] for text in ax.get_legend().get_texts()}


def test_the_axis_of_training_doubles_and_has_room_for_step_0(ax):
    ax.plot([0, 1, 64, 2048], [3.0, 2.0, 1.0, 0.0])
    assert plots.training_axis(ax) is ax
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "0", "1", "8", "64", "512"
    ]  # fmt: skip
    left, right = ax.get_xlim()
    assert left < 0
    assert right >= 2048
    x = [ax.transData.transform((step, 0))[0] for step in (0, 1, 2, 64, 128, 2048)]
    assert x == sorted(set(x))
    assert x[2] - x[1] == pytest.approx(x[4] - x[3])  # a doubling is a doubling anywhere
    assert ax.get_xlabel() == "step of training"


def test_exponents_over_training_lie_at_their_steps_inside_their_intervals(ax):
    steps = (0, 1, 64, 2048)
    series = {
        "llama": dict(zip(steps, planted(0.9, 0.8, 0.3, -0.2), strict=True)),
        "pythia": dict(zip(steps, planted(0.7, 0.6, 0.5, 0.4), strict=True)),
    }
    assert plots.over_training(ax, series, title="after block 6") is ax
    drawn = legend(ax)
    assert list(drawn) == list(series)
    for name, values in series.items():
        assert list(drawn[name].get_xdata()) == list(steps)
        assert list(drawn[name].get_ydata()) == [fit.alpha for fit in values.values()]
    assert bands(ax)[0] == pytest.approx((-0.3, 1.1), abs=1e-9)
    assert bands(ax)[1] == pytest.approx((0.3, 0.9), abs=1e-9)
    assert len({line.get_color() for line in drawn.values()}) == 2
    levels = [line.get_ydata()[0] for line in ax.get_lines() if line not in drawn.values()]
    assert levels == [0, 1]
    assert (ax.get_xscale(), ax.get_ylabel()) == ("symlog", "α")
    assert ax.get_title(loc="left") == "after block 6"


def test_an_exponent_that_is_not_measurable_leaves_a_gap(ax):
    nothing = decay.fit(T, 0.0 * T, (4, 512))
    before, after = planted(0.9, 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.over_training(ax, {"one": {0: before, 1: nothing, 2: after}})
    np.testing.assert_array_equal(np.isnan(legend(ax)["one"].get_ydata()), [False, True, False])


def test_checkpoints_are_named_first_middle_and_last_and_grow_lighter(ax, mean):
    rows = {step: mean[i] for i, step in enumerate((0, 1, 16, 256, 2048))}
    assert plots.checkpoints(ax, rows, title="final norm") is ax
    lines = ax.get_lines()
    for line, row in zip(lines, rows.values(), strict=True):
        t = line.get_xdata()
        assert (t[0], t[-1]) == (1, 512)
        np.testing.assert_array_equal(line.get_ydata(), row.sel(t=t))
    assert list(legend(ax)) == ["step 0", "step 16", "step 2048"]
    assert [lines.index(line) for line in legend(ax).values()] == [0, 2, 4]
    light = [sum(mpl.colors.to_rgb(line.get_color())) for line in lines]
    assert light == sorted(set(light))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_title(loc="left") == "final norm"


@pytest.mark.parametrize(
    ("steps", "expected"), [((7,), ["step 7"]), ((0, 7), ["step 0", "step 7"])]
)
def test_one_or_two_checkpoints_are_each_named_once(ax, mean, steps, expected):
    plots.checkpoints(ax, {step: mean[i] for i, step in enumerate(steps)})
    assert list(legend(ax)) == expected


def test_doses_are_measured_in_colour_and_foretold_in_grey(ax):
    strengths = (0.0, 0.5, 1.0)
    measured = {
        "all blocks": dict(zip(strengths, planted(0.8, 0.4, -0.1), strict=True)),
        "block 1": dict(zip(strengths, planted(0.8, 0.7, 0.6), strict=True)),
    }
    laws = {"uniform": {0.0: 1.0, 1.0: 0.0}, "relay": {0.0: 0.8, 0.5: 0.3, 1.0: 0.1}}
    assert plots.doses(ax, measured, laws, "λ", title="tiny") is ax
    drawn = legend(ax)
    assert list(drawn) == [*measured, *laws]
    for name, values in measured.items():
        assert list(drawn[name].get_xdata()) == list(strengths)
        assert list(drawn[name].get_ydata()) == [fit.alpha for fit in values.values()]
        assert drawn[name].get_linestyle() == "-"
    for name, law in laws.items():
        assert list(drawn[name].get_xdata()) == list(law)
        assert list(drawn[name].get_ydata()) == list(law.values())
        assert drawn[name].get_color() == plots.REFERENCE
    assert bands(ax)[0] == pytest.approx((-0.2, 1.0), abs=1e-9)
    assert len({line.get_color() for line in drawn.values()}) == 3
    assert len({drawn[name].get_linestyle() for name in laws} - {"-"}) == 2
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title(loc="left")) == ("λ", "α", "tiny")


def test_signs_show_each_fit_with_its_interval_over_what_foretells_it(ax):
    groups = {"step 0": ([0.5, -0.4], planted(0.6, -0.2)), "step 2048": ([0.1], planted(0.3))}
    assert plots.signs(ax, groups, "θ - λ", "α") is ax
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(groups)
    assert [drawn.get_label() for drawn in ax.containers] == list(groups)
    for drawn, (where, values) in zip(ax.containers, groups.values(), strict=True):
        points, _, (interval,) = drawn
        np.testing.assert_array_equal(points.get_xdata(), where)
        np.testing.assert_array_equal(points.get_ydata(), [fit.alpha for fit in values])
        assert points.get_linestyle() == "None"
        ends = [segment[:, 1] for segment in interval.get_segments()]
        np.testing.assert_allclose(ends, [(fit.low, fit.high) for fit in values])
    zeros = [line.get_data() for line in ax.get_lines()[-2:]]
    assert [list(zeros[0][1]), list(zeros[1][0])] == [[0, 0], [0, 0]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("θ - λ", "α")
