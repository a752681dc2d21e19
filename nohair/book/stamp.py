"""What an executed chapter depends on, and whether that has changed since it ran.

A stamp is kept part by part, so that a stale chapter can say which file made it so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nohair.book.chapters import Chapter, read
from nohair.errors import Refused

KEY = "nohair"  # in the metadata of an executed notebook
CELLS, PARAMETERS = "its cells", "its parameters"

State = Literal["fresh", "missing", "stale", "edited"]


@dataclass(frozen=True)
class Status:
    """Whether an executed copy can be published, and if not, why."""

    chapter: Chapter
    state: State
    why: str = ""

    def __str__(self) -> str:
        return f"{self.chapter.name} is {self.state}" + (f" ({self.why})" if self.why else "")


def of(chapter: Chapter, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Hash all that the chapter's output depends on.

    Parameters
    ----------
    chapter : Chapter
        The chapter; its book's ``nohair/``, ``data/`` and ``constraints.txt`` count too.
    parameters : mapping
        The full parameters, defaults included.

    Returns
    -------
    dict
        A sha256 in hexadecimal for each part: the source cells, the parameters, each file.
    """
    cells = [
        {"type": cell.cell_type, "source": cell.source, "metadata": cell.metadata}
        for cell in read(chapter.source).cells
    ]
    parts = {CELLS: _hash_of(cells), PARAMETERS: _hash_of(dict(parameters))}
    for file in _files(chapter.root):
        parts[file.relative_to(chapter.root).as_posix()] = _digest(file.read_bytes())
    return parts


def contents(notebook: Mapping[str, Any]) -> str:
    """Hash everything that a page shows of an executed notebook: its cells with their outputs."""
    return _hash_of(notebook["cells"])


def status(
    chapter: Chapter,
    parameters: Mapping[str, Any] | None = None,
    *,
    tree: Path | None = None,
) -> Status:
    """Say whether the executed copy of a chapter still tells the truth.

    Parameters
    ----------
    parameters : mapping, optional
        The full parameters that are wanted; by default those that the copy was run with.
    tree : Path, optional
        The tree of executed copies; the book's own by default.

    Returns
    -------
    Status
        ``missing``: never run to its end. ``edited``: not what the run wrote. ``stale``: something
        it depends on has changed since. Else ``fresh``.
    """
    copy = chapter.copy_in(tree)
    if not copy.is_file():
        return Status(chapter, "missing")
    try:
        notebook = read(copy)
        record = notebook.metadata[KEY]
        recorded, written = dict(record["stamp"]), record["contents"]
        wanted = record["parameters"] if parameters is None else parameters
    except (Refused, KeyError, TypeError, ValueError):
        return Status(chapter, "edited", "its executed copy bears no stamp")
    if contents(notebook) != written:
        return Status(chapter, "edited", "its executed copy differs from what the run wrote")
    why = _differences(recorded, of(chapter, wanted))
    return Status(chapter, "stale", why) if why else Status(chapter, "fresh")


def _differences(recorded: Mapping[str, str], current: Mapping[str, str]) -> str:
    changed = [part for part in current if part in recorded and current[part] != recorded[part]]
    lines = {
        "changed": changed,
        "new": [part for part in current if part not in recorded],
        "gone": [part for part in recorded if part not in current],
    }
    said = [f"{', '.join(_few(parts))} {verb}" for verb, parts in lines.items() if parts]
    return "; ".join(said) + (" since it ran" if said else "")


def _few(parts: list[str], most: int = 3) -> list[str]:
    return parts if len(parts) <= most else [*parts[:most], f"{len(parts) - most} more"]


def _files(root: Path) -> Iterator[Path]:
    for folder in ("nohair", "data"):
        for path in sorted((root / folder).rglob("*")):
            names = path.relative_to(root).parts
            passing = any(name.startswith(".") or name == "__pycache__" for name in names)
            if path.is_file() and not passing:
                yield path
    if (root / "constraints.txt").is_file():
        yield root / "constraints.txt"


def _hash_of(value: Any) -> str:
    return _digest(json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
