"""An effective relay recovers what a relay made, and says how little it knows otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from nohair.errors import Refused
from nohair.theory import bound, effective, relay

T = 512


def planted(window: int | None = None) -> effective.Effective:
    """Five blocks with coefficients of different sizes, none of them zero where it can act."""
    rng = np.random.default_rng(3)
    coefficients = rng.uniform(0.2, 1.5, (5, 3 if window is None else 5))
    coefficients[0, [0, 2]] = 0.0  # nothing to carry or relay before the first block
    if window is not None:
        coefficients[0, 4] = 0.0
    return effective.Effective(coefficients, 16, window)


@pytest.mark.parametrize("window", [None, 8, 2000])
def test_a_planted_chain_is_met_although_its_coefficients_are_not_unique(
    window: int | None,
) -> None:
    curves = planted(window).chained(T)
    fitted = effective.fit(curves, 16, window)
    # Carry and relay are nearly collinear, so the curves are the test and not the coefficients.
    assert np.abs(np.log(fitted.chained(T) / curves)).max() < 0.01
    assert (fitted.coefficients >= 0).all()
    assert effective.explained(curves, fitted.chained(T)).min() > 0.9999


def test_the_chain_is_the_relay_model_itself() -> None:
    gains, prompt = [0.5, 0.25, 1.0], 8
    chain = relay.blocks(3, gains)
    rows = [[b.carry, b.source, b.relay] for b in chain]
    model = effective.Effective(np.array(rows), prompt)
    np.testing.assert_allclose(model.chained(T), relay.recursion(T, 3, prompt, gains), rtol=1e-12)
    np.testing.assert_allclose(
        model.chained(T), np.exp(bound.recursion(chain, prompt, T)), rtol=1e-12
    )


def test_near_keys_are_the_windowed_relay_model() -> None:
    """With nothing but near keys: gain g, prompt states of 1, a window of W."""
    g, window, prompt = 0.75, 12, 20
    row = [1.0, 0.0, 0.0, g, g]
    model = effective.Effective(np.array([row] * 4), prompt, window)
    np.testing.assert_allclose(
        model.chained(60), relay.windowed(60, 4, prompt, g, window), rtol=1e-12, atol=0
    )


def test_a_step_reads_what_was_measured_and_a_chain_what_was_fitted() -> None:
    model = planted()
    curves = model.chained(T)
    np.testing.assert_allclose(model.stepped(curves), curves, rtol=1e-12)
    bent = curves * np.linspace(1, 2, T)
    assert not np.allclose(model.stepped(bent)[1:], curves[1:])
    np.testing.assert_allclose(model.stepped(bent)[0], curves[0], rtol=1e-12)


def test_a_step_wise_fit_meets_each_step_better_and_the_chain_worse() -> None:
    t = np.arange(1, T + 1)
    rng = np.random.default_rng(0)
    curves = planted().chained(T) * np.exp(0.15 * np.sin(np.log(t) * rng.uniform(2, 4, (5, 1))))
    chained = effective.fit(curves, 16)
    stepped = effective.fit(curves, 16, chained=False)
    assert (
        effective.explained(curves, stepped.stepped(curves))[1:].mean()
        > effective.explained(curves, chained.stepped(curves))[1:].mean()
    )
    assert (
        effective.explained(curves, chained.chained(T)).mean()
        > effective.explained(curves, stepped.chained(T)).mean()
    )


def test_fitting_is_least_squares_on_the_logarithm() -> None:
    """No coefficient of the first block can be moved for the better."""
    t = np.arange(1, T + 1)
    curve = (t**-0.6 * np.exp(0.2 * np.cos(np.log(t) * 3)))[None]
    fitted = effective.fit(curve, 16, 32)
    best = effective.explained(curve, fitted.chained(T))[0]
    for column in (1, 3):
        for factor in (0.97, 1.03):
            moved = fitted.coefficients.copy()
            moved[0, column] *= factor
            other = effective.Effective(moved, 16, 32)
            if moved[0, column]:
                assert effective.explained(curve, other.chained(T))[0] < best


def test_an_early_fit_sees_nothing_of_what_comes_later() -> None:
    curves = planted().chained(T)
    other = curves.copy()
    other[:, 100:] *= 7
    first, second = (effective.fit(c, 16, last=100).coefficients for c in (curves, other))
    np.testing.assert_array_equal(first, second)


def test_a_constant_explains_nothing_and_the_curve_itself_everything() -> None:
    curves = planted().chained(T)
    flat = np.exp(np.log(curves).mean(axis=1, keepdims=True)) * np.ones(T)
    assert effective.explained(curves, curves) == pytest.approx(np.ones(5))
    assert (effective.explained(curves, flat) <= 1e-12).all()


def test_octaves_count_alike() -> None:
    """The last octave holds half of all positions; to be wrong there costs an octave's worth."""
    t = np.arange(1, T + 1)
    curve = (1.0 / t)[None]
    late, early = curve.copy(), curve.copy()
    late[:, (t >= 256) & (t < 512)] *= 2
    early[:, (t >= 16) & (t < 32)] *= 2
    costs = [1 - effective.explained(curve, wrong)[0] for wrong in (late, early)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"distance": np.ones(5)}, "shape"),
        ({"distance": np.zeros((2, 50))}, "distance = 0"),
        ({"distance": np.full((2, 50), np.nan)}, "distance = nan"),
        ({"distance": np.ones((2, 8))}, "8 positions"),
        ({"prompt_tokens": 0}, "prompt_tokens = 0"),
        ({"window": 1}, "window = 1"),
        ({"window": 2.5}, "window = 2.5"),
        ({"last": 0}, "last = 0"),
    ],
)
def test_refusals_name_the_value(change: dict[str, object], said: str) -> None:
    asked = {"distance": np.ones((2, 50)), "prompt_tokens": 8} | change
    with pytest.raises(Refused, match=said) as refusal:
        effective.fit(**asked)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_predictions_of_another_shape_are_refused() -> None:
    with pytest.raises(Refused, match=r"\(2, 40\)"):
        effective.explained(np.ones((2, 50)), np.ones((2, 40)))


def test_a_model_of_other_depth_and_a_window_of_nothing_are_refused() -> None:
    model = planted()
    curves = model.chained(64)
    with pytest.raises(Refused, match="3 layers measured, 5 fitted"):
        model.stepped(curves[:3])
    with pytest.raises(Refused, match="first = 40 of 64"):
        effective.explained(curves, curves, first=40)
