"""Build the website from executed chapters, and publish it only when it is whole and clean."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nohair import places
from nohair.book import chapters
from nohair.book.stamp import Status, status
from nohair.book.swap import TREE_VARIABLE
from nohair.errors import Failed, Incomplete, Refused

__all__ = ["build", "states", "status"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COMPLAINT = re.compile(r"\b(WARNING|ERROR|CRITICAL|error):")


def states(root: Path = places.ROOT, tree: Path | None = None) -> list[Status]:
    """The status of every chapter of the book at ``root``, in reading order."""
    return [status(chapter, tree=tree) for chapter in chapters.listed(root)]


def build(
    root: Path = places.ROOT,
    out: Path | None = None,
    *,
    tree: Path | None = None,
) -> Path:
    """Build the website of the book at ``root``.

    Nothing is executed. Warnings are errors. The earlier site stays until the new one is whole.

    Parameters
    ----------
    root : Path
        The book's folder.
    out : Path, optional
        The site's folder, ``_build/html`` by default. Sphinx's messages go to ``site.log`` beside
        it.
    tree : Path, optional
        The tree of executed copies; the book's own by default.

    Returns
    -------
    Path
        The site's first page.

    Raises
    ------
    Refused
        If Jupyter Book 1 is not what is installed, or ``out`` holds something else than a site.
    Incomplete
        If a chapter is missing, stale or edited; each is named.
    Failed
        If Sphinx warned or stopped; the first complaints are quoted.
    """
    _need_jupyter_book_1()
    out = (out or root / places.BUILD.name / "html").resolve()
    tree = tree and tree.resolve()
    _check_replaceable(out)
    unfit = [state for state in states(root, tree) if state.state != "fresh"]
    if unfit:
        names = ", ".join(map(str, unfit))
        raise Incomplete(
            f"the book cannot be built: {names}; `nohair run all` brings it up to date"
        )

    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.parent / "site.log"
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as aside:
        jupyter_book = "from jupyter_book.cli.main import main; main()"
        command = [sys.executable, "-c", jupyter_book, "build", str(root), "--path-output", aside]
        environment = os.environ | {
            TREE_VARIABLE: str(tree or chapters.executed_tree(root)),
            "NO_COLOR": "1",
        }
        finished = subprocess.run(
            [*command, "-W", "-n", "--keep-going", "--quiet"],
            cwd=aside,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said = _COLOUR.sub("", finished.stdout)
        log.write_text(said, encoding="utf-8")
        page = Path(aside) / "_build" / "html" / "index.html"
        if finished.returncode or not page.is_file():
            raise Failed(_complaint(said, finished.returncode, log))
        _publish(page.parent, out)
    return out / "index.html"


def _check_replaceable(out: Path) -> None:
    if out.is_dir() and ((out / ".buildinfo").is_file() or not any(out.iterdir())):
        return
    if out.exists():
        raise Refused(f"{out} holds something that is no earlier site: choose another --out")


def _need_jupyter_book_1() -> None:
    try:
        version = importlib.metadata.version("jupyter-book")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith("1."):
        raise Refused(
            f"this book needs jupyter-book<2, found {version}: "
            "run `pip install 'jupyter-book<2'` (version 2 is another program)"
        )


def _complaint(said: str, code: int, log: Path, most: int = 3) -> str:
    complaints = [line.strip() for line in said.splitlines() if _COMPLAINT.search(line)]
    complaints = list(dict.fromkeys(complaints))
    quoted = " | ".join(complaints[:most]) or f"jupyter-book ended with code {code}"
    more = f" | and {len(complaints) - most} more" if len(complaints) > most else ""
    return f"the site was not built: {quoted}{more}; all of it is in {log}"


def _publish(new: Path, out: Path) -> None:
    """Put a built site in its place; if that fails the earlier one is put back."""
    earlier = new.with_name("earlier")
    if out.exists():
        os.rename(out, earlier)
    try:
        os.rename(new, out)
    except BaseException:
        if earlier.exists():
            shutil.rmtree(out, ignore_errors=True)
            os.rename(earlier, out)
        raise
