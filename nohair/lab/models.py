"""Loading a subject: a model under measurement, by preset, hub id, folder or GGUF file."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from gguf import GGUFReader
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from nohair.errors import Refused
from nohair.lab import anatomy, twins
from nohair.places import DATA, PRESETS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Subject:
    """A model under measurement, ready to be run.

    Parameters
    ----------
    name
        As it was asked for.
    model, tokenizer
        From transformers; the model is in evaluation mode and asks for no gradients.
    anatomy
        How it is put together.
    bos
        The id that its tokenizer puts before every text, or None.
    provenance
        Where the weights come from: ``model, revision, commit, weights_sha256, twin,
        twin_seed, dtype, device, note``.
    """

    name: str
    model: Any
    tokenizer: Any
    anatomy: anatomy.Anatomy
    bos: int | None
    provenance: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Where the ids have to be."""
        device: torch.device = self.model.device
        return device

    def check_room(self, prompt_tokens: int, horizon: int, head: int) -> None:
        """Refuse what does not fit into the model's positions; some families run on silently.

        Parameters
        ----------
        prompt_tokens, horizon
            P and T.
        head
            Tokens before the prompt: 1 with BOS, else 0.

        Raises
        ------
        Refused
            Head, P and T together exceed the context.
        """
        asked, context = head + prompt_tokens + horizon, self.anatomy.context
        if asked > context:
            bos = " after BOS" if head else ""
            raise Refused(
                f"{self.name} has {context} positions, {asked} are asked for "
                f"(P = {prompt_tokens}{bos}, T = {horizon}); lower P or T"
            )


