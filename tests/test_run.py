"""A chapter is published whole or not at all (CASES 1 and 3 to 7, 21)."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import papermill
import psutil
import pytest
from small_book import FIGURE, PARAMETERS, notebook, write_chapter

from nohair.book.chapters import Chapter, read
from nohair.book.parameters import parse
from nohair.book.run import run
from nohair.errors import Failed, Refused

DRAW = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a {book}"  # papermill takes braces in a path for a format string


@pytest.fixture(autouse=True)
def no_kernel_outlives_a_test() -> Iterator[None]:
    yield
    assert kernels() == []


def kernels() -> list[str]:
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return [line for line in lines if "ipykernel" in line]


def printed(notebook: Path) -> list[str]:
    texts = [
        output.text
        for cell in read(notebook).cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    ]
    return "".join(texts).splitlines()


def publish_then_change(root: Path, code: str, metadata: dict | None = None) -> Chapter:
    """A chapter that ran well once and has since been given other code."""
    run(write_chapter(root, "print('earlier')"))
    chapter = write_chapter(root, code)
    if metadata:
        source = read(chapter.source)
        source.cells[-1].metadata.update(metadata)
        nbformat.write(source, chapter.source)
    return chapter


def test_case_5_and_6_the_running_interpreter_works_in_the_notebooks_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A reader's own kernel of the standard name, which must not be taken.
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"})
    )
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "own.py").write_text("import sys; sys.own = True")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    code = "import os, sys\nprint(sys.executable, os.getcwd(), hasattr(sys, 'own'), sep='\\n')"
    outcome = run(write_chapter(root, code))
    assert printed(outcome.notebook) == [sys.executable, str(root / "chapters"), "False"]
    assert read(outcome.notebook).metadata.kernelspec.name == "python3"


def test_case_21_a_shells_wishes_do_not_reach_a_page(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.delenv("NO_COLOR", raising=False)
    bar = "import os\nfrom tqdm import tqdm\nfor _ in tqdm(range(3)): pass\n"
    chapter = write_chapter(root, bar + "print(os.environ['NO_COLOR'])\n" + DRAW)
    executed = read(run(chapter).notebook)
    kinds = [output.output_type for output in executed.cells[-1].outputs]
    assert kinds == ["stream", "display_data"]
    assert "image/png" in executed.cells[-1].outputs[1].data
    assert printed(chapter.copy_in()) == ["1"]


def test_case_3_values_arrive_in_the_kernel_with_their_types(root: Path) -> None:
    chapter = write_chapter(root, "print(repr([flag, rate, size, revision, metric, windows]))")
    pairs = ["flag=false", "rate=1e-5", "size=7", "revision=12345e67", "windows=[1, 2]"]
    text = "a \"quoted\"\n'line' \\ with {braces} and ü"
    outcome = run(chapter, parse(chapter, pairs) | {"metric": text})
    assert printed(outcome.notebook) == [repr([False, 1e-5, 7, "12345e67", text, [1, 2]])]
    assert outcome.parameters["flag"] is False


def test_case_1_a_mistyped_parameter_starts_no_kernel(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter = publish_then_change(root, "print('later')")
    earlier = chapter.copy_in().read_bytes()
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(Refused, match=r"no parameter 'sise': did you mean 'size'\?"):
        run(chapter, {"sise": 4})
    with pytest.raises(Refused, match="'size' cannot be 'four'"):
        run(chapter, {"size": "four"})
    assert chapter.copy_in().read_bytes() == earlier


def test_a_fresh_chapter_is_not_run_again(root: Path) -> None:
    chapter = write_chapter(root, "import time\nprint(time.time())")
    seen: list[tuple[int, int]] = []
    first = run(chapter, progress=lambda cell, cells: seen.append((cell, cells)))
    assert (first.executed, seen) == (True, [(1, 2), (2, 2)])
    published = first.notebook.read_bytes()
    again = run(chapter, {"size": 3})
    assert not again.executed
    assert again.notebook.read_bytes() == published
    assert run(chapter, {"size": 4}).executed
    assert run(chapter).executed
    assert run(chapter, force=True).executed
    assert first.notebook.read_bytes() != published


def test_published_copies_hold_no_trace_of_the_machine(root: Path) -> None:
    outcome = run(write_chapter(root, "print(1)"), {"size": 4})
    text = outcome.notebook.read_text()
    assert str(root) not in text
    assert "papermill" not in text


@pytest.mark.parametrize(
    ("code", "metadata", "said"),
    [
        ("raise ValueError('two\\nlines')", None, "ValueError: two lines"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, "kernel died.*memory"),
        ("import time; time.sleep(60)", None, "longer than the 3 s"),
        ("import sys; print('oh', file=sys.stderr)", None, "wrote to stderr: oh"),
        ("print(' 40%|####      | 2/5 [00:01<00:02, 1.9it/s]')", None, "left a progress bar"),
        (DRAW.replace("plt.plot([1, 2])", "plt.figure()"), None, "left an empty figure"),
        ("print(1)", FIGURE, "has a caption but left no figure"),
        ("1 / 0", {"tags": ["raises-exception"]}, "ZeroDivisionError"),
        ("print(1)", {"tags": ["skip-execution"]}, "never executed"),
        ("import sys; sys.exit()", None, "SystemExit"),
    ],
)
def test_case_4_and_7_what_fails_is_not_published(
    root: Path, code: str, metadata: dict | None, said: str
) -> None:
    chapter = publish_then_change(root, code, metadata)
    earlier = chapter.copy_in().read_bytes()
    with pytest.raises(Failed, match=f"chapter 01_small failed in code cell 2 of 2: .*{said}") as e:
        run(chapter, {"size": 4}, timeout=3)
    assert "\n" not in str(e.value)
    kept = root / "_build" / "failed" / "chapters" / "01_small.ipynb"
    assert str(e.value).endswith(f"see {kept}")
    assert read(kept).cells
    assert chapter.copy_in().read_bytes() == earlier
    assert os.listdir(chapter.copy_in().parent) == ["01_small.ipynb"]


def test_ctrl_c_leaves_what_was_there_and_no_kernel(root: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    wait = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)"
    chapter = publish_then_change(root, wait)
    earlier = chapter.copy_in().read_bytes()
    script = f"""
        import pathlib, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & lets it be ignored
        from nohair.book.chapters import find
        from nohair.book.run import run
        run(find("small", pathlib.Path({str(root)!r})))
    """
    runner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(kernels()) == 1
    runner.send_signal(signal.SIGINT)
    _, said = runner.communicate(timeout=30)
    assert "Failed: chapter 01_small failed in code cell 2 of 2: interrupted" in said
    assert chapter.copy_in().read_bytes() == earlier
    assert os.listdir(chapter.copy_in().parent) == ["01_small.ipynb"]


def test_a_tree_that_cannot_be_written_is_said_in_one_line(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Failed, match=r"cannot be written to .*: make room or choose another"):
        run(write_chapter(root, "print(1)"), tree=tmp_path / "file")


def test_a_relative_tree_is_meant_from_where_the_reader_stands(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter = write_chapter(root, "print('here')")
    monkeypatch.chdir(tmp_path)
    outcome = run(chapter, tree=Path("tree"))
    assert printed(tmp_path / "tree" / "chapters" / "01_small.ipynb") == ["here"]
    assert outcome.notebook.is_absolute()
    assert not run(chapter, tree=tmp_path / "tree").executed
    assert os.listdir(root / "chapters") == ["01_small.ipynb"]  # where the kernel worked


@pytest.mark.parametrize("way", ["straight", "round about", "through a link"])
def test_a_tree_that_would_replace_the_source_is_refused(
    root: Path, tmp_path: Path, way: str
) -> None:
    chapter = write_chapter(root, "print(1)")
    source = chapter.source.read_bytes()
    (tmp_path / "link").symlink_to(root)
    trees = {
        "straight": root,
        "round about": root / "chapters" / "..",
        "through a link": tmp_path / "link",
    }
    with pytest.raises(Refused, match=r"would replace .*01_small\.ipynb") as refusal:
        run(chapter, tree=trees[way], force=True)
    assert "\n" not in str(refusal.value)
    assert chapter.source.read_bytes() == source
    assert os.listdir(root / "chapters") == ["01_small.ipynb"]


@pytest.mark.parametrize("timeout", [float("nan"), 0, -1])
def test_a_timeout_that_is_none_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(Refused, match=f"timeout.*{timeout:g}"):
        run(write_chapter(root, "print(1)"), timeout=timeout)
    assert not (root / "_build").exists()


def test_a_broken_timeout_is_rounded_up(root: Path) -> None:
    # Cut down to 1 s, this cell would be stopped; nbclient counts in whole seconds.
    outcome = run(write_chapter(root, "import time; time.sleep(1.3); print(1)"), timeout=1.1)
    assert printed(outcome.notebook) == ["1"]


def test_what_the_library_refuses_in_a_cell_is_a_refusal_not_a_failure(root: Path) -> None:
    refuse = "from nohair.errors import Refused\nraise Refused('window [9, 3] is\\nreversed')"
    chapter = publish_then_change(root, refuse)
    earlier = chapter.copy_in().read_bytes()
    with pytest.raises(Refused, match=r"chapter 01_small.*cell 2 of 2.*window \[9, 3\] is") as e:
        run(chapter)
    assert "\n" not in str(e.value)
    assert chapter.copy_in().read_bytes() == earlier
    assert os.listdir(chapter.copy_in().parent) == ["01_small.ipynb"]
    assert os.listdir(root / "_build") == ["executed"]  # nothing to inspect: the input was wrong


@pytest.mark.parametrize("tags", [[], ["parameters", "parameters"]])
def test_case_2_a_chapter_has_one_parameters_cell(root: Path, tags: list[str]) -> None:
    chapter = write_chapter(root, "print(1)")
    cells = [("code", PARAMETERS, {"tags": [tag]}) for tag in tags]
    nbformat.write(notebook(*cells), chapter.source)
    with pytest.raises(Refused, match=f"has {len(tags)} code cells tagged 'parameters'"):
        run(chapter)
