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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from small_book import write_book, write_chapter

from nohair import explorer
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
    with serving(folder) as site_served:
        yield site_served


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
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
    faults = [
        f"{page}: {fault}"
        for page in pages
        for fault in visit(browser, address, page, scheme, width, height)
    ]
    assert faults == []


def visit(browser: Any, address: str, page: str, scheme: str, width: int, height: int) -> list[str]:
    """Everything that is wrong with one page."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab = context.new_page()
    seen = watched(tab, address)
    tab.goto(address + page, wait_until="load")
    if page == "index.html":
        tab.wait_for_url(lambda url: not url.endswith("/index.html"))  # it sends readers on
        tab.wait_for_load_state("load")
    seen += tab.evaluate(LOOK)
    theme = tab.evaluate("document.documentElement.dataset.theme")
    if theme != scheme:
        seen.append(f"shown in {theme}")
    context.close()
    return seen


def watched(tab: Any, address: str) -> list[str]:
    """A list to which everything is added that goes wrong in a tab from now on."""
    seen: list[str] = []
    tab.on("pageerror", lambda error: seen.append(f"script error: {error}"))
    tab.on(
        "console",
        lambda line: seen.append(f"console: {line.text}") if line.type == "error" else None,
    )
    tab.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((address, "data:", "blob:"))
            else seen.append(f"asked another host: {request.url}")
        ),
    )
    tab.on(
        "response",
        lambda answer: (
            seen.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None
        ),
    )
    return seen


# The relay explorer

GRID: dict[str, Any] = {
    "layers": (1, 2, 24),
    "gain": (0.5, 1.0, 2.0),
    "prompt_tokens": (8, 32),
    "strength": (0.0, 0.5),
    "starts": (4, 16, 64),
    "ends": (64, 256, 1024),
}
FIGURE = f"""
from nohair import explorer

