r"""What an activation function makes of the correlation of its inputs.

For z, z' jointly Gaussian of variance v and correlation :math:`\rho`, the kernel is
:math:`F(\rho) = E[\varphi(z)\,\varphi(z')]`: the covariance that a wide random layer adds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, sqrt
from typing import Literal

import numpy as np
from scipy.special import expit

from nohair.errors import Refused
from nohair.theory import symmetric
from nohair.theory.symmetric import Array

Activation = Literal["linear", "relu", "gelu", "gelu_tanh", "silu"]

# Of the Gauss-Hermite rule, and of terms: what is left out is below 1e-9 of the whole to v = 1.5.
NODES, MOST = 120, 40


def kernel(activation: str, variance: float, correlation: Array) -> Array:
    r"""Evaluate :math:`F(\rho)`.

    Parameters
    ----------
    activation
        ``linear``, ``relu``, ``gelu`` (exact), ``gelu_tanh`` or ``silu``.
    variance
        v, of the preactivation.
    correlation
        :math:`\rho`, any shape.

    Raises
    ------
    Refused
        Unknown activation; a negative or not finite variance.

    Notes
    -----
    Linear :math:`v\rho`; ReLU and GELU in closed form; the others by Mehler's expansion
    :math:`F(\rho) = \sum_n c_n^2 \rho^n` with :math:`c_n = E[\varphi(\sqrt v z) He_n(z)]/\sqrt{n!}`
    for standard normal z.
    """
    v = symmetric.amount("variance", variance)
    rho = np.asarray(correlation, np.float64)
    if activation == "linear":
        return v * rho
    if activation == "relu":
        rho = np.clip(rho, -1.0, 1.0)
        return np.asarray(v / (2 * pi) * (np.sqrt(1 - rho**2) + rho * (pi - np.arccos(rho))))
    if activation == "gelu":
        c = np.clip(rho, -1.0, 1.0) * v
        rest = (v**2 + c**2 * (1 - v) / (1 + v)) / np.sqrt((1 + v) ** 2 - c**2)
        return np.asarray(c / 4 + (c * np.arcsin(c / (1 + v)) + rest) / (2 * pi))
    if activation not in _SERIES:
        known = ", ".join(("linear", "relu", "gelu", *_SERIES))
        raise Refused(f"activation = {activation!r}: choose {known}")
    squares = _squares(activation, v)
    total = np.full_like(rho, squares[-1])
    for square in squares[-2::-1]:
        total *= rho
        total += square
    return total


@cache
def _squares(activation: str, variance: float) -> tuple[float, ...]:
    """The :math:`c_n^2`, as far as they matter at correlation 1."""
    z, weight = np.polynomial.hermite_e.hermegauss(NODES)
    values = _SERIES[activation](sqrt(variance) * z) * weight / sqrt(2 * pi)
    polynomials, squares = [np.ones_like(z), z], []
    for n in range(MOST):  # normalised Hermite polynomials, by their recurrence
        squares.append(float(values @ polynomials[n]) ** 2)
        nearest = (z * polynomials[n + 1] - sqrt(n + 1) * polynomials[n]) / sqrt(n + 2)
        polynomials.append(nearest)
    tail = np.cumsum(squares[::-1])[::-1]
    return tuple(squares[: max(2, int((tail > 1e-10 * tail[0]).sum()))])


def _gelu_tanh(z: Array) -> Array:
    return np.asarray(0.5 * z * (1 + np.tanh(sqrt(2 / pi) * (z + 0.044715 * z**3))))


def _silu(z: Array) -> Array:
    return np.asarray(z * expit(z))


_SERIES: dict[str, Callable[[Array], Array]] = {"gelu_tanh": _gelu_tanh, "silu": _silu}
