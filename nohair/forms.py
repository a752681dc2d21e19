r"""The laws that a curve of forgetting is held against, one row each: ``D(t) = A * shape(t)``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from nohair.errors import Refused

Array = NDArray[np.float64]


def solve_power(x: Array, y: Array) -> Array:
    """Solve the power law: minus the least-squares slope of y (..., bins) on x (bins,)."""
    centred = x - x.mean()
    return np.asarray(-(y @ centred) / (centred @ centred))


@dataclass(frozen=True)
class Form:
    """One law ``D(t) = A * shape(t)``.

    ``log_shape`` maps ``(log t, *parameters)`` to ``log(D / A)`` and broadcasts. A parameter in
    ``amplitudes`` has the unit of distance and is searched as a multiple of A. A search begins at
    ``start``; ``closed`` solves a form that needs none.
    """

    name: str
    title: str
    formula: str
    log_shape: Callable[..., Array]
    bounds: Mapping[str, tuple[float, float]]
    start: tuple[float, ...] = ()
    amplitudes: tuple[str, ...] = ()
    closed: Callable[[Array, Array], Array] | None = None


# Exponents met in this field stay within [-5, 5]; unbounded, an offset power law turns into an
# exponential (a and p to infinity together). A stretched exponential turns into a power law as
# b -> 0: below 0.1 no three decades of data tell them apart. A floor under 1e-12 of A is none.
A, TAU, B = (-5.0, 5.0), (1e-30, 1e12), (0.1, 5.0)

FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form(
            "power",
            "a power law",
            r"A\,t^{-a}",
            lambda x, a: -a * x,
            {"a": (-inf, inf)},
            closed=solve_power,
        ),
        Form(
            "exponential",
            "an exponential",
            r"A\,e^{-t/\tau}",
            lambda x, tau: -np.exp(x) / tau,
            {"tau": TAU},
            (100.0,),
        ),
        Form(
            "stretched",
            "a stretched exponential",
            r"A\,e^{-(t/\tau)^b}",
            lambda x, tau, b: -np.exp(b * (x - np.log(tau))),
            {"tau": TAU, "b": B},
            (100.0, 0.5),
        ),
        Form(
            "power_floor",
            "a power law on a floor",
            r"A\,t^{-a} + c",
            lambda x, a, c: np.logaddexp(-a * x, np.log(c)),
            {"a": A, "c": (1e-12, 1e12)},
            (0.5, 0.01),
            amplitudes=("c",),
        ),
        Form(
            "offset_power",
            "an offset power law",
            r"A\,(t + p)^{-a}",
            lambda x, a, p: -a * np.log(np.exp(x) + p),
            {"a": A, "p": (0.0, 1e9)},
            (0.5, 10.0),
        ),
        Form(
            "power_log",
            "a power of log t over t",
            r"A\,(\log t)^k / t",
            lambda x, k: k * np.log(x) - x,
            {"k": (0.0, 100.0)},
            (1.0,),
        ),
    )
}


def named(name: str) -> Form:
    """Look a law up in `FORMS`.

    Raises
    ------
    Refused
        No such law.
    """
    if name not in FORMS:
        raise Refused(f"unknown form {name!r}: choose one of {', '.join(FORMS)}")
    return FORMS[name]
