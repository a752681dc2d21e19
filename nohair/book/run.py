"""Execute one chapter, and publish what it gave only when it is whole.

papermill drives the cells. Around it stand the promises of the book: parameters are checked
before a kernel starts, the kernel is the interpreter that runs this very line, and the executed
copy that was there before stays until a complete one takes its place.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from nohair.book import stamp
from nohair.book.chapters import Chapter, read
from nohair.book.parameters import Value, check
from nohair.errors import Failed, Refused

Progress = Callable[[int, int], None]

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}

# What a shell may ask of matplotlib, of colours and of progress bars is for its own terminal, not
# for a page: MPLBACKEND=Agg, for one, makes every figure vanish.
_UNWANTED = {"MPLBACKEND", "PYTHONWARNINGS"}
_QUIET = {
    "NO_COLOR": "1",
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}

# A failure is said in one line, by Failed, and not in another by papermill's logger as well.
logging.getLogger("papermill").addHandler(logging.NullHandler())

_BAR = re.compile(r"\d+%\|.*\||\d(it/s|s/it)\b")
_NO_AXES = re.compile(r"<Figure size \S+ with 0 Axes>")


@dataclass(frozen=True)
class Outcome:
    """What a run left.

    Attributes
    ----------
    notebook : Path
        The executed copy.
    parameters : dict
        The full parameters that it was run with.
    seconds : float
        How long the cells took when they ran.
    executed : bool
        False if the copy was fresh already and nothing had to run.
    """

    chapter: Chapter
    notebook: Path
    parameters: dict[str, Value]
    seconds: float
    executed: bool


def run(
    chapter: Chapter,
    given: Mapping[str, Value] | None = None,
    *,
    tree: Path | None = None,
    timeout: float | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Execute a chapter, unless its executed copy is fresh for these parameters.

    Parameters
    ----------
    chapter : Chapter
        The chapter to run. Its kernel works in the notebook's own folder.
    given : mapping, optional
        Values for some of its parameters; the others keep their defaults.
    tree : Path, optional
        The tree of executed copies to write into; the book's own by default. Notebooks that
        failed are kept for inspection in the folder ``failed`` beside it.
    timeout : float, optional
        The longest a single cell may take, in seconds.
    force : bool
        Run even if the executed copy is fresh.
    progress : callable, optional
        Called as ``progress(cell, cells)`` when a code cell starts, counted from 1.

    Raises
    ------
    Refused
        If the notebook or the parameters are not in order, before a kernel starts; or if a cell
        refuses what it was given.
    Failed
        If the chapter did not run to its end, or left something that cannot be published. The
        earlier executed copy is as it was.
    """
    parameters = check(chapter, given or {})
    tree = tree and tree.resolve()
    goal = chapter.copy_in(tree)
    if goal.resolve() == chapter.source.resolve():
        raise Refused(f"the executed copy would replace {chapter.source}: choose another --tree")
    if timeout is not None and not 0 < timeout < math.inf:
        raise Refused(f"timeout = {timeout:g} s: give a positive number of seconds")
    if not force and stamp.status(chapter, parameters, tree=tree).state == "fresh":
        seconds = read(goal).metadata[stamp.KEY]["seconds"]
        return Outcome(chapter, goal, parameters, seconds, executed=False)

    depends = stamp.of(chapter, parameters)
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        # Beside the goal, hence on the same disk: only there is a rename atomic.
        with tempfile.TemporaryDirectory(prefix=f".{chapter.name}-", dir=goal.parent) as aside:
            partial = Path(aside) / goal.name
            seconds = _execute(chapter, parameters, partial, timeout, progress)
            notebook = _publishable(partial, chapter)
            notebook.metadata[stamp.KEY] = {
                "parameters": parameters,
                "stamp": depends,
                "contents": stamp.contents(notebook),
                "seconds": round(seconds, 1),
            }
            nbformat.write(notebook, partial)
            os.replace(partial, goal)
    except OSError as problem:
        raise Failed(
            f"chapter {chapter.name} cannot be written to {goal} ({problem.strerror or problem}): "
            "make room or choose another folder"
        ) from problem
    return Outcome(chapter, goal, parameters, seconds, executed=True)


