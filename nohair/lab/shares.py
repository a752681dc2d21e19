"""How much of the attention goes to the prompt, by layer, head and position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from tqdm import tqdm

from nohair import decay
from nohair.errors import Refused
from nohair.lab import attend, passes
from nohair.lab.models import Subject
from nohair.lab.texts import Texts


def measure(
    subject: Subject,
    prompts: Texts,
    continuations: Texts,
    *,
    chunk: int = 128,
    bos: bool = True,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure shares of attention, in one pass for each continuation.

    Parameters
    ----------
    subject
        The model, with or without a bias.
    prompts, continuations
        Ids of shape (K, P) and (C, T).
    chunk
        Tokens per forward pass.
    bos
        Put the tokenizer's own first token before each prompt, if it has one.
    progress
        Show a bar; by default on a terminal only.

    Returns
    -------
    xarray.Dataset
        Means over all runs, by layer, head and t: ``share`` of the prompt's P tokens; ``sink``, of
        the sequence's first token, which is BOS where there is one and the prompt's own first
        token otherwise; ``rest``, of the prompt without the sequence's first token.

    Raises
    ------
    Refused
        P + T beyond the model's positions; no prompt, no continuation, no token.
    """
    head = [subject.bos] if bos and subject.bos is not None else []
    (count, prompt_tokens), (rows, horizon) = prompts.ids.shape, continuations.ids.shape
    subject.check_room(prompt_tokens, horizon, len(head))
    if min(sizes := (count, prompt_tokens, rows, horizon)) < 1:
        raise Refused("K = {}, P = {}, C = {}, T = {}: give at least 1 of each".format(*sizes))
    start, shape = len(head) + prompt_tokens, subject.anatomy
    names = ("share", "sink", "rest")
    space = (shape.layers, shape.heads, horizon)
    seen = {name: torch.zeros(space, device=subject.device) for name in names}
    now = slice(0, 0)

    def begin(following: slice) -> None:
        nonlocal now
        now = following

    def read(group: attend.Group) -> None:
        skip = max(0, start - now.start)
        oldest = now.stop - group.weights.shape[-1]  # a window's cache drops what came before
        at = group.layer, group.heads, slice(max(0, now.start - start), max(0, now.stop - start))
        for name, keys in (
            ("share", (len(head), start)),
            ("sink", (0, 1)),
            ("rest", (max(1, len(head)), start)),
        ):
            first, end = (max(0, x - oldest) for x in keys)
            seen[name][at] += group.weights[:, :, skip:, first:end].sum(-1).mean(0)

    chunks = passes.cuts(start + horizon, chunk)
    total, quiet = rows * len(chunks), None if progress is None else not progress
    with (
        tqdm(total=total, unit="chunk", desc="shares", disable=quiet, leave=False) as bar,
        attend.observed(subject, read),
    ):
        for continuation in continuations.ids:
            ids = passes.batch(head, prompts.ids, continuation)
            passes.forward(subject, ids, chunks, begin, bar)
    dims = ("layer", "head", "t")
    return xr.Dataset(
        {name: (dims, (seen[name] / rows).double().cpu().numpy()) for name in names},
        coords={
            "layer": np.arange(1, shape.layers + 1),
            "head": np.arange(1, shape.heads + 1),
            "t": np.arange(1, horizon + 1),
        },
        attrs={
            **subject.provenance,
            "prompt_tokens": prompt_tokens,
            "horizon": horizon,
            "bos": len(head),
            "prompts_sha256": prompts.sha256,
            "continuations_sha256": continuations.sha256,
        },
    )


def theta(
    share: xr.DataArray, window: Sequence[float], strength: float = 0.0
) -> NDArray[np.float64]:
    r"""Fit how fast the competitors of a share grow beside it, over a window.

    :math:`\theta = \lambda - d\,\mathrm{logit}\,\pi / d\log t`, with π measured *under* the bias:
    λ > θ says that the share grows.

    Parameters
    ----------
    share
        Of `measure`, averaged over heads: (layer, t).
    window
        First and last t.
    strength
        λ of the bias that was on; 0 for none.

    Returns
    -------
    numpy.ndarray
        One θ per layer.

    Raises
    ------
    Refused
        A window that does not fit.
    """
    first, last = decay.check_window(window, float(share.t[-1]))
    odds = share / (1 - share)
    return np.array([strength + decay.fit(share.t, row, (first, last)).alpha for row in odds])
