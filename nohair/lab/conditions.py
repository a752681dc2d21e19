r"""The theorem's conditions and constants, measured on a network and the texts it reads.

Two prompts, one continuation, as in `nohair.lab.distances`; of the same forward passes queries,
keys, attention and norms are read. "Largest" and "smallest" are meant over the texts given, so what
comes out are constants of the bound for *these* texts. The book's page "The proof" says what each
one is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite, log, nan
from typing import Any, Literal

import numpy as np
import xarray as xr
from tqdm import tqdm

from nohair.errors import Failed, Refused
from nohair.lab import anatomy, operators, passes
from nohair.lab.models import Subject
from nohair.lab.operators import Array
from nohair.lab.texts import Texts
from nohair.lab.watch import ROLES, Watch
from nohair.words import power_of_ten, scientific

Status = Literal["holds", "holds with these constants", "not of this class"]


def inspect(
    subject: Subject,
    prompts: Texts,
    continuations: Texts,
    *,
    chunk: int = 128,
    bos: bool = True,
    progress: bool | None = None,
) -> xr.Dataset:
    r"""Measure the theorem's conditions and constants.

    Parameters
    ----------
    subject
        The model.
    prompts, continuations
        Ids of shape (K, P) and (C, T).
    chunk
        Tokens per forward pass. Of the attention weights no more ever exists than those of one
        layer, one group of heads (of one key head) and one chunk.
    bos
        Put the tokenizer's own first token before each prompt, if it has one. All runs share it:
        it counts neither in P nor among the keys of ``beta``.
    progress
        Show a bar; by default on a terminal only.

    Returns
    -------
    xarray.Dataset
        By layer and head: ``logit``, the largest :math:`|s|` that enters the softmax (scaled, after
        rotary positions and softcap); ``logit_bound``, what :math:`\sigma \sup|q| \sup|k|` or the
        softcap allows on these texts; ``logit_ceiling``, what the weights allow on any text;
        ``beta``, the largest :math:`(P + t) a_{tj}` (with a window: the largest :math:`(P + t)/P`
        times the prompt's share); ``gamma``, :math:`\|W_O W_V\|`; ``query_norm``, ``key_norm``,
        :math:`\|W_Q\|, \|W_K\|` (times what rotary positions stretch, 1 for most); ``chi``. By
        layer, head and t, mean over all runs: ``share`` of the prompt and of the sequence's
        ``first`` token (BOS, where there is one) in the attention, and ``peak``, the largest share
        of one key that can differ between the runs. By layer and norm:
        ``rms`` (LayerNorm: standard deviation), the smallest that enters it, and ``nu``, the
        Lipschitz constant that follows; nan where a block has no such norm. By layer: ``state``, U;
        ``mu``, Lipschitz constant of the MLP; ``window`` (nan where all keys are seen). By layer
        and pair: ``difference``, M, and ``opening``, the same of the prompt's first token alone.
        One each: ``final_rms``, ``final_nu``, and ``kappa``, which carries a difference after the
        last block to the logits.

        Queries, norms and MLPs are read on the continuation; keys, U and the norms of queries and
        keys at every position.

    Raises
    ------
    Refused
        Fewer than two prompts; no token; P + T beyond the model's positions.
    Failed
        A logit, a state or the map to the logits is not finite; the place is named.
    """
    head = [subject.bos] if bos and subject.bos is not None else []
    count, prompt_tokens = prompts.ids.shape
    rows, horizon = continuations.ids.shape
    subject.check_room(prompt_tokens, horizon, len(head))
    if count < 2:
        raise Refused(f"{count} prompt: a difference needs at least 2 prompts")
    if min(prompt_tokens, rows, horizon) < 1:
        raise Refused(
            f"P = {prompt_tokens}, C = {rows}, T = {horizon}: give at least 1 token each and 1 "
            "continuation"
        )
    watch = Watch(subject, count, len(head), prompt_tokens, horizon)
    chunks = passes.cuts(len(head) + prompt_tokens + horizon, chunk)
    total, quiet = rows * len(chunks), None if progress is None else not progress
    with (
        tqdm(total=total, unit="chunk", desc="inspecting", disable=quiet, leave=False) as bar,
        watch.installed(),
    ):
        for continuation in continuations.ids:
            ids = passes.batch(head, prompts.ids, continuation)
            passes.forward(subject, ids, chunks, watch.begin, bar)
    shape = subject.anatomy
    return xr.Dataset(
        _constants(subject, watch.result(rows)),
        coords={
            "layer": np.arange(1, shape.layers + 1),
            "head": np.arange(1, shape.heads + 1),
            "norm": list(ROLES),
            "pair": [f"{a} | {b}" for a, b in combinations(prompts.names, 2)],
            "t": np.arange(1, horizon + 1),
        },
        attrs={
            **subject.provenance,
            "prompt_tokens": prompt_tokens,
            "horizon": horizon,
            "bos": len(head),
            "parallel": shape.parallel,
            "prompts_sha256": prompts.sha256,
            "continuations_sha256": continuations.sha256,
        },
    )


def constants(report: xr.Dataset, pair: str | None = None) -> list[dict[str, Any]]:
    """List the arguments of `nohair.theory.bound.block`, one dictionary per block.

    Parameters
    ----------
    report
        What `inspect` returned.
    pair
        Whose difference M; by default the largest of all pairs.

    Raises
    ------
    Refused
        No such pair.
    """
    if pair is not None and pair not in report.pair:
        raise Refused(f"pair {pair!r} was not inspected; one is {report.pair.values[0].item()!r}")
    gaps = report.difference.max("pair") if pair is None else report.difference.sel(pair=pair)
    after = report.nu.fillna(1.0)  # where no norm follows, nothing is multiplied
    rows = []
    for layer in report.layer.values:
        one, factor = report.sel(layer=layer), after.sel(layer=layer)
        rows.append(
            {
                "nu": float(one.nu.sel(norm="attention")),
                "nu_mlp": float(one.nu.sel(norm="mlp")),
                "gamma": one.gamma.values * float(factor.sel(norm="after attention")),
                "chi": one.chi.values,
                "beta": one.beta.values,
                "difference": float(gaps.sel(layer=layer)),
                "mu": float(one.mu) * float(factor.sel(norm="after mlp")),
                "parallel": bool(report.attrs["parallel"]),
                "window": None if np.isnan(one.window) else int(one.window),
            }
        )
    return rows


def _constants(subject: Subject, seen: dict[str, Array]) -> dict[str, Any]:
    """Join what was seen with the sizes of the weights."""
    shape, model = subject.anatomy, subject.model
    group = shape.heads // shape.kv_heads
    stretch = anatomy.rotary_scale(model)
    scale = seen["scaling"][:, None]
    nu = np.full((shape.layers, len(ROLES)), nan)
    gamma, query_norm, key_norm, ceiling = np.empty((4, shape.layers, shape.heads))
    mu = np.empty(shape.layers)
    parts = zip(
        anatomy.blocks(model), anatomy.norms(model), anatomy.projections(model), strict=True
    )
    for i, (block, norms, (query, key, value, writer)) in enumerate(parts):
        for role, norm in norms.items():
            at = i, ROLES.index(role)
            nu[at] = operators.lipschitz_of_norm(model, norm, seen["rms"][at])
        gamma[i] = operators.product_norm(writer, value.weight)
        query_norm[i] = operators.norm(query.weight) * stretch
        key_norm[i] = operators.norm(key.weight).repeat(group) * stretch
        state = operators.largest_output(model, norms["attention"], shape.width)
        longest_query = _longest(model, norms.get("query"), query, state) * stretch
        longest_key = _longest(model, norms.get("key"), key, state) * stretch
        ceiling[i] = scale[i] * longest_query * longest_key.repeat(group)
        mu[i] = operators.lipschitz_of_mlp(
            shape.family, block, *(float(seen[name][i]) for name in ("low", "high", "up"))
        )
    key_seen = seen["key"].repeat(group, axis=1)
    most = inf if shape.softcap is None else shape.softcap
    through = {role: np.nan_to_num(nu[:, [ROLES.index(role)]], nan=1.0) for role in ROLES}
    chi = (
        seen["state"][:, None]
        * scale
        * np.maximum(
            query_norm * through["query"] * key_seen, key_norm * through["key"] * seen["query"]
        )
    )
    windows = np.array([nan if w is None else w for w in shape.windows])
    gaps = np.where(np.isnan(windows)[:, None], seen["mean"], seen["most"])
    steepness = np.where(through["attention"] > 0, through["attention"], inf)  # no gain, no M
    rms = np.where(np.isinf(seen["rms"]), nan, seen["rms"])
    final_nu = operators.lipschitz_of_norm(model, anatomy.final_norm(model), rms[-1, 0])
    kappa = final_nu * operators.largest_row(model.get_output_embeddings().weight)
    if not isfinite(kappa):
        raise Failed("final norm or unembedding: weights are not finite; fetch them again")
    by_head, by_norm = ("layer", "head"), ("layer", "norm")
    return {
        "logit": (by_head, seen["logit"]),
        "logit_bound": (by_head, np.minimum(scale * seen["query"] * key_seen, most)),
        "logit_ceiling": (by_head, np.minimum(ceiling, most)),
        "beta": (by_head, seen["beta"]),
        "gamma": (by_head, gamma),
        "query_norm": (by_head, query_norm),
        "key_norm": (by_head, key_norm),
        "chi": (by_head, chi),
        "share": ((*by_head, "t"), seen["share"]),
        "first": ((*by_head, "t"), seen["first"]),
        "peak": ((*by_head, "t"), seen["peak"]),
        "rms": (by_norm, rms[:-1]),
        "nu": (by_norm, nu),
        "state": (("layer",), seen["state"]),
        "mu": (("layer",), mu),
        "window": (("layer",), windows),
        "difference": (("layer", "pair"), gaps / steepness),
        "opening": (("layer", "pair"), seen["opening"] / steepness),
        "final_rms": float(rms[-1, 0]),
        "final_nu": final_nu,
        "kappa": kappa,
    }


def _longest(model: Any, norm: Any, read: anatomy.Projection, state: float) -> Array:
    """Longest query or key of each head that the weights allow on any text."""
    heads, width, _ = read.weight.shape
    if norm is not None:
        return np.full(heads, operators.largest_output(model, norm, width))
    return operators.norm(read.weight) * state + operators.lengths(read.bias, heads)


@dataclass(frozen=True)
class Verdict:
    """How one condition of the theorem stands for one network, why, and what follows from it."""

    condition: str
    status: Status
    why: str
    follows: str


def verdicts(subject: Subject, report: xr.Dataset) -> list[Verdict]:
    """Judge every condition by what was measured.

    Parameters
    ----------
    subject
        The model.
    report
        What `inspect` said of it.
    """
    return [
        architecture(subject.model.config),
        _bounded_logits(subject.anatomy, report),
        _away_from_zero(subject.anatomy, report),
        _dilution(report),
    ]


def architecture(config: Any) -> Verdict:
    """Say whether the theorem speaks of an architecture at all; only its configuration is read.

    Raises
    ------
    Refused
        It is in neither of the tables of `nohair.lab.anatomy`.
    """
    if ways := [DEPARTURES[name] for name in anatomy.departures(config)]:
        why = "; ".join(f"{way.name}: {way.why}" for way in ways)
        follows = "; ".join(way.follows for way in ways)
        return Verdict("architecture", "not of this class", why, follows)
    shape = anatomy.describe(config)
    windows = [w for w in shape.windows if w is not None]
    everywhere = shape.layers - len(windows)
    before = f"{shape.family.norm} before attention and MLP, softmax over "
    powers = f"{everywhere - 1} power{'' if everywhere == 2 else 's'}"
    bound = f"the bound with {powers} of the logarithm"
    if not windows:
        return Verdict("architecture", "holds", before + "all keys", bound)
    if not everywhere:
        end = sum(w - 1 for w in windows)
        why, follows = "a window of keys in every block", f"no distance at all beyond t = {end}"
    else:
        why = f"all keys in {everywhere} of {shape.layers} blocks, a window of them in the others"
        follows = f"{bound}, to which windows add none"
    return Verdict("architecture", "holds", before + why, follows)


def _bounded_logits(shape: anatomy.Anatomy, report: xr.Dataset) -> Verdict:
    seen, allowed, ceiling = (
        float(report[name].max()) for name in ("logit", "logit_bound", "logit_ceiling")
    )
    condition = "bounded logits"
    follows = f"β exists: with the B of the weights e^(2B) is {power_of_ten(2 * ceiling / log(10))}"
    if shape.softcap is not None:
        why = f"the softcap lets no logit exceed {shape.softcap:g}; the largest here is {seen:.3g}"
        return Verdict(condition, "holds", why, follows)
    if shape.qk_norm:
        why = (
            f"queries and keys are normalised, which allows {scientific(ceiling, 3)} on any text; "
            f"the largest here is {seen:.3g}"
        )
        return Verdict(condition, "holds", why, follows)
    why = (
        f"the largest here is {seen:.3g}; the longest query and key allow {allowed:.3g} on these "
        f"texts, the weights {scientific(ceiling, 3)} on any text"
    )
    return Verdict(condition, "holds with these constants", why, follows)


def _away_from_zero(shape: anatomy.Anatomy, report: xr.Dataset) -> Verdict:
    before = report.rms.sel(norm=["attention", "mlp"])
    at = before.isel(before.argmin(("layer", "norm")))
    kind = "deviation" if shape.family.norm == "LayerNorm" else "rms"
    why = (
        f"smallest {kind} {float(at):.3g}, before the {at.norm.item()} of block {int(at.layer)}; "
        f"before the final norm {float(report.final_rms):.3g}"
    )
    steepest = float(report.nu.sel(norm=["attention", "mlp"]).max())
    follows = (
        f"a norm stretches differences at most {steepest:.3g}-fold, the final one "
        f"{float(report.final_nu):.3g}-fold"
    )
    return Verdict("activations away from zero", "holds with these constants", why, follows)


def _dilution(report: xr.Dataset) -> Verdict:
    keys = report.attrs["prompt_tokens"] + report.attrs["horizon"]
    peak = float(report.peak.isel(t=-1).median())
    why = (
        f"at its worst query the median head has β = {float(report.beta.median()):.3g}, the worst "
        f"head {float(report.beta.max()):.4g}; on a text of this length none can exceed {keys}. At "
        f"its end the median head gives its favourite key {peak:.2g} of its attention"
    )
    follows = (
        "no key that differs between the runs gets more than β/n of any query's attention (in a "
        "block with a window: the prompt together no more than βP/n); that says something where β "
        "is well below n"
    )
    return Verdict("dilution", "holds with these constants", why, follows)


@dataclass(frozen=True)
class Departure:
    """One way out of the theorem's class: who takes it, why it leads out, what still follows."""

    name: str
    models: str
    why: str
    follows: str


DEPARTURES = {
    one.name: one
    for one in (
        Departure(
            "post-LN",
            "the first GPT; OPT-350M",
            "the norm stands in the residual stream, and attention reads the stream itself",
            "the same proof with each norm's factor on its sub-block, so the same rate; its "
            "constants are not measured here",
        ),
        Departure(
            "post-norm",
            "OLMo 2 and 3",
            "no norm before a sub-block, but one after it, which divides by the size of what "
            "attention wrote; the mean of n unrelated vectors has a size like 1/√n",
            "formally the theorem, with the size of the stream in place of U and one more factor; "
            "only ε bounds that factor, and until then the bound of a deep network does not fall",
        ),
        Departure(
            "sandwich norm",
            "Gemma 2 and 3, GLM-4",
            "a second norm divides by the size of what attention wrote; the mean of n unrelated "
            "vectors has a size like 1/√n",
            "formally the theorem, with one more factor, which is measured here; only ε bounds "
            "that factor, and until then the bound of a deep network does not fall",
        ),
        Departure(
            "mixture of experts",
            "Mixtral, Qwen-MoE, DeepSeek, gpt-oss",
            "the router jumps: two states as close as you like can go to different experts",
            "attention dilutes as before, and where no router jumps the inequality holds",
        ),
        Departure(
            "unnormalised attention",
            "Mamba, RWKV, hybrids with them",
            "no softmax, or a recurrent state: nothing divides by the number of keys",
            "nothing; whether the prompt fades is up to the recurrence",
        ),
        Departure(
            "log-n temperature",
            "Llama 4",
            "logits grow with the number of keys, like b log n, so that β grows like n^(2b)",
            "no 1/n; for 2b < 1 a slower dilution, otherwise none",
        ),
        Departure(
            "ALiBi",
            "BLOOM, MPT",
            "logits fall without bound with the distance between query and key",
            "in one block the prompt's share falls exponentially, in every head with a slope; what "
            "relays make of it is not proved here",
        ),
    )
}
