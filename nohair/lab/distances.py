r"""How far apart two prompts leave the hidden states of the continuation they share.

For prompts :math:`A, B` followed by one continuation, :math:`D_l(t) = |h_l^A(t) - h_l^B(t)|` at
every site of the residual stream. All K prompts run as one batch; what the model computes is read
as it passes, and only D is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from nohair.errors import Failed, Refused
from nohair.lab import anatomy, passes
from nohair.lab.models import Subject
from nohair.lab.texts import Texts

METRICS = ("l2", "relative", "angle")
FLOOR_POINTS = 64

Take = Callable[[int, int, Tensor], None]


def measure(
    subject: Subject,
    prompts: Texts,
    continuations: Texts,
    *,
    chunk: int = 512,
    bos: bool = True,
    floor: bool = True,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure D for every pair of prompts, continuation, layer and position.

    Parameters
    ----------
    subject
        The model.
    prompts, continuations
        Ids of shape (K, P) and (C, T).
    chunk
        Tokens per forward pass; what came before is in the model's own key-value cache.
    bos
        Put the tokenizer's own first token before each prompt, if it has one.
    floor
        Also measure the floor, by one more run of the first prompt with other chunks.
    progress
        Show a bar; by default on a terminal only.

    Returns
    -------
    xarray.Dataset
        ``distance`` (layer, continuation, pair, t), the l2 distance; ``norm`` (layer,
        continuation, prompt, t), the states' norms, from which `metric` makes the other two;
        ``floor`` (layer,), the largest D between two runs of one prompt that differ in nothing
        but the order of their arithmetic, or the rounding of one state where that is larger
        (nan where not measured). All in the units of the residual stream. Coordinate ``layer``
        counts the sites from 1: the state after each block, then the state after the final
        norm; ``site`` says which (``block``, ``final``).

    Raises
    ------
    Refused
        Fewer than two prompts; P + T beyond the model's positions.
    Failed
        A state is not finite, or zero; layer and position are named.
    """
    head = [subject.bos] if bos and subject.bos is not None else []
    count, prompt_tokens = prompts.ids.shape
    rows, horizon = continuations.ids.shape
    subject.check_room(prompt_tokens, horizon, len(head))
    if count < 2:
        raise Refused(f"{count} prompt: a distance needs at least 2 prompts")
    begun = time.perf_counter()
    sites = subject.anatomy.layers + 1
    start = len(head) + prompt_tokens
    length = start + horizon
    cuts = passes.cuts(length, chunk)
    other_cuts = passes.cuts(length, max(1, min(chunk, length) // 5))
    probes = np.unique(np.geomspace(1, horizon, FLOOR_POINTS).round().astype(int)) - 1

    distance = np.empty((sites, rows, count * (count - 1) // 2, horizon), np.float32)
    norm = np.empty((sites, rows, count, horizon), np.float32)
    first = np.empty((sites, len(probes), subject.anatomy.width), np.float32)
    again = np.empty_like(first)

    def keep(c: int) -> Take:
        def take(site: int, at: int, states: Tensor) -> None:
            now = slice(at, at + states.shape[1])
            distance[site, c, :, now] = pairwise(states).cpu()
            norm[site, c, :, now] = _norms(states, _name(site, sites), at).cpu()
            if floor and c == 0:
                _probe(first, site, at, states, probes)

        return take

    def compare(site: int, at: int, states: Tensor) -> None:
        _probe(again, site, at, states, probes)

    total = rows * len(cuts) + floor * len(other_cuts)
    quiet = None if progress is None else not progress
    with tqdm(total=total, unit="chunk", desc="measuring", disable=quiet, leave=False) as bar:
        for c in range(rows):
            ids = passes.batch(head, prompts.ids, continuations.ids[c])
            _stream(subject, ids, cuts, start, keep(c), bar)
            if floor and c == 0:
                _stream(subject, ids[:1], other_cuts, start, compare, bar)

    noise = np.full(sites, np.nan, np.float32)
    if floor:
        gap = np.linalg.norm(first - again, axis=-1).max(axis=-1)
        rounding = torch.finfo(subject.model.dtype).eps * norm.mean(axis=(1, 2, 3))
        noise = np.maximum(gap, rounding)
    pairs = combinations(prompts.names, 2)
    return xr.Dataset(
        {
            "distance": (("layer", "continuation", "pair", "t"), distance),
            "norm": (("layer", "continuation", "prompt", "t"), norm),
            "floor": (("layer",), noise),
        },
        coords={
            "continuation": list(continuations.names),
            "layer": np.arange(1, sites + 1),
            "site": ("layer", ["block"] * (sites - 1) + ["final"]),
            "pair": [f"{a} | {b}" for a, b in pairs],
            "prompt": list(prompts.names),
            "t": np.arange(1, horizon + 1),
        },
        attrs={
            **subject.provenance,
            "prompt_tokens": prompt_tokens,
            "horizon": horizon,
            "continuation_kind": continuations.kind,
            "bos": len(head),
            "chunk": chunk,
            "prompts_sha256": prompts.sha256,
            "continuations_sha256": continuations.sha256,
            "seconds": round(time.perf_counter() - begun, 2),
        },
    )


def within_prompts(subject: Subject, prompts: Texts, *, bos: bool = True) -> xr.DataArray:
    """Measure how different the states of the prompts themselves are, position by position.

    Parameters
    ----------
    subject
        The model.
    prompts
        Ids of shape (K, P).
    bos
        Put the tokenizer's own first token before each prompt, if it has one.

    Returns
    -------
    xarray.DataArray
        Distance over norm, (layer, position), both averaged over prompts; positions count from 1
        and start with BOS where there is one, ``layer`` is as in `measure`.

    Raises
    ------
    Refused
        Fewer than two prompts.
    """
    if len(prompts.ids) < 2:
        raise Refused(f"{len(prompts.ids)} prompt: a distance needs at least 2 prompts")
    head = [subject.bos] if bos and subject.bos is not None else []
    ids = passes.batch(head, prompts.ids, prompts.ids[0, :0])
    found = np.empty((subject.anatomy.layers + 1, ids.shape[1]))

    def take(site: int, at: int, states: Tensor) -> None:
        norms = _norms(states, _name(site, len(found)), at)
        found[site] = (pairwise(states).mean(0) / norms.mean(0)).cpu()

    with tqdm(disable=True) as bar:
        _stream(subject, ids, [slice(0, ids.shape[1])], 0, take, bar)
    coords = {"layer": np.arange(1, len(found) + 1), "position": np.arange(1, ids.shape[1] + 1)}
    return xr.DataArray(found, coords, ("layer", "position"))


def metric(record: xr.Dataset, name: str) -> xr.DataArray:
    r"""Express the measured distances in one of the `METRICS`.

    Parameters
    ----------
    record
        What `measure` returned.
    name
        ``l2``: :math:`D = |a - b|`; ``relative``: D over the mean norm of the two states;
        ``angle``: between the two states, in radians, by the exact identity
        :math:`|\hat a - \hat b|^2 = (D^2 - (|a| - |b|)^2) / (|a| |b|)`.

    Returns
    -------
    xarray.DataArray
        Of the record's dimensions; the coordinate ``floor`` (layer,) is in the same units.

    Raises
    ------
    Refused
        No such metric.
    """
    check_metric(name)
    distance: xr.DataArray = record.distance.assign_coords(floor=record.floor)
    distance = distance.assign_attrs(metric=name)
    if name == "l2":
        return distance
    first, second = np.array(list(combinations(range(record.sizes["prompt"]), 2))).T
    a = record.norm.isel(prompt=xr.DataArray(first, dims="pair")).astype(float)
    b = record.norm.isel(prompt=xr.DataArray(second, dims="pair")).astype(float)
    if name == "relative":
        expressed = distance / ((a + b) / 2)
    else:
        chord = np.sqrt(np.clip((distance.astype(float) ** 2 - (a - b) ** 2) / (a * b), 0, 4))
        expressed = 2 * np.arcsin(chord / 2)
    typical = record.norm.mean(("continuation", "prompt", "t"))
    expressed = expressed.assign_coords(floor=record.floor / typical).assign_attrs(metric=name)
    ordered: xr.DataArray = expressed.transpose(*distance.dims)
    return ordered


def check_metric(name: str) -> None:
    """Refuse a metric that does not exist.

    Raises
    ------
    Refused
        `name` is not one of the `METRICS`.
    """
    if name not in METRICS:
        raise Refused(f"metric {name!r} is unknown; choose {', '.join(METRICS)}")


def _stream(
    subject: Subject, ids: NDArray[np.int64], cuts: list[slice], start: int, take: Take, bar: Any
) -> None:
    """Run the batch chunk by chunk and hand over the continuation's states as they pass.

    `take` gets the site (from 0), the offset in the continuation and the states
    (K, tokens, width).
    """
    now = slice(0, 0)

    def begin(chunk: slice) -> None:
        nonlocal now
        now = chunk

    def read(site: int) -> passes.Hook:
        def hook(module: Any, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            before = max(0, start - now.start)
            if before < states.shape[1]:
                take(site, now.start + before - start, states[:, before:])

        return hook

    sites = [*anatomy.blocks(subject.model), anatomy.final_norm(subject.model)]
    with passes.hooked({module: read(site) for site, module in enumerate(sites)}):
        passes.forward(subject, ids, cuts, begin, bar)


def pairwise(states: Tensor) -> Tensor:
    """Take the distances of all pairs, (pairs, tokens): differences first, norms second.

    In float32.
    The Gram shortcut |a|² + |b|² - 2ab loses every digit where D is small beside the norm.
    """
    states = states.float()
    gaps = [torch.linalg.vector_norm(states[k + 1 :] - s, dim=-1) for k, s in enumerate(states)]
    return torch.cat(gaps)


def _norms(states: Tensor, name: str, at: int) -> Tensor:
    """Norms (K, tokens), in float32; states that are no states stop the measurement."""
    norms: Tensor = torch.linalg.vector_norm(states.float(), dim=-1)
    finite, positive = norms.isfinite().all(dim=0), (norms > 0).all(dim=0)
    for fits, wrong in ((finite, "not finite"), (positive, "zero")):
        if not fits.all():
            t = at + 1 + int((~fits).nonzero()[0])
            raise Failed(
                f"{name}: states are {wrong} at t = {t} in {states.dtype}; measure in float32, "
                "and if that does not help look at the weights"
            )
    return norms


def _name(site: int, sites: int) -> str:
    return "final norm" if site == sites - 1 else f"layer {site + 1}"


def _probe(
    into: NDArray[np.float32], site: int, at: int, states: Tensor, probes: NDArray[np.int64]
) -> None:
    here = (probes >= at) & (probes < at + states.shape[1])
    into[site, here] = states[0, torch.from_numpy(probes[here] - at)].float().cpu()
