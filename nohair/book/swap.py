"""Sphinx extension: pages show executed copies, readers download clean sources.

Sphinx reads each chapter's notebook from ``chapters/``, where it has no outputs. Just after the
file is read and before it is parsed, the text is swapped for that of its executed copy. So the
download button still gives the source, and ``jupyter-book build .`` needs no staging folder. A
copy that is missing or out of date is a Sphinx warning, which stops a build made with ``-W``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

from nohair.book import stamp
from nohair.book.chapters import Chapter, executed_tree

TREE_VARIABLE = "NOHAIR_EXECUTED"  # names another tree of executed copies

_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension to Sphinx."""
    app.connect("source-read", _swap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _swap(app: Sphinx, docname: str, content: list[str]) -> None:
    source = Path(app.env.doc2path(docname))
    if source.suffix != ".ipynb":
        return
    root = Path(app.srcdir)
    tree = Path(os.environ.get(TREE_VARIABLE) or executed_tree(root))
    chapter = Chapter(root / source.relative_to(root), root)
    app.env.note_dependency(str(chapter.copy_in(tree)))
    status = stamp.status(chapter, tree=tree)
    if status.state != "fresh":
        _log.warning("%s: run `nohair run %s`", status, chapter.name, location=docname)
    if status.state != "missing":
        content[0] = chapter.copy_in(tree).read_text(encoding="utf-8")
