"""The site is built from what ran, or not at all (CASES 7, 8, 9); its pages work in a browser.

The browser tests look at the folder that NOHAIR_SITE names, or else at a small book.
"""

from __future__ import annotations

import functools
import http.server
import importlib.metadata
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_book import write_book

from nohair.book import site
from nohair.book.chapters import Chapter
from nohair.book.run import run
from nohair.errors import Failed, Incomplete, Refused

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Chapter:
    chapter = write_book(tmp_path_factory.mktemp("site"))
    run(chapter)
    site.build(chapter.root)
    return chapter


@pytest.fixture
def book(built: Chapter, tmp_path: Path) -> Chapter:
    """A copy of the built book to spoil."""
    root = tmp_path / "book"
    shutil.copytree(built.root, root)
    return Chapter(root / built.source.relative_to(built.root), root)


def files(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def html(root: Path) -> Path:
    return root / "_build" / "html"


def test_a_page_shows_outputs_and_the_download_is_the_clean_source(built: Chapter) -> None:
    page = (html(built.root) / "chapters" / "01_small.html").read_text()
    assert '<div class="output stream highlight-myst-ansi' in page
    assert "The distance falls as a power" in page
    downloaded = html(built.root) / "_sources" / "chapters" / "01_small.ipynb"
    assert downloaded.read_bytes() == built.source.read_bytes()
    assert 'href="../_sources/chapters/01_small.ipynb"' in page


def test_case_7_a_missing_chapter_stops_the_build(book: Chapter) -> None:
    earlier = files(html(book.root))
    book.copy_in().unlink()
    with pytest.raises(Incomplete, match="01_small is missing; `nohair run all`"):
        site.build(book.root)
    assert files(html(book.root)) == earlier


def test_case_8_a_stale_chapter_stops_the_build(book: Chapter) -> None:
    (book.root / "nohair").mkdir()
    (book.root / "nohair" / "decay.py").write_text("CONSTANT = 1\n")
    with pytest.raises(Incomplete, match=r"01_small is stale \(nohair/decay\.py new since it ran"):
        site.build(book.root)


def test_an_edited_chapter_stops_the_build(book: Chapter) -> None:
    copy = book.copy_in()
    copy.write_text(copy.read_text().replace('"3\\n"', '"4\\n"'))
    with pytest.raises(Incomplete, match="01_small is edited"):
        site.build(book.root)


def test_case_7_sphinx_alone_refuses_a_missing_copy_too(
    book: Chapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.copy_in().unlink()
    monkeypatch.setattr(site, "states", lambda *_: [])
    with pytest.raises(Failed, match="01_small is missing: run `nohair run 01_small`"):
        site.build(book.root)


def test_a_tree_of_ones_own_can_be_published_elsewhere(book: Chapter, tmp_path: Path) -> None:
    earlier = files(html(book.root))
    tree, out = tmp_path / "tree", tmp_path / "out" / "pages"
    run(book, {"size": 5}, tree=tree)
    assert site.build(book.root, out, tree=tree) == out / "index.html"
    assert "size = 5" in (out / "chapters" / "01_small.html").read_text().replace(
        '<span class="n">size</span> <span class="o">=</span> <span class="mi">5</span>', "size = 5"
    )
    assert files(html(book.root)) == earlier


def test_a_warning_stops_the_build_and_leaves_the_earlier_site(book: Chapter) -> None:
    earlier = files(html(book.root))
    with (book.root / "chapters" / "intro.md").open("a") as page:
        page.write("\nSee {doc}`nowhere` and {ref}`nothing`.\n")
    with pytest.raises(Failed, match=r"WARNING.*nowhere.*all of it is in .*site\.log") as caught:
        site.build(book.root)
    assert "\n" not in str(caught.value)
    assert "nothing" in (book.root / "_build" / "site.log").read_text()
    assert files(html(book.root)) == earlier
    assert sorted(os.listdir(book.root / "_build")) == ["executed", "html", "site.log"]


def test_a_site_is_replaced_whole(book: Chapter) -> None:
    (html(book.root) / "old.html").write_text("left over")
    site.build(book.root)
    assert not (html(book.root) / "old.html").exists()
    assert sorted(os.listdir(book.root / "_build")) == ["executed", "html", "site.log"]


def test_a_relative_tree_and_folder_are_meant_from_where_the_reader_stands(
    book: Chapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(book, tree=tmp_path / "tree")
    monkeypatch.chdir(tmp_path)
    site.build(book.root, Path("pages"), tree=Path("tree"))
    assert (tmp_path / "pages" / "chapters" / "01_small.html").is_file()


@pytest.mark.parametrize("there", ["an earlier site", "an empty folder"])
def test_a_folder_that_holds_nothing_of_the_readers_is_taken(
    book: Chapter, tmp_path: Path, there: str
) -> None:
    out = tmp_path / "pages"
    if there == "an earlier site":
        shutil.copytree(html(book.root), out)
        (out / "old.html").write_text("left over")
    else:
        out.mkdir()
    assert site.build(book.root, out) == out / "index.html"
    assert (out / "index.html").is_file()
    assert not (out / "old.html").exists()


@pytest.mark.parametrize("there", ["a folder", "a folder in a folder", "a file"])
def test_what_is_no_earlier_site_is_never_replaced(
    book: Chapter, tmp_path: Path, there: str
) -> None:
    out = tmp_path / "mine"
    if there == "a file":
        out.write_text("years of work")
    else:
        (out / "deep").mkdir(parents=True)
        if there == "a folder":
            (out / "index.html").write_text("years of work")
    earlier = sorted(tmp_path.rglob("*")), files(tmp_path)
    with pytest.raises(Refused, match=re.escape(str(out))) as refusal:
        site.build(book.root, out)
    assert "\n" not in str(refusal.value)
    assert (sorted(tmp_path.rglob("*")), files(tmp_path)) == earlier


def test_case_9_jupyter_book_2_is_named(book: Chapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.1.0")
    with pytest.raises(Refused, match=r"needs jupyter-book<2, found 2\.1\.0: run `pip install"):
        site.build(book.root)


# In a browser


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """The address of the site under test, and its pages."""
    named = os.environ.get("NOHAIR_SITE")
    folder = Path(named) if named else html(request.getfixturevalue("built").root)
    pages = sorted(page.relative_to(folder).as_posix() for page in folder.rglob("*.html"))
    pages = [page for page in pages if not page.startswith("_static/")]
    assert "index.html" in pages, f"{folder} holds no site"
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", pages
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed; try apt, dnf or brew")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no browser driver: run `pip install playwright`"
    )
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = driver.chromium.launch(executable_path=program, args=flags)
        yield chromium
        chromium.close()


LOOK = """async () => {
    const faults = [];
    if (window.MathJax?.startup) await MathJax.startup.promise;
    for (const maths of document.querySelectorAll('.math')) {
        if (!maths.querySelector('mjx-container')) faults.push(`raw maths: ${maths.innerText}`);
    }
    for (const error of document.querySelectorAll('mjx-merror')) {
        faults.push(`maths error: ${error.dataset.mjxError}`);
    }
    for (const image of document.images) {
        image.loading = 'eager';
        await image.decode().catch(() => {});
        if (!image.naturalWidth) faults.push(`image not loaded: ${image.src}`);
        const { left, right } = image.getBoundingClientRect();
        if (left < 0 || right > innerWidth) faults.push(`image cut off: ${image.src}`);
    }
    const paper = 'rgb(251, 251, 249)';
    for (const figure of document.querySelectorAll('.cell_output img')) {
        const ground = getComputedStyle(figure).backgroundColor;
        if (ground !== paper) faults.push(`figure on ${ground}`);
    }
    const width = document.documentElement.scrollWidth;
    if (width > innerWidth) faults.push(`page is ${width} px wide, screen ${innerWidth}`);
    return faults;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_every_page_works_in_a_browser(
    served: tuple[str, list[str]], browser: Any, scheme: str, width: int, height: int
) -> None:
    address, pages = served
    faults: list[str] = []
    for page in pages:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        tab = context.new_page()
        seen: list[str] = []
        tab.on("pageerror", lambda error, seen=seen: seen.append(f"script error: {error}"))
        tab.on(
            "console",
            lambda line, seen=seen: (
                seen.append(f"console: {line.text}") if line.type == "error" else None
            ),
        )
        tab.on(
            "request",
            lambda request, seen=seen: (
                None
                if request.url.startswith((address, "data:", "blob:"))
                else seen.append(f"asked another host: {request.url}")
            ),
        )
        tab.on(
            "response",
            lambda answer, seen=seen: (
                seen.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None
            ),
        )
        tab.goto(address + page, wait_until="load")
        if page == "index.html":
            tab.wait_for_url(lambda url: not url.endswith("/index.html"))  # it sends readers on
            tab.wait_for_load_state("load")
        seen += tab.evaluate(LOOK)
        theme = tab.evaluate("document.documentElement.dataset.theme")
        if theme != scheme:
            seen.append(f"shown in {theme}")
        context.close()
        faults += [f"{page}: {fault}" for fault in seen]
    assert faults == []
