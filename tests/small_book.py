"""A book of two pages in a few seconds: what the runner and the site are tried on."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import nbformat

from nohair import places
from nohair.book.chapters import Chapter, find

PARAMETERS = """
size = 3
rate = 0.5
flag = True
revision = None
metric = "l2"
windows = [16, 1024]
"""

FIGURE = {
    "tags": ["hide-input"],
    "mystnb": {
        "image": {"alt": "A straight line falling on logarithmic axes."},
        "figure": {
            "name": "fig-decay",
            "caption": "The distance falls as a power of the position: at *t* = 100 it is a tenth "
            "of what it was at *t* = 1. The dashed line is the reference $1/t$.",
        },
    },
}

PLOT = """
import matplotlib.pyplot as plt
import numpy as np
from matplotlib_inline.backend_inline import set_matplotlib_formats

set_matplotlib_formats("svg")
t = np.geomspace(1, 1000, 50)
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained", facecolor="#fbfbf9")
axis.loglog(t, t**-rate, label="distance")
axis.loglog(t, 1 / t, "k--", lw=1, label="$1/t$")
axis.set(xlabel="position $t$", ylabel="distance $D(t)$", facecolor="#fbfbf9")
axis.legend(frameon=False);
"""

TABLE = """
import pandas as pd

rows = {"layer": [1, 15, 30], "alpha": [0.9, 0.7, 0.6], "low": [0.8, 0.6, 0.5],
        "distance at t = 16": [1.2, 1.3, 1.4], "distance at t = 1024": [0.2, 0.3, 0.4],
        "floor": [1e-6, 1e-6, 2e-6]}
pd.DataFrame(rows).style.hide(axis="index").format(precision=2)
"""

INTRO = r"""
# A small book

It has what the large one has: prose, an equation, a citation {cite:p}`knuth1984`, an admonition
and a chapter with outputs. The distance at position $t$ decays as

$$
D(\ell, t) \approx C_\ell \, t^{-\alpha_\ell}, \qquad
\alpha(t) = -\frac{\mathrm{d} \log D}{\mathrm{d} \log t}.
$$ (eq-decay)

```{admonition} In one sentence
:class: important
A prompt is forgotten slowly, as {eq}`eq-decay` says, and {doc}`01_small` shows it.
```

| sign | meaning | unit |
|---|---|---|
| $t$ | position in the continuation | tokens |
| $D$ | distance between the states that two prompts leave behind | that of the residual stream |

```{bibliography}
```
"""

BIBLIOGRAPHY = """
@article{knuth1984,
  author = {Knuth, Donald E.},
  title = {Literate Programming},
  journal = {The Computer Journal},
  year = {1984}
}
"""

PROSE = r"""
## What was measured

{numref}`fig-decay` has a line of slope $-\alpha$. Its size is set by a parameter, and the rest of
this paragraph is here to be read: a line should hold about seventy letters, and the space between
two lines should let the eye find the next one.

:::{note}
Nothing on this page was typed by hand.
:::
"""


def notebook(*cells: tuple[str, str, dict]) -> nbformat.NotebookNode:
    """A notebook of (kind, source, metadata) cells that names somebody's private kernel."""
    made = nbformat.v4.new_notebook()
    made.metadata["kernelspec"] = {"name": "private", "display_name": "P", "language": "python"}
    makers = {"code": nbformat.v4.new_code_cell, "text": nbformat.v4.new_markdown_cell}
    for number, (kind, source, metadata) in enumerate(cells):
        source = textwrap.dedent(source).strip("\n")
        made.cells.append(makers[kind](source, metadata=metadata, id=f"cell-{number}"))
    return made


def write_chapter(root: Path, code: str, parameters: str = PARAMETERS) -> Chapter:
    """Give the book at ``root`` a single chapter: a parameters cell, then ``code``."""
    (root / "chapters").mkdir(parents=True, exist_ok=True)
    toc = "format: jb-book\nroot: chapters/intro\nchapters:\n  - file: chapters/01_small\n"
    (root / "_toc.yml").write_text(toc)
    cells = [
        ("text", "# A small chapter", {}),
        ("code", parameters, {"tags": ["parameters"]}),
        ("code", code, {}),
    ]
    nbformat.write(notebook(*cells), root / "chapters" / "01_small.ipynb")
    return find("small", root)


def write_book(root: Path) -> Chapter:
    """A book with every kind of thing that a page of the real one holds, and its very look."""
    chapter = write_chapter(root, "")
    cells = [
        ("text", "# A small chapter", {}),
        ("code", PARAMETERS, {"tags": ["parameters", "hide-input"]}),
        ("text", PROSE, {}),
        ("code", PLOT, FIGURE),
        ("text", "## A table", {}),
        ("code", TABLE, {"tags": ["hide-input"]}),
        ("code", "print(sum(range(size)))", {}),
    ]
    nbformat.write(notebook(*cells), chapter.source)
    (root / "chapters" / "intro.md").write_text(INTRO)
    (root / "references.bib").write_text(BIBLIOGRAPHY)
    shutil.copy(places.ROOT / "_config.yml", root)
    for folder in ("_static", "_extra"):
        shutil.copytree(places.ROOT / folder, root / folder, dirs_exist_ok=True)
    return chapter