explorer.figure(explorer.tabulate(**{GRID!r}), layers=2, gain=1, prompt_tokens=8)
"""
CHAPTER, BOKEH = "chapters/01_small.html", "_static/bokeh/bokeh.min.js"
NAMES = ["L, layers", "g, gain", "P, prompt tokens", "λ, bias strength", "prompt states"]
NAMES += ["window from t", "window to t"]
FIRST: dict[str, Any] = {
    "layers": 2,
    "gain": 1.0,
    "prompt_tokens": 8,
    "strength": 0.0,
    "states": "fixed",
    "start": 4,
    "end": 1024,
}


@pytest.fixture(scope="module")
def exploring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a book whose chapter is only the figure."""
    root = tmp_path_factory.mktemp("explorer")
    write_book(root)
    chapter = write_chapter(root, FIGURE)
    run(chapter)
    site.build(root)
    with serving(html(root)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def table() -> xr.Dataset:
    return explorer.tabulate(**GRID)


@pytest.fixture(params=[(1280, 900), (390, 844)])
def tab(request: pytest.FixtureRequest, exploring: str, browser: Any) -> Iterator[Any]:
    """A tab with the figure at work, in which nothing may go wrong."""
    width, height = request.param
    context = browser.new_context(
        viewport={"width": width, "height": height}, has_touch=width < 600
    )
    opened = context.new_page()
    seen = watched(opened, exploring)
    opened.goto(exploring + CHAPTER, wait_until="load")
    opened.locator(".nohair-explorer .present").wait_for(state="visible")
    opened.wait_for_function("Bokeh.documents.length == 2 && Bokeh.documents.every(d => d.is_idle)")
    yield opened
    context.close()
    assert seen == []


def check_shown(tab: Any, table: xr.Dataset, **moved: Any) -> None:
    """What is announced and drawn is what the table holds for the first setting but for `moved`."""
    now = FIRST | moved
    one = table.sel({name: now[name] for name in list(now)[:5]})
    alpha = f"{float(one.alpha.sel(start=now['start'], end=now['end'])):z.2f}".replace("-", "−")
    result = " ".join(tab.locator(".nohair-explorer [aria-live=polite]").inner_text().split())
    assert result == (
        f"L = {now['layers']}, g = {now['gain']:g}, P = {now['prompt_tokens']}, "
        f"λ = {now['strength']:g}, prompt states {now['states']}: α = {alpha} "
        f"over t from {now['start']} to {now['end']:,}"
    )
    ratio, local = tab.evaluate(
        """() => Bokeh.documents.map((one) => {
            const named = (name) => one.get_model_by_name(name);
            const { start, end } = one.roots()[0].y_range;
            const { left, right } = named("window");
            const data = [named("curve"), named("rule")].map((source) => [...source.data.y]);
            return { curve: data[0], rule: data[1], start, end, left, right };
        })"""
    )
    assert ratio["curve"] == pytest.approx((one.distance / one.distance[0]).to_numpy(), rel=2e-3)
    assert local["curve"] == pytest.approx(one.local.to_numpy(), abs=1e-3)
    assert local["rule"] == pytest.approx([float(alpha.replace("−", "-"))] * 2)
    assert ratio["rule"][0] / ratio["rule"][1] == pytest.approx(now["end"] / now["start"])
    for panel in (ratio, local):
        drawn = panel["curve"] + panel["rule"]
        assert panel["start"] <= min(drawn)
        assert max(drawn) <= panel["end"]
        assert (panel["left"], panel["right"]) == (now["start"], now["end"])


def test_the_explorer_obeys_the_keyboard(tab: Any, table: xr.Dataset) -> None:
    check_shown(tab, table)
    tab.locator(".nohair-explorer").evaluate(
        "(figure) => { figure.tabIndex = -1; figure.focus(); }"
    )
    reached = []
    for _ in NAMES:
        tab.keyboard.press("Tab")
        focused = tab.locator(":focus")
        reached.append(focused.evaluate("(one) => one.closest('label').innerText.split('\\n')[0]"))
        ring = focused.evaluate("(one) => getComputedStyle(one).outline")
        assert "solid 3px" in ring
    assert [name in text for name, text in zip(NAMES, reached, strict=True)] == [True] * 7
    for name, key, moved in (
        ("L, layers", "ArrowRight", {"layers": 24}),
        ("g, gain", "ArrowLeft", {"layers": 24, "gain": 0.5}),
        ("prompt states", "ArrowDown", {"layers": 24, "gain": 0.5, "states": "evolving"}),
    ):
        tab.get_by_label(name).focus()
        tab.keyboard.press(key)
        check_shown(tab, table, **moved)
    assert tab.get_by_label("g, gain").get_attribute("aria-valuetext") == "0.5"


def test_a_window_stays_a_window(tab: Any, table: xr.Dataset) -> None:
    tab.get_by_label("window to t").focus()
    tab.keyboard.press("Home")
    check_shown(tab, table, end=64)
    tab.get_by_label("window from t").focus()
    tab.keyboard.press("End")
    check_shown(tab, table, start=64, end=256)
    tab.get_by_label("window to t").focus()
    tab.keyboard.press("ArrowLeft")
    check_shown(tab, table, start=16, end=64)


def test_the_explorer_obeys_pointer_and_finger(tab: Any, table: xr.Dataset) -> None:
    slider = tab.get_by_label("λ, bias strength")
    slider.scroll_into_view_if_needed()
    place = slider.bounding_box()
    right, middle = place["x"] + place["width"] - 8, place["y"] + place["height"] / 2
    if tab.evaluate("navigator.maxTouchPoints"):
        tab.touchscreen.tap(right, middle)
    else:
        tab.mouse.move(place["x"] + 8, middle)
        tab.mouse.down()
        tab.mouse.move(right, middle, steps=5)
        tab.mouse.up()
    check_shown(tab, table, strength=0.5)
    tab.get_by_label("prompt states").select_option("evolving")
    check_shown(tab, table, strength=0.5, states="evolving")
    assert place["height"] >= 44


def test_the_explorer_fits_the_screen(tab: Any) -> None:
    box = tab.locator(".cell_output .text_html:has(.nohair-explorer)")
    assert box.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    left, right = (
        tab.locator(f".nohair-explorer .panels > :nth-child({n})").bounding_box() for n in (1, 2)
    )
    if tab.viewport_size["width"] < 600:  # one above the other
        assert left["x"] == right["x"]
        assert left["y"] + left["height"] <= right["y"]
    else:
        assert left["y"] == right["y"]
        assert left["x"] + left["width"] <= right["x"]


def test_a_screen_reader_is_told_what_the_explorer_is(tab: Any) -> None:
    tree = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
    heard = [node for node in tree if not node["ignored"]]
    named = [(node["role"]["value"], node["name"]["value"].strip()) for node in heard]
    for name in NAMES:
        assert (("combobox" if name == "prompt states" else "slider"), name) in named
    assert ("group", "Relay explorer") in named
    assert any(role == "image" and name.startswith("Left: distance") for role, name in named)
    assert "Canvas" not in dict(named)
    live = [
        {one["name"]: one["value"].get("value") for one in node.get("properties", [])}
        for node in heard
        if node["role"]["value"] == "paragraph"
    ]
    assert any(one.get("live") == "polite" and one.get("atomic") for one in live)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_explorers_page_is_sound(
    exploring: str, browser: Any, scheme: str, width: int, height: int
) -> None:
    assert visit(browser, exploring, CHAPTER, scheme, width, height) == []


def test_only_the_explorers_page_asks_for_bokeh(exploring: str, browser: Any) -> None:
    for page, wanted in ((CHAPTER, True), ("chapters/intro.html", False)):
        asked: list[str] = []
        opened = browser.new_page()
        opened.on("request", lambda request, asked=asked: asked.append(request.url))
        opened.goto(exploring + page, wait_until="load")
        opened.close()
        assert any("bokeh" in url for url in asked) == wanted
        assert all(url.split("?")[0] == exploring + BOKEH for url in asked if "bokeh" in url)


def test_bokeh_is_copied_with_its_licence(exploring: str, browser: Any) -> None:
    opened = browser.new_page()
    licence = opened.request.get(exploring + "_static/bokeh/LICENSE.txt")
    assert "Bokeh Contributors" in licence.text()
    opened.close()


def test_without_bokeh_the_figure_says_what_it_needs(exploring: str, browser: Any) -> None:
    opened = browser.new_page()
    opened.route("**/bokeh*.js*", lambda route: route.abort())
    opened.goto(exploring + CHAPTER, wait_until="load")
    shown = opened.locator(".nohair-explorer").inner_text()
    opened.close()
    assert shown.strip() == "This figure needs the website: make book"


def test_without_javascript_the_figure_is_described(exploring: str, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(exploring + CHAPTER, wait_until="load")
    shown = opened.locator(".nohair-explorer").inner_text()
    context.close()
    assert shown.startswith("With JavaScript you can move")
    assert "L = 2, g = 1, P = 8, λ = 0, prompt states fixed: α =" in shown
    assert "make book" not in shown
