"""Kernels of activations against sums over a fine grid, closed integrals, and random draws."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf, nan, pi, sqrt
from typing import Any, get_args

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional

from nohair.errors import Refused
from nohair.theory import kernels
from nohair.theory.kernels import Activation, kernel

pytestmark = pytest.mark.filterwarnings("error")

Array = NDArray[np.float64]

# What networks of these families have: 0.0512 to 1.64 is d std² at width 128 to 4096, std 0.02.
VARIANCES = [0.0512, 0.2048, 0.4, 1.0, 1.6384]
CORRELATIONS = [-1.0, -0.6, 0.0, 0.05, 0.5, 0.99, 1.0]
SMOOTH = ["gelu", "gelu_tanh", "silu"]


def _torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    return lambda z: np.asarray(function(torch.from_numpy(np.ascontiguousarray(z))))


# What transformers computes under these names, from PyTorch and not from the module under test.
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda z: z,
    "relu": _torch(functional.relu),
    "gelu": _torch(functional.gelu),
    "gelu_tanh": _torch(lambda z: functional.gelu(z, approximate="tanh")),
    "silu": _torch(functional.silu),
}


def on_a_grid(activation: str, variance: float, correlation: float) -> float:
    """E phi(z) phi(z') by the trapezoid rule over two independent normals, steps of 1/20.

    For analytic functions, the nearest pole at pi/sqrt(v), its error is far below 1e-14.
    """
    x = np.arange(-190, 191) / 20
    weight = np.exp(-(x**2) / 2) / 20 / sqrt(2 * pi)
    first, other = np.meshgrid(x, x, indexing="ij")
    second = correlation * first + sqrt(1 - correlation**2) * other
    phi, scale = FUNCTIONS[activation], sqrt(variance)
    return float(weight @ (phi(scale * first) * phi(scale * second)) @ weight)


@pytest.mark.parametrize("activation", [*SMOOTH, "linear"])
@pytest.mark.parametrize("variance", VARIANCES)
def test_smooth_activations_against_a_grid(activation: str, variance: float) -> None:
    """To 1e-9 of the whole, F(1): what the series may leave out."""
    whole = on_a_grid(activation, variance, 1.0)
    expected = [on_a_grid(activation, variance, rho) for rho in CORRELATIONS]
    found = kernel(activation, variance, np.array(CORRELATIONS))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * whole)


@pytest.mark.parametrize("variance", [1e-4, 3.0, 100.0])
def test_closed_form_of_gelu_keeps_its_digits(variance: float) -> None:
    """One integral in 30 digits; the other is E GELU(m + s z) = m Phi(u) + s²/sqrt(1+s²) phi(u)."""
    for rho in (-0.9, 0.3):
        with mpmath.workdps(30):
            v, r = mpmath.mpf(variance), mpmath.mpf(rho)
            rest = v * (1 - r * r)
            root = mpmath.sqrt(1 + rest)

            def inner(mean: Any, rest: Any = rest, root: Any = root) -> Any:
                u = mean / root
                return mean * mpmath.ncdf(u) + rest / root * mpmath.npdf(u)

            def outer(x: Any, v: Any = v, r: Any = r, inner: Any = inner) -> Any:
                z = mpmath.sqrt(v) * x
                return z * mpmath.ncdf(z) * inner(r * z) * mpmath.npdf(x)

            expected = float(mpmath.quad(outer, range(-12, 13, 2)))
        found = float(kernel("gelu", variance, np.array(rho)))
        whole = float(kernel("gelu", variance, np.array(1.0)))
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-14 * whole)


@pytest.mark.parametrize("variance", [0.2, 2.0])
@pytest.mark.parametrize("correlation", [-0.95, -0.3, 0.0, 0.4, 0.999])
def test_relu_against_an_integral(variance: float, correlation: float) -> None:
    """Over z > 0 of z times E max(0, z') given z, in 20 digits."""
    with mpmath.workdps(20):
        r = mpmath.mpf(correlation)
        s = mpmath.sqrt(1 - r * r)

        def integrand(z: Any) -> Any:
            mean = r * z
            return z * (mean * mpmath.ncdf(mean / s) + s * mpmath.npdf(mean / s)) * mpmath.npdf(z)

        expected = variance * float(mpmath.quad(integrand, [0, 0.5, 1, 2, 4, 8, 14]))
    found = float(kernel("relu", variance, np.array(correlation)))
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_against_random_draws(activation: str) -> None:
    """A million pairs: within four standard errors of their mean."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 10**6))
    for variance, rho in ((0.2, 0.6), (1.5, -0.4)):
        z, other = sqrt(variance) * a, sqrt(variance) * (rho * a + sqrt(1 - rho**2) * b)
        products = FUNCTIONS[activation](z) * FUNCTIONS[activation](other)
        found = float(kernel(activation, variance, np.array(rho)))
        assert abs(products.mean() - found) < 4 * products.std() / 1e3


def test_values_by_hand() -> None:
    """Half a normal's square; independent halves; and two GELUs of v = 1."""
    half = np.array([1.0, 0.0, -1.0])
    np.testing.assert_allclose(kernel("relu", 3.0, half), [1.5, 1.5 / pi, 0], atol=1e-15)
    np.testing.assert_allclose(kernel("linear", 3.0, half), [3, 0, -3])
    # E z Phi(z) = 1/(2 sqrt pi) for v = 1, so its square at no correlation is 1/(4 pi)
    assert float(kernel("gelu", 1.0, np.array(0.0))) == pytest.approx(1 / (4 * pi), rel=1e-14)
    # E (z Phi(z))² = 1/3 + 1/(2 pi sqrt 3), by parts
    expected = 1 / 3 + 1 / (2 * pi * sqrt(3))
    assert float(kernel("gelu", 1.0, np.array(1.0))) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_kernel_keeps_the_shape_and_its_argument(activation: str) -> None:
    rho = np.random.default_rng(0).uniform(-1, 1, (3, 4))
    before = rho.copy()
    found = kernel(activation, 0.7, rho)
    np.testing.assert_array_equal(rho, before)
    assert found.shape == rho.shape
    for place in np.ndindex(rho.shape):
        assert found[place] == pytest.approx(float(kernel(activation, 0.7, rho[place])), rel=1e-14)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_rounding_beyond_one_is_one(activation: str) -> None:
    """Normalised covariances exceed 1 by a few roundings; that must not be nan."""
    over = kernel(activation, 0.5, np.array([1 + 4e-16, -1 - 4e-16]))
    np.testing.assert_allclose(over, kernel(activation, 0.5, np.array([1.0, -1.0])), atol=1e-14)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_no_variance_gives_nothing(activation: str) -> None:
    np.testing.assert_allclose(kernel(activation, 0.0, np.array([1.0, 0.2])), 0, atol=1e-30)


@pytest.mark.parametrize("activation", ["relu", *SMOOTH])
def test_small_inputs_meet_the_slope_at_zero(activation: str) -> None:
    """GELU and SiLU have slope 1/2, so F is near v rho / 4; ReLU is no line at any size."""
    rho = np.array([0.1, 0.5, 1.0])
    found = kernel(activation, 1e-8, rho) / 1e-8
    if activation == "relu":
        np.testing.assert_allclose(found, kernel("relu", 1.0, rho), rtol=1e-12)
    else:
        np.testing.assert_allclose(found, rho / 4, rtol=1e-6, atol=1e-8)


law = settings(deadline=None, derandomize=True, max_examples=60)
variances = st.floats(0.01, 1.6)
correlations = st.floats(-1, 1)
names = st.sampled_from(get_args(Activation))


@law
@given(names, variances, correlations)
def test_no_kernel_exceeds_its_value_at_one(name: str, variance: float, rho: float) -> None:
    """Cauchy and Schwarz."""
    found, whole = (float(kernel(name, variance, np.array(x))) for x in (rho, 1.0))
    assert abs(found) <= whole * (1 + 1e-12)


@law
@given(names, variances, st.floats(0, 0.99), st.floats(0.001, 0.01))
def test_kernel_grows_with_positive_correlation(
    name: str, variance: float, rho: float, more: float
) -> None:
    """All coefficients of Mehler's series are squares."""
    assert kernel(name, variance, np.array(rho + more)) > kernel(name, variance, np.array(rho))


@law
@given(names, variances, correlations)
def test_kernel_of_a_grid_of_correlations_is_a_covariance(
    name: str, variance: float, rho: float
) -> None:
    """Of three inputs with one correlation between each two; no eigenvalue is negative."""
    rho = max(rho, -0.5)
    matrix = np.full((3, 3), rho)
    np.fill_diagonal(matrix, 1.0)
    values = np.linalg.eigvalsh(kernel(name, variance, matrix))
    assert values.min() >= -1e-12 * values.max()


# What is refused


@pytest.mark.parametrize("activation", ["", "tanh", "GELU", "swish", None])
def test_unknown_activation_is_refused(activation: Any) -> None:
    with pytest.raises(Refused) as refused:
        kernel(activation, 1.0, np.array(0.5))
    message = str(refused.value)
    assert "\n" not in message
    assert f"activation = {activation!r}" in message
    assert all(name in message for name in get_args(Activation))


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("variance", [-1, inf, nan, "many"])
def test_impossible_variance_is_refused(activation: str, variance: Any) -> None:
    with pytest.raises(Refused) as refused:
        kernel(activation, variance, np.array(0.5))
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(rf"\bvariance = '?{variance}\b", message)


def test_names_are_those_that_have_a_kernel() -> None:
    assert set(get_args(Activation)) == {"linear", "relu", "gelu", *kernels._SERIES}
