"""Sphinx extension: a page asks nothing of any other host.

It brings MathJax along in ``_static/``, and BokehJS for the pages that hold `nohair.explorer`'s
figure. It takes out the live-code scripts that Jupyter Book puts on every page: they name a
stranger's repository and, written twice, raise a script error.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError

_MATHJAX = "mathjax"  # the importable name inside the package django-static-mathjax
_COMPONENTS = ("tex-chtml.js", "input/tex/extensions", "output/chtml/fonts/woff-v2")
_BOKEH = "bokeh"
_EXPLORER = 'class="nohair-explorer"'  # marks the pages that need it


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension to Sphinx."""
    app.connect("config-inited", _use_own_mathjax)
    app.connect("config-inited", _drop_live_code)
    app.connect("builder-inited", _copy_mathjax)
    app.connect("builder-inited", _copy_bokeh)
    app.connect("html-page-context", _load_bokeh)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _drop_live_code(app: Sphinx, config: Config) -> None:
    # Only these two events write scripts; a third brings the style sheet that pages still link.
    for event in ("env-before-read-docs", "doctree-resolved"):
        for listener in list(app.events.listeners[event]):
            if listener.handler.__module__ == "sphinx_thebe":
                app.disconnect(listener.id)


def _use_own_mathjax(app: Sphinx, config: Config) -> None:
    config.mathjax_path = f"{_MATHJAX}/{_COMPONENTS[0]}"


def _copy_mathjax(app: Sphinx) -> None:
    if app.builder.format != "html":
        return
    package = _package(_MATHJAX, "MathJax", "django-static-mathjax==3.2.2.1")
    files = package / "static" / _MATHJAX
    goal = Path(app.outdir) / "_static" / _MATHJAX
    for component in _COMPONENTS:
        source, target = files / "es5" / component, goal / component
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    shutil.copy2(files / "LICENSE", goal / "LICENSE")


def _copy_bokeh(app: Sphinx) -> None:
    if app.builder.format != "html":
        return
    package = _package(_BOKEH, "Bokeh", "bokeh")
    goal = Path(app.outdir) / "_static" / _BOKEH
    goal.mkdir(parents=True, exist_ok=True)
    for file in ("server/static/js/bokeh.min.js", "LICENSE.txt"):
        shutil.copy2(package / file, goal)


def _load_bokeh(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    # During this event a script is added to the page at hand alone. Deferred, it delays no text.
    if _EXPLORER in context.get("body", ""):
        app.add_js_file(f"{_BOKEH}/bokeh.min.js", loading_method="defer")


def _package(name: str, title: str, requirement: str) -> Path:
    # django-static-mathjax is a Django application: packages are found, never imported.
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ExtensionError(f"{title} is not installed: run `pip install {requirement}`")
    return Path(spec.origin).parent
