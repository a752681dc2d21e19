"""The few numbers of a record that people quote, with what must stand beside them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

import xarray as xr

from nohair.decay import Fit


def summarise(record: xr.Dataset, distance: xr.DataArray, fits: Sequence[Fit]) -> dict[str, Any]:
    """Put exponents and provenance into one object that JSON can hold.

    Parameters
    ----------
    record
        The measurement.
    distance
        Its distances in one metric, from `nohair.lab.distances.metric`.
    fits
        One per layer, the final norm last, all over one window.

    Returns
    -------
    dict
        ``layers`` has one entry per site, ``final`` is the last of them; a number that could not
        be measured is None and ``note`` says why.
    """
    layers = [
        {
            "layer": int(layer),
            "site": str(site),
            "alpha": _number(fit.alpha),
            "low": _number(fit.low),
            "high": _number(fit.high),
            "floor": _number(floor),
            "note": fit.note,
        }
        for layer, site, floor, fit in zip(
            record.layer.values, record.site.values, distance.floor.values, fits, strict=True
        )
    ]
    of_record = ("model", "revision", "twin", "prompt_tokens", "horizon", "protocol", "dtype")
    return {
        **{key: record.attrs[key] for key in of_record},
        "device": record.attrs["device"],
        "metric": distance.attrs["metric"],
        "window": list(fits[-1].window),
        "level": fits[-1].level,
        "layers": layers,
        "final": {key: layers[-1][key] for key in ("alpha", "low", "high", "note")},
        "floor": _number(float(distance.floor.max())),
        "seconds": record.attrs["seconds"],
        "peak_mib": record.attrs["peak_mib"],
    }


def _number(value: float) -> float | None:
    return None if isnan(value) else float(f"{value:.6g}")
