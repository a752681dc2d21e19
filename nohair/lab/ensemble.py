"""Untrained networks drawn again and again from one recipe, on random tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from tqdm import tqdm

from nohair.errors import Refused
from nohair.lab import distances, models, texts, twins


def measure(
    spec: str,
    twin: str = "init",
    *,
    prompt_tokens: Sequence[int] = (32,),
    horizon: int = 1024,
    seeds: int = 3,
    prompts: int = 4,
    seed: int = 0,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure the distance after every block, for several draws of the weights.

    Parameters
    ----------
    spec
        Whose shape is taken, as for `nohair.lab.models.load`.
    twin
        ``init`` or ``config``: where the weights are drawn from, see `nohair.lab.twins`.
    prompt_tokens, horizon
        P, each of which is measured, and T.
    seeds
        Draws of the weights; each has its own random prompts and one random continuation.
    prompts
        K.
    seed
        Of the first draw; the others count up from it.
    progress
        Show a bar; by default on a terminal only.

    Returns
    -------
    xarray.Dataset
        ``distance`` (seed, prompt_tokens, layer, t): root mean square over pairs, in the units of
        the residual stream; ``attrs["recipe"]`` describes the weights as
        `nohair.theory.untrained.Initialisation` does.

    Raises
    ------
    Refused
        No P, one P twice, or no seed; weights that are not drawn from a recipe; otherwise as
        `nohair.lab.distances.measure`.
    """
    sizes = [int(size) for size in np.atleast_1d(prompt_tokens)]
    if not sizes or len(set(sizes)) < len(sizes) or seeds < 1:
        raise Refused(
            f"prompt_tokens = {sizes}, seeds = {seeds}: ask for at least one of each, each P once"
        )
    drawn = range(seed, seed + seeds)
    subject = models.load(spec, twin=twin, seed=seed)
    recipe = twins.recipe(subject.model, twin)
    draws, quiet = [], None if progress is None else not progress
    with tqdm(total=seeds * len(sizes), desc=spec, disable=quiet, leave=False) as bar:
        for one in drawn:
            subject = models.redraw(subject, one)
            shared = texts.continuations(subject, 1, horizon, "random", seed=one)
            rows = []
            for length in sizes:
                given = texts.prompts(subject, prompts, length, kind="random", seed=one)
                record = distances.measure(subject, given, shared, floor=False, progress=False)
                blocks = record.distance.where(record.site == "block", drop=True).astype(float)
                rows.append(np.sqrt((blocks**2).mean(("continuation", "pair"))))
                bar.update()
            draws.append(xr.concat(rows, "prompt_tokens"))
    distance = xr.concat(draws, "seed").assign_coords(seed=list(drawn), prompt_tokens=sizes)
    about = {"model": spec, "twin": twin, "recipe": recipe, "prompts": prompts}
    about |= {"prompt_sizes": sizes, "horizon": horizon, "seeds": list(drawn), "tokens": "random"}
    about |= {key: subject.provenance[key] for key in ("dtype", "device")}
    return xr.Dataset({"distance": distance.drop_vars("site", errors="ignore")}, attrs=about)
