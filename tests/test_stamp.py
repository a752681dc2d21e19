"""An executed copy is fresh only while all that it came from is as it was (CASES 8)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_book import write_chapter

from nohair.book import stamp
from nohair.book.chapters import Chapter
from nohair.book.parameters import check
from nohair.book.run import run


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Chapter:
    root = tmp_path_factory.mktemp("stamp")
    for name in ("nohair/decay.py", "data/texts/one.md", "data/.hidden", "constraints.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("original\n")
    chapter = write_chapter(root, "print(41 + 1)")
    run(chapter)
    return chapter


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda root: rewrite(root / "nohair/decay.py", "original", "other"), "nohair/decay.py"),
        (lambda root: rewrite(root / "data/texts/one.md", "original", "other"), "data/texts/one"),
        (lambda root: rewrite(root / "constraints.txt", "original", "other"), "constraints.txt"),
        (lambda root: (root / "data/texts/one.md").unlink(), "data/texts/one.md gone"),
        (lambda root: (root / "nohair/new.py").write_text(""), "nohair/new.py new"),
        (lambda root: rewrite(root / "chapters/01_small.ipynb", "41", "40"), "its cells changed"),
    ],
)
def test_a_changed_source_makes_a_chapter_stale_by_name(
    executed: Chapter, change: Callable[[Path], None], why: str
) -> None:
    before = {path: path.read_bytes() for path in executed.root.rglob("*") if path.is_file()}
    change(executed.root)
    status = stamp.status(executed)
    for path in [path for path in executed.root.rglob("*") if path.is_file()]:
        path.unlink() if path not in before else None
    for path, content in before.items():
        path.write_bytes(content)
    assert status.state == "stale"
    assert why in status.why
    assert stamp.status(executed).state == "fresh"


@pytest.mark.parametrize(
    "name", ["nohair/__pycache__/decay.pyc", "data/.hidden", "_build/note.py", "README.md"]
)
def test_what_a_chapter_cannot_depend_on_leaves_it_fresh(executed: Chapter, name: str) -> None:
    path = executed.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("other\n")
    assert stamp.status(executed).state == "fresh"


def test_outputs_in_the_source_do_not_count(executed: Chapter) -> None:
    source = json.loads(executed.source.read_text())
    source["cells"][-1]["execution_count"] = 7
    original = executed.source.read_bytes()
    executed.source.write_text(json.dumps(source))
    state = stamp.status(executed).state
    executed.source.write_bytes(original)
    assert state == "fresh"


def test_other_parameters_make_a_chapter_stale(executed: Chapter) -> None:
    assert stamp.status(executed, check(executed, {})).state == "fresh"
    status = stamp.status(executed, check(executed, {"size": 4}))
    assert (status.state, status.why) == ("stale", "its parameters changed since it ran")


@pytest.mark.parametrize(("old", "new"), [('"42\\n"', '"43\\n"'), ("A small", "An edited")])
def test_a_number_or_a_word_changed_by_hand_is_noticed(
    executed: Chapter, old: str, new: str
) -> None:
    copy = executed.copy_in()
    original = copy.read_bytes()
    rewrite(copy, old, new)
    status = stamp.status(executed)
    copy.write_bytes(original)
    assert status.state == "edited"


def test_a_copy_that_nohair_did_not_write_is_not_trusted(executed: Chapter, tmp_path: Path) -> None:
    assert stamp.status(executed, tree=tmp_path).state == "missing"
    foreign = executed.copy_in(tmp_path)
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(executed.source.read_bytes())
    assert stamp.status(executed, tree=tmp_path).state == "edited"
    foreign.write_bytes(executed.copy_in().read_bytes()[:500])
    assert stamp.status(executed, tree=tmp_path).state == "edited"
