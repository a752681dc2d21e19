"""Which chapters the book has, and how a reader may call them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

from nohair import places
from nohair.errors import Refused

TABLE_OF_CONTENTS = "_toc.yml"


@dataclass(frozen=True)
class Chapter:
    """One notebook of a book.

    Attributes
    ----------
    source : Path
        The clean notebook, without outputs.
    root : Path
        The folder of the book it belongs to, where ``_toc.yml`` lies.
    """

    source: Path
    root: Path

    @property
    def name(self) -> str:
        """The notebook's name without its ending, such as ``01_forgetting``."""
        return self.source.stem

    @property
    def page(self) -> str:
        """The chapter's address within the book, such as ``chapters/01_forgetting``."""
        return self.source.relative_to(self.root).with_suffix("").as_posix()

    def copy_in(self, tree: Path | None = None) -> Path:
        """Where the executed copy of this chapter lies.

        Parameters
        ----------
        tree : Path, optional
            A tree of executed copies that mirrors the sources; the book's own by default.
        """
        return (tree or executed_tree(self.root)) / f"{self.page}.ipynb"


def executed_tree(root: Path) -> Path:
    """The tree of executed copies from which the book at ``root`` is built."""
    return root / places.BUILD.name / "executed"


def read(notebook: Path) -> nbformat.NotebookNode:
    """Read a notebook in nbformat 4.

    Raises
    ------
    Refused
        If the file cannot be read or holds no notebook.
    """
    try:
        return nbformat.read(notebook, as_version=4)
    except FileNotFoundError:
        raise Refused(f"{notebook} does not exist: name a notebook") from None
    except Exception as problem:  # nbformat raises whatever its parsers raise
        reason = " ".join(str(problem).split())[:120]
        raise Refused(f"{notebook} is not a notebook ({reason}): restore it") from problem


def listed(root: Path = places.ROOT) -> list[Chapter]:
    """The notebooks named in the table of contents of the book at ``root``, in reading order.

    Raises
    ------
    Refused
        If the book has no readable ``_toc.yml``.
    """
    contents = root / TABLE_OF_CONTENTS
    try:
        entries = yaml.safe_load(contents.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as problem:
        reason = " ".join(str(problem).split())
        raise Refused(f"{contents} cannot be read ({reason}): a book needs one") from problem
    sources = [root / f"{entry.removesuffix('.ipynb')}.ipynb" for entry in _pages(entries)]
    return [Chapter(source, root) for source in sources if source.is_file()]


def find(text: str, root: Path = places.ROOT) -> Chapter:
    """The chapter that a reader means by its number, its name, the word in it, or its path.

    Parameters
    ----------
    text : str
        ``"01"``, ``"01_forgetting"``, ``"forgetting"``, ``"chapters/01_forgetting"`` or the
        notebook's path.

    Raises
    ------
    Refused
        If no listed chapter answers to ``text``; the message names the nearest one.
    """
    chapters = listed(root)
    for chapter in chapters:
        if text in _calls(chapter) or Path(text).resolve() == chapter.source.resolve():
            return chapter
    calls = {call: chapter.name for chapter in chapters for call in _calls(chapter)}
    near = difflib.get_close_matches(Path(text).stem, calls, n=1)
    hint = f"did you mean '{calls[near[0]]}'? " if near else ""
    known = ", ".join(chapter.name for chapter in chapters) or "none yet"
    raise Refused(f"there is no chapter '{text}': {hint}The chapters are: {known}")


def _calls(chapter: Chapter) -> set[str]:
    number, _, word = chapter.name.partition("_")
    calls = {chapter.name, chapter.page, f"{chapter.page}.ipynb", chapter.source.name}
    return calls | {number, number.lstrip("0"), word} if number.isdigit() else calls


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, Mapping):
        for key, value in entry.items():
            if key in ("root", "file"):
                yield str(value)
            else:
                yield from _pages(value)
    elif isinstance(entry, list):
        for item in entry:
            yield from _pages(item)
