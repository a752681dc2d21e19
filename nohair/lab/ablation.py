"""Distances under a bias of several strengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from tqdm import tqdm

from nohair.decay import Fit
from nohair.errors import Refused
from nohair.lab import bias, distances
from nohair.lab.models import Subject
from nohair.lab.texts import Texts


def measure(
    subject: Subject,
    prompts: Texts,
    continuations: Texts,
    strengths: Sequence[float] = (0.0, 1.0),
    start: float = 16.0,
    *,
    bos: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> xr.Dataset:
    """Measure D for each strength of the bias against dilution, on the same texts.

    Parameters
    ----------
    subject
        The model.
    prompts, continuations
        Ids of shape (K, P) and (C, T).
    strengths
        Values of λ, each once; 0 is the model as it is.
    start
        t_0, where the bias is zero.
    bos
        Put the tokenizer's own first token before each prompt, if it has one.
    progress
        Show a bar; by default on a terminal only.
    options
        ``onset``, ``layers``, ``on_head``: as for `nohair.lab.bias.dilution_bias`.

    Returns
    -------
    xarray.Dataset
        What `nohair.lab.distances.measure` returns, with ``strength`` in front.

    Raises
    ------
    Refused
        No strength, or one twice; otherwise as `dilution_bias` and `distances.measure`.
    """
    if not strengths or len(set(strengths)) < len(strengths):
        raise Refused(f"strengths = {list(strengths)}: give at least one, each once")
    head, tokens = int(bos and subject.bos is not None), prompts.ids.shape[1]
    quiet, records = None if progress is None else not progress, []
    for strength in tqdm(strengths, desc="strengths", disable=quiet, leave=False):
        with bias.dilution_bias(subject, tokens, strength, start, head=head, **options) as biased:
            record = distances.measure(biased, prompts, continuations, bos=bos, progress=False)
        records.append(record)
    joined = xr.concat(records, "strength", data_vars="all", combine_attrs="drop_conflicts")
    return joined.assign_coords(strength=list(map(float, strengths)))


def stopping(fits: Mapping[float, Fit]) -> tuple[float, float, float]:
    """Find the strength at which the distance stops falling: where α passes zero.

    Parameters
    ----------
    fits
        By strength, increasing.

    Returns
    -------
    tuple of float
        The strength, interpolated between measured ones, and where the two ends of α's interval
        pass zero; nan where none of the strengths is enough.
    """
    rows = np.array([(f.alpha, f.low, f.high) for f in fits.values()]).T
    strengths = np.array(list(fits))
    middle, low, high = (_crossing(strengths, row) for row in rows)
    return middle, low, high


def _crossing(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """First x at which y, linear between its values, is no longer above zero."""
    if not (y <= 0).any():
        return nan
    i = int(np.argmax(y <= 0))
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * y[i - 1] / (y[i - 1] - y[i]))
