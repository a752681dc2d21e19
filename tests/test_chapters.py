"""A chapter is found by what a reader calls it, and refused with a hint otherwise."""

from pathlib import Path

import pytest
from small_book import write_chapter

from nohair.book import chapters
from nohair.errors import Refused


@pytest.fixture
def book(tmp_path: Path) -> Path:
    write_chapter(tmp_path, "")
    folder = tmp_path / "chapters"
    (folder / "02_relay.ipynb").write_bytes((folder / "01_small.ipynb").read_bytes())
    (folder / "cite.md").write_text("# Cite\n")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: chapters/intro\nparts:\n"
        "  - caption: Measured\n    chapters:\n"
        "      - file: chapters/02_relay\n        sections:\n"
        "          - file: chapters/01_small.ipynb\n"
        "      - file: chapters/cite\n"
    )
    return tmp_path


def test_notebooks_are_listed_in_reading_order_and_pages_are_not(book: Path) -> None:
    assert [chapter.page for chapter in chapters.listed(book)] == [
        "chapters/02_relay",
        "chapters/01_small",
    ]


@pytest.mark.parametrize(
    "call", ["01", "1", "small", "01_small", "01_small.ipynb", "chapters/01_small"]
)
def test_a_chapter_answers_to_number_name_word_and_page(book: Path, call: str) -> None:
    assert chapters.find(call, book).name == "01_small"


def test_a_chapter_answers_to_its_path_from_any_folder(
    book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(book / "chapters")
    assert chapters.find("../chapters/02_relay.ipynb", book).name == "02_relay"
    assert chapters.find(str(book / "chapters" / "02_relay.ipynb"), book).name == "02_relay"


def test_an_unknown_chapter_is_refused_with_the_nearest_and_the_list(book: Path) -> None:
    with pytest.raises(Refused, match=r"'realy': did you mean '02_relay'\?.*02_relay, 01_small"):
        chapters.find("realy", book)


def test_a_book_without_contents_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"_toc\.yml cannot be read"):
        chapters.listed(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": 3}'])
def test_what_is_no_notebook_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    broken = tmp_path / "broken.ipynb"
    broken.write_text(content)
    with pytest.raises(Refused, match=r"broken\.ipynb is not a notebook") as caught:
        chapters.read(broken)
    assert "\n" not in str(caught.value)