@dataclass(frozen=True)
class _Source:
    """Where weights, configuration and tokenizer are, in transformers' words."""

    path: str | None
    options: dict[str, Any]
    files: tuple[Path, ...] = ()
    config: dict[str, Any] | None = None
    initializer_range: float | None = None
    tokenizer: _Source | None = None
    revision: str | None = None
    note: str = ""


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Read the subjects that the project names itself, from ``data/presets/*.yml``."""
    table: dict[str, dict[str, Any]] = {}
    for path in sorted(PRESETS.glob("*.yml")):
        table |= yaml.safe_load(path.read_text("utf8"))
    return table


def missing(preset: str) -> str | None:
    """Say why a preset cannot be had on this machine, with the mend; None if it can."""
    try:
        _locate(preset, None)
    except Refused as refusal:
        return str(refusal)
    return None


def load(
    spec: str,
    revision: str | None = None,
    twin: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Subject:
    """Load a model to be measured.

    Parameters
    ----------
    spec
        A preset's name, a hub id, a local folder, or a GGUF file; what has revisions may name one:
        ``tiny@step64``, ``EleutherAI/pythia-70m@step1000``.
    revision
        The same apart: branch, tag or commit on the hub, or a step of a run that ``nohair train``
        made; by default the hub's ``main``, the run's last step.
    twin
        None for the model itself; ``init``, ``config`` or ``permuted`` for its untrained
        counterpart, see `nohair.lab.twins`. A preset without weights is an ``init`` twin
        unless told otherwise.
    dtype
        ``float32``, ``bfloat16`` or ``float16``.
    device
        ``auto`` takes a GPU where there is one.
    seed
        Of the twin's weights.
    trust_remote_code
        Let the hub's own Python run. Off unless you know the author.

    Raises
    ------
    Refused
        Unknown model, dtype, device, twin or architecture; weights that are missing, truncated
        or of another hash than the preset states.
    """
    twins.check(twin)
    if not spec.strip():
        raise Refused("no model is named; give a preset, hub id, folder or GGUF file")
    if dtype not in DTYPES:
        raise Refused(f"dtype {dtype!r} is not known; choose {', '.join(DTYPES)}")
    place = _device(device)
    name, at = split(spec)
    if at is not None and revision is not None:
        raise Refused(f"{spec} and revision {revision!r} name a revision each; give one of them")
    revision = at or revision
    source = _locate(name, revision)
    source.options["trust_remote_code"] = trust_remote_code
    with _quiet():
        config = _config(spec, source)
        shape = anatomy.describe(config)
        tokenizer = _tokenizer(spec, source)
        if source.config is not None:
            twin = twin or "init"
            if twin == "permuted":
                raise Refused(f"preset {spec!r} has no weights to permute; use init or config")
        if twin in ("init", "config"):
            model = twins.fresh(config, twin, seed, DTYPES[dtype])
        else:
            model = _weights(spec, source, DTYPES[dtype])
            if twin == "permuted":
                twins.permute(model, seed)
    model.to(place).eval().requires_grad_(False)
    provenance = {
        "model": name,
        "revision": revision or source.revision,
        "commit": getattr(config, "_commit_hash", None),
        "weights_sha256": {p.name: _sha256(p) for p in source.files},
        "twin": twin,
        "twin_seed": None if twin is None else seed,
        "dtype": dtype,
        "device": str(place),
        "note": source.note,
    }
    return Subject(spec, model, tokenizer, shape, _bos(tokenizer), provenance)


def split(spec: str) -> tuple[str, str | None]:
    """Take a revision off a model's name; one that is a preset or a path as it stands has none."""
    name, mark, revision = spec.rpartition("@")
    if not mark or spec in presets() or Path(spec).expanduser().exists():
        return spec, None
    if not (name and revision):
        raise Refused(f"model {spec!r}: give MODEL@REVISION, or a model alone")
    return name, revision


def redraw(subject: Subject, seed: int) -> Subject:
    """Draw the weights of an untrained subject anew, by the same recipe.

    Parameters
    ----------
    subject
        Loaded as an ``init`` or ``config`` twin.
    seed
        Of the new weights.

    Raises
    ------
    Refused
        Its weights were not drawn from a recipe; a negative seed.
    """
    twin = subject.provenance["twin"]
    twins.check_drawn(twin)
    if seed < 0:
        raise Refused(f"seed = {seed}: give a whole number of at least 0")
    model = twins.fresh(subject.model.config, twin, seed, subject.model.dtype)
    model.to(subject.device).eval().requires_grad_(False)
    return replace(subject, model=model, provenance=subject.provenance | {"twin_seed": seed})


def opened(subject: Subject) -> Subject:
    """Give a subject a first token that all runs share, though its tokenizer puts none.

    That is the tokenizer's begin-of-sequence token, or the one that ends a text.

    Raises
    ------
    Refused
        The tokenizer has neither.
    """
    tokenizer = subject.tokenizer
    for token in (subject.bos, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return replace(subject, bos=int(token))
    raise Refused(f"{subject.name}: its tokenizer has no token that begins or ends a text")


def _device(device: str) -> torch.device:
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator or torch.device("cpu")
    try:
        return torch.zeros(1, device=device).cpu().to(device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise Refused(f"device {device!r} cannot be used here ({reason}); try cpu") from None


def _locate(spec: str, revision: str | None) -> _Source:
    path = Path(spec).expanduser()
    try:
        here = spec in presets() or path.exists()
    except OSError as error:
        raise Refused(f"model {spec[:40]!r}… cannot be a path ({error.strerror})") from None
    if spec in presets() and "trained" in presets()[spec]:
        return _step(spec, DATA / presets()[spec]["trained"], revision)
    if path.is_dir() and not (path / "config.json").is_file() and any(path.glob("step*")):
        return _step(spec, path, revision)
    if revision is not None and here:
        raise Refused(
            f"revision {revision!r}: {spec} has none; only the hub and the folders of `nohair "
            "train` do"
        )
    if spec in presets():
        return _preset(spec, presets()[spec])
    if path.is_file():
        return _gguf(path)
    if path.suffix.lower() == ".gguf":
        raise Refused(f"GGUF file {spec} does not exist; check the path")
    if path.is_dir():
        if (path / "config.json").is_file():
            return _folder(path)
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _gguf(found[0])
        raise Refused(
            f"folder {spec} holds no config.json and {len(found)} GGUF files; "
            "name a model's folder or one GGUF file"
        )
    if not HUB_ID.fullmatch(spec):
        raise Refused(f"model {spec!r} is no preset, folder, GGUF file or hub id{_hint(spec)}")
    return _Source(spec, {"revision": revision or "main"})


def _hint(spec: str) -> str:
    near = difflib.get_close_matches(spec, presets(), 1)
    return f"; did you mean {near[0]!r}?" if near else "; `nohair models` lists the presets"


def _preset(name: str, entry: dict[str, Any]) -> _Source:
    if "config" in entry:
        tokenizer = _locate(entry["tokenizer"], None)
        return _Source(None, {}, config=entry["config"], tokenizer=tokenizer)
    packed = entry["gguf"]
    package = importlib.util.find_spec(packed["package"])  # found, not imported: it needs more
    if package is None or package.origin is None:
        raise Refused(f"preset {name!r} is not on this disk; {packed['install']}")
    path = Path(package.origin).parent / packed["file"]
    if not path.is_file() or _sha256(path) != packed["sha256"]:
        raise Refused(
            f"preset {name!r}: {path.name} is missing, truncated or altered (its sha256 is not "
            f"the preset's); {packed['install']} --force-reinstall"
        )
    return _Source(
        str(path.parent),
        {"gguf_file": path.name},
        (path,),
        initializer_range=entry.get("initializer_range"),
        note=entry.get("note", ""),
    )


def _folder(path: Path) -> _Source:
    files, local = tuple(sorted(path.glob("*.safetensors"))), {"local_files_only": True}
    own, shared = ((place / "tokenizer_config.json").is_file() for place in (path, path.parent))
    tokenizer = _Source(str(path.parent), local.copy()) if shared and not own else None
    return _Source(str(path), local, files, tokenizer=tokenizer)


def _step(spec: str, run: Path, revision: str | None) -> _Source:
    """Find a step of a training run, the last unless named."""
    steps = sorted(int(path.name[4:]) for path in run.glob("step*") if path.name[4:].isdigit())
    names = [f"step{step}" for step in steps]
    if revision is None and names:
        revision = names[-1]
    if revision not in names:
        raise Refused(f"{spec} has no {revision or 'steps'!r}; it has {', '.join(names) or 'none'}")
    return replace(_folder(run / revision), revision=revision)


def _gguf(path: Path) -> _Source:
    try:
        end = max(int(t.data_offset) + int(t.n_bytes) for t in GGUFReader(path).tensors)
    except (ValueError, IndexError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise Refused(
            f"GGUF file {path} is truncated or no GGUF ({reason}); fetch it again"
        ) from None
    if path.stat().st_size < end:
        raise Refused(
            f"GGUF file {path} is truncated: {path.stat().st_size} bytes of {end}; fetch it again"
        )
    return _Source(str(path.parent), {"gguf_file": path.name}, (path,))


def _config(spec: str, source: _Source) -> Any:
    if source.config is not None:
        shape = dict(source.config)
        shape |= {"bos_token_id": None, "eos_token_id": None}  # the defaults lie beyond the table
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    with _refusals(spec, source):
        config = AutoConfig.from_pretrained(source.path, **source.options)
    if source.initializer_range is not None:
        config.initializer_range = source.initializer_range
    return config


def _weights(spec: str, source: _Source, dtype: torch.dtype) -> Any:
    with _refusals(spec, source):
        options = dict(source.options)
        if "gguf_file" not in options:
            options["use_safetensors"] = True  # never a pickle: loading one runs its code
        model, report = AutoModelForCausalLM.from_pretrained(
            source.path, dtype=dtype, output_loading_info=True, **options
        )
    if missing := sorted(report["missing_keys"]):  # drawn at random by the loader
        raise Refused(
            f"weights of {spec!r} lack {len(missing)} of the model's tensors, "
            f"{missing[0]} among them; fetch them again"
        )
    return model


def _tokenizer(spec: str, source: _Source) -> Any:
    source = source.tokenizer or source
    with _refusals(spec, source):
        return _read_tokenizer(source.path, **source.options)


@cache  # a GGUF's takes seconds, and the presets of untrained networks share one
def _read_tokenizer(path: str | None, **options: Any) -> Any:
    return AutoTokenizer.from_pretrained(path, **options)


@contextmanager
def _refusals(spec: str, source: _Source) -> Iterator[None]:
    """Turn what the loader throws at bad input into one line that names the mend."""
    try:
        yield
    except Exception as error:  # the loaders throw anything at a damaged file, Exception itself too
        if "trust_remote_code" in str(error):
            raise Refused(
                f"model {spec!r} wants to run code of its own; pass --trust-remote-code "
                "(trust_remote_code=True) only if you know its author"
            ) from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, OSError) and "revision" in source.options:
            raise Refused(
                f"model {spec!r} is no preset, no folder here, and cannot be had from the hub "
                f"({reason}); check its name and the network{_hint(spec)}"
            ) from None
        raise Refused(f"model {spec!r} cannot be read: {reason}; fetch it again") from None


def _bos(tokenizer: Any) -> int | None:
    first = tokenizer("a").input_ids[0]
    return int(first) if first == tokenizer.bos_token_id else None


@cache
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the loaders' bars and advice off everything but a terminal.

    Reading a GGUF draws a bar that no setting turns off, hence the redirection.
    """
    if sys.stderr.isatty():
        yield
        return
    libraries = (transformers_logging, hub_logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
