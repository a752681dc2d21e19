"""The command line: measure a model, run chapters, build the book."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nohair import places
from nohair.errors import Failed, Incomplete, Refused

if TYPE_CHECKING:
    from nohair.decay import Fit
    from nohair.lab.protocol import Protocol

# torch and transformers take seconds to import: each command imports what it needs, so that
# --help answers at once.

app = typer.Typer(
    help="Measure how language models forget their prompt.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
SUBJECTS = {"model", "family", "others", "lengths"}  # parameters of chapters that name models
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def main() -> None:
    """Run the command line; what the input or a run did wrong is one line and an exit code."""
    try:
        app()
    except (Refused, Failed, Incomplete) as error:
        print(f"nohair: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    finally:
        _flush()


def _flush() -> None:
    """Hand over what was printed; a reader that has gone away (`| head`) is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help="Preset, hub id, local folder or GGUF file.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub; also MODEL@REVISION.")
    ] = None,
    twin: Annotated[
        str | None, typer.Option(help="Untrained counterpart: init, config or permuted.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="P, tokens per prompt.")] = 32,
    horizon: Annotated[int, typer.Option(help="T, tokens per continuation.")] = 1024,
    prompts: Annotated[int, typer.Option(help="K, how many prompts.")] = 8,
    continuations: Annotated[int, typer.Option(help="How many continuations.")] = 4,
    continuation: Annotated[
        str, typer.Option(help="Their kind: text, shuffled, random or generated.")
    ] = "text",
    window: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Fit from t to t; 16 to T when left out (1 to T if T < 64)."),
    ] = None,
    metric: Annotated[str, typer.Option(help="l2, relative or angle.")] = "l2",
    bias: Annotated[
        str, typer.Option(help="Strength λ of a bias against dilution, or `exact`, head by head.")
    ] = "0",
    bias_from: Annotated[int, typer.Option(help="t at which the bias is zero.")] = 16,
    bos: Annotated[bool, typer.Option(help="Let the tokenizer's own first token precede.")] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, …")] = "auto",
    chunk: Annotated[int, typer.Option(help="Tokens per forward pass.")] = 512,
    seed: Annotated[int, typer.Option(help="Of texts, sampling, twin and bootstrap.")] = 0,
    texts: Annotated[
        Path, typer.Option(help="Folder with prompts/*.txt and continuations/*.txt.")
    ] = places.TEXTS,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's own Python run.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The record's path; _build/records/… when left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how fast one model forgets its prompt, layer by layer.

    Prints alpha with its interval, saves the record (NetCDF), its summary (JSON) and a figure
    (SVG). Examples:

      nohair measure smollm2-135m

      nohair measure smollm2-135m --twin init --json

      nohair measure EleutherAI/pythia-70m --revision step1000 --window 32 1024

      nohair measure tiny@step64 --bias 1 --horizon 960

      nohair measure ./my-model --prompt-tokens 64 --horizon 4096 --out pilot.nc
    """
    from nohair import decay, records
    from nohair.lab import distances, models
    from nohair.lab.protocol import Protocol, run
    from nohair.summary import summarise

    strength = bias if bias == "exact" else _number(bias)
    protocol = Protocol(
        prompts,
        prompt_tokens,
        continuations,
        horizon,
        continuation,
        bos,
        seed,
        bias=strength,
        bias_from=bias_from,
    )
    window = window or (16 if horizon >= 64 else 1, horizon)
    decay.check_window(window, horizon)
    distances.check_metric(metric)
    name = stem(model, revision, twin, protocol, window, metric, dtype)
    path = records.writable(out or places.BUILD / "records" / f"{name}.nc")
    subject = models.load(
        model, revision, twin, dtype, device, seed=seed, trust_remote_code=trust_remote_code
    )
    record = run(subject, protocol, folder=texts, chunk=chunk)
    distance = distances.metric(record, metric)
    fits = decay.profile(distance.t, distance, window, floor=distance.floor, seed=seed)
    summary = summarise(record, distance, fits)
    records.save(record, path, summary)
    figure = _draw(distance, fits[-1], path.with_suffix(".svg"))
    if as_json:
        print(json.dumps(summary, allow_nan=False))
        return
    _table(summary, distance)
    print(f"record  {path}\nfigure  {figure}")


def stem(
    model: str,
    revision: str | None,
    twin: str | None,
    protocol: Protocol,
    window: tuple[int, int],
    metric: str,
    dtype: str,
) -> str:
    """Name a record after its subject and every setting that is not the usual one."""
    from nohair.lab.protocol import Protocol

    usual = {**asdict(Protocol()), "window": [16, protocol.horizon], "metric": "l2"}
    settings = {**asdict(protocol), "window": list(window), "metric": metric}
    usual["dtype"], settings["dtype"] = "float32", dtype
    changed = [f"{name} {value}" for name, value in settings.items() if value != usual[name]]
    subject = [model.replace("/", "--")]
    subject += [f"at {revision}"] if revision else []
    subject += [f"twin {twin}"] if twin else []
    return re.sub(r"[^\w.-]+", "-", " ".join([*subject, *changed])).strip("-._")


def _number(bias: str) -> float:
    try:
        return float(bias)
    except ValueError:
        raise Refused(f"bias = {bias!r}: give a number (the strength λ) or exact") from None


def given_model(spec: str) -> str:
    """Make the path of a model absolute: a chapter's kernel works in another folder."""
    from nohair.lab.models import presets, split

    name, revision = split(spec)
    path = Path(name).expanduser()
    if name in presets() or not path.exists():
        return spec
    return str(path.resolve()) + (f"@{revision}" if revision else "")


def _table(summary: dict[str, Any], distance: Any) -> None:
    horizon = summary["horizon"]
    mean = distance.mean(("continuation", "pair"))
    shown = sorted({1, min(16, horizon), min(128, horizon), horizon})
    name = summary["model"] + (f"@{summary['revision']}" if summary["revision"] else "")
    twin = f", twin {summary['twin']}" if summary["twin"] else ""
    start, end = summary["window"]
    print(
        f"{name}{twin}: {summary['metric']} distance, "
        f"P = {summary['prompt_tokens']}, t in [{start}, {end}], {summary['level']:.0%} intervals"
    )
    heads = [f"D({t})" for t in shown]
    print("".join(f"{head:>10}" for head in ["layer", "α", "low", "high", *heads, "floor"]))
    for row in summary["layers"]:
        name = "final" if row["site"] == "final" else row["layer"]
        values = [float(mean.sel(layer=row["layer"], t=t)) for t in shown]
        cells = [f"{name:>10}"]
        if row["alpha"] is None:
            cells.append(f"{'no decay measurable':>30}")
        else:
            cells += [f"{row[key]:>10.3f}" for key in ("alpha", "low", "high")]
        print("".join([*cells, *(f"{v:>10.3g}" for v in values), f"{row['floor']:>10.1e}"]))


def _draw(distance: Any, last: Fit, path: Path) -> Path:
    import matplotlib.pyplot as plt

    from nohair import plots

    plots.use()
    figure, ax = plt.subplots()
    layers = distance.sizes["layer"] - 1
    title = f"after the final norm: α = {last}"
    plots.curves(ax, distance.mean(("continuation", "pair")), max(1, layers // 6), title)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


@app.command()
def train(
    family: Annotated[str, typer.Option(help="gpt_neox or llama.")] = "gpt_neox",
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the texts.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 2048,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-3,
    keep: Annotated[
        list[int] | None, typer.Option(help="Keep the weights of this step; all when left out.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of *.txt; the State of the Union when left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; _build/train/… when left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small model and keep its checkpoints at steps 0, 1, 2, 4, … and the last.

    After an interrupt the same command goes on where it stopped. Examples, which made the families
    that come with the book:

      nohair train

      nohair train --seed 1 --steps 512 --keep 512

      nohair train --context 512 --batch 16 --steps 512 --keep 512 --out _build/train/short

      nohair train --family llama --steps 512 --keep 64 --keep 512

    What was trained is a model like any other: nohair measure _build/train/gpt_neox-seed0@step64
    """
    from nohair.lab import corpus as texts
    from nohair.lab import training

    recipe = training.Recipe(family, seed, steps, batch, context, rate, kept=keep)
    folder = out or places.BUILD / "train" / f"{family}-seed{seed}"
    done = []
    try:
        for checkpoint in training.train(recipe, texts.read(corpus), folder):
            done.append({**checkpoint.__dict__, "folder": str(checkpoint.folder or "")})
            if not as_json:
                step, loss, where = checkpoint.step, checkpoint.held_out, checkpoint.folder
                print(f"step {step:>6}  held-out loss {loss:.4f}  {where or 'not kept'}")
    except KeyboardInterrupt:
        at = training.kept_step(folder)
        print(f"nohair: interrupted; the same command goes on from step {at}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({"folder": str(folder), "checkpoints": done}))


@app.command()
def run(
    chapter: Annotated[str, typer.Argument(help="Number or name of a chapter, or `all`.")],
    model: Annotated[str | None, typer.Option(help="Short for -p model=…")] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", help="name=value, as often as needed.")
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Where executed copies go; the book's own when left out.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Longest time per cell, seconds.")] = None,
    force: Annotated[bool, typer.Option(help="Run even if nothing has changed.")] = False,
    as_json: Json = False,
) -> None:
    """Execute a chapter, or all; what is up to date already is left alone.

    A run on another model replaces the page's executed copy; give it a --tree to keep both.
    Examples:

      nohair run all

      nohair run forgetting --model EleutherAI/pythia-160m -p prompt_tokens=16

      nohair run 01 --model ./my-model --tree _build/my-model
    """
    from nohair.book import chapters, parameters
    from nohair.book.run import run as execute

    pairs = [*(parameter or []), *([] if model is None else [f"model={model}"])]
    wanted = chapters.listed() if chapter == "all" else [chapters.find(chapter)]
    jobs = [(one, parameters.parse(one, pairs)) for one in wanted]
    for _, given in jobs:
        for name in SUBJECTS & given.keys():
            given[name] = _from_here(given[name])
    outcomes = []
    for one, given in jobs:
        outcome = execute(one, given, tree=tree, timeout=timeout, force=force, progress=_cells(one))
        outcomes.append(
            {
                "chapter": one.name,
                "executed": outcome.executed,
                "seconds": round(outcome.seconds, 1),
                "notebook": str(outcome.notebook),
                "parameters": outcome.parameters,
            }
        )
        if not as_json:
            how = "executed" if outcome.executed else "up to date, last executed"
            print(f"{one.name}: {how} in {outcome.seconds:.0f} s -> {outcome.notebook}")
    if as_json:
        print(json.dumps(outcomes))


def _from_here(models: Any) -> Any:
    """Make absolute every folder that a parameter names: one, several, or the keys of a table."""
    if isinstance(models, dict):
        return {given_model(name): value for name, value in models.items()}
    if isinstance(models, list):
        return [given_model(name) for name in models]
    return given_model(models)


def _cells(chapter: Any) -> Any:
    """Tell on a terminal which cell runs; stay silent in a pipe."""
    if not sys.stderr.isatty():
        return None

    def show(cell: int, cells: int) -> None:
        end = "\n" if cell == cells else ""
        print(f"\r{chapter.name}: cell {cell} of {cells}", end=end, file=sys.stderr, flush=True)

    return show


@app.command()
def build(
    tree: Annotated[
        Path | None, typer.Option(help="The executed copies; the book's own when left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The site's folder; _build/html when left out.")
    ] = None,
) -> None:
    """Build the website from the executed chapters; refuse a stale or incomplete book.

    Example:

      nohair build && open _build/html/index.html
    """
    from nohair.book import site

    print(f"site  {site.build(tree=tree, out=out)}")


@app.command()
def check(
    tree: Annotated[
        Path | None, typer.Option(help="The executed copies; the book's own when left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say of every chapter whether its executed copy is what its sources give; 4 if one is not.

    Example:

      nohair check --json
    """
    from nohair.book import site

    states = site.states(tree=tree)
    if as_json:
        print(
            json.dumps(
                [{"chapter": s.chapter.name, "state": s.state, "why": s.why} for s in states]
            )
        )
    else:
        for state in states:
            print(state)
    if any(state.state != "fresh" for state in states):
        raise typer.Exit(Incomplete.exit_code)


@app.command()
def models(as_json: Json = False) -> None:
    """List the presets and whether each can be had on this machine.

    Example:

      nohair models --json
    """
    from nohair.lab import models as subjects

    rows = [
        {"name": name, "title": entry["title"], "mend": subjects.missing(name)}
        for name, entry in subjects.presets().items()
    ]
    if as_json:
        print(json.dumps([{**row, "here": row["mend"] is None} for row in rows]))
        return
    for row in rows:
        print(f"{row['name']:<14} {row['title']:<44} {row['mend'] or 'here'}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look over this machine: versions, kernel, device, memory, disk, browser, presets.

    Each line that is not `ok` says its mend; the exit code is then 3. Example:

      nohair doctor
    """
    from nohair.book.doctor import findings

    found = findings()
    if as_json:
        print(json.dumps([finding.__dict__ for finding in found]))
    else:
        for finding in found:
            print(f"{'ok  ' if finding.ok else 'MEND'}  {finding.name:<14} {finding.text}")
    if not all(finding.ok for finding in found):
        raise typer.Exit(Failed.exit_code)