def _execute(
    chapter: Chapter,
    parameters: Mapping[str, Value],
    partial: Path,
    timeout: float | None,
    progress: Progress | None,
) -> float:
    source = _prepared(chapter)
    start, profile = partial.with_name("source.ipynb"), partial.with_name("ipython")
    nbformat.write(source, start)
    profile.mkdir()
    at = _Position(len(list(_numbered(source))), progress)
    began = time.monotonic()
    try:
        papermill.execute_notebook(
            _literally(start),
            _literally(partial),
            parameters=_changed(chapter, parameters),
            kernel_name=KERNEL["name"],
            language=KERNEL["language"],
            progress_bar=False,
            # The rest is handed on to nbclient.
            kernel_manager_class=_OwnKernel,
            # A fresh profile: nobody's start-up files belong to the book.
            extra_arguments=[f"--ipython-dir={profile}"],
            resources={"metadata": {"path": str(chapter.source.parent)}},
            on_cell_execute=at.begin,
            timeout=timeout and math.ceil(timeout),
            iopub_timeout=60,
            shutdown_kernel="immediate",
        )
    except PapermillExecutionError as problem:
        if problem.ename == Refused.__name__:
            reason = " ".join(problem.evalue.split())
            raise Refused(f"chapter {chapter.name}, {at}: {reason}") from problem
        raise _failed(chapter, at, partial, _error(problem.ename, problem.evalue)) from problem
    except DeadKernelError as problem:
        reason = "the kernel died, most often for want of memory: try a smaller model or horizon"
        raise _failed(chapter, at, partial, reason) from problem
    except CellTimeoutError as problem:
        reason = f"it took longer than the {timeout:g} s that a cell may take"
        raise _failed(chapter, at, partial, reason) from problem
    except KeyboardInterrupt as problem:
        raise _failed(chapter, at, partial, "interrupted") from problem
    except RuntimeError as problem:
        raise _failed(chapter, at, partial, f"the kernel did not start ({problem})") from problem
    return time.monotonic() - began


def _prepared(chapter: Chapter) -> nbformat.NotebookNode:
    notebook = read(chapter.source)
    notebook.metadata["kernelspec"] = dict(KERNEL)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def _changed(chapter: Chapter, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """The parameters that differ from their defaults: only these need an injected cell."""
    defaults = check(chapter, {})
    return {name: value for name, value in parameters.items() if value != defaults[name]}


def _publishable(partial: Path, chapter: Chapter) -> nbformat.NotebookNode:
    """Read an executed notebook back and look at every cell: papermill's own marks prove little."""
    notebook = read(partial)
    cells = list(_numbered(notebook))
    for number, cell in cells:
        fault = _fault(cell)
        if fault:
            at = _Position(cells[-1][0], None, number)
            raise _failed(chapter, at, partial, fault)
    # papermill's metadata holds this machine's folders and clock.
    for holder in [notebook, *notebook.cells]:
        holder.metadata.pop("papermill", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


def _fault(cell: nbformat.NotebookNode) -> str | None:
    if cell.execution_count is None:
        return "it was never executed"
    for output in cell.outputs:
        if output.output_type == "error":
            return _error(output.ename, output.evalue)
        if output.output_type == "stream":
            said = output.text.strip().splitlines() or [""]
            if output.name == "stderr":
                return f"it wrote to stderr: {said[0]}"
            if _BAR.search(output.text):
                return f"it left a progress bar: {said[-1]}"
        elif "application/vnd.jupyter.widget-view+json" in output.data:
            return "it left a widget, which is dead on a page"
        elif _NO_AXES.search(output.data.get("text/plain", "")):
            return "it left an empty figure"
    promised = "figure" in cell.metadata.get("mystnb", {})
    if promised and not any(_pictures(output) for output in cell.outputs):
        return "it has a caption but left no figure"
    return None


def _error(name: str, message: str) -> str:
    return f"{name}: {message}" if message else name


def _pictures(output: nbformat.NotebookNode) -> bool:
    return any(kind.startswith("image/") for kind in output.get("data", {}))


def _numbered(notebook: nbformat.NotebookNode) -> Iterator[tuple[int, nbformat.NotebookNode]]:
    """The code cells that hold code, counted from 1 as in the source."""
    number = 0
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.strip():
            number += not _injected(cell)
            yield number, cell


def _injected(cell: nbformat.NotebookNode) -> bool:
    return "injected-parameters" in cell.metadata.get("tags", [])


@dataclass
class _Position:
    """Which code cell is running."""

    cells: int
    progress: Progress | None
    cell: int = field(default=0)

    def __str__(self) -> str:
        return f"in code cell {self.cell} of {self.cells}" if self.cell else "before its first cell"

    def begin(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        if not _injected(cell):
            self.cell += 1
            if self.progress:
                self.progress(self.cell, self.cells)


def _failed(chapter: Chapter, at: _Position, partial: Path, reason: str) -> Failed:
    """Keep what there is of the failed notebook, and say in one line what happened."""
    kept = ""
    if partial.is_file():
        # partial lies in <tree>/<folders of the page>/<aside>/.
        tree = partial.parents[len(Path(chapter.page).parts)]
        folder = tree.parent / "failed"
        copy = chapter.copy_in(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, copy)
        kept = f"; see {copy}"
    return Failed(f"chapter {chapter.name} failed {at}: {' '.join(reason.split())}{kept}")


def _literally(path: Path) -> str:
    """A path as papermill wants it, which fills in braces as a format string."""
    return str(path).replace("{", "{{").replace("}", "}}")


class _OwnKernel(AsyncKernelManager):  # type: ignore[misc]
    """The interpreter that is running, whatever kernels the notebook or its reader know."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())

    async def start_kernel(self, **options: Any) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        await super().start_kernel(env=kept | _QUIET, transport_encryption="auto", **options)
