"""Every chapter of the book runs to its end on the smallest subjects, and its page is whole."""

import re

import nbformat
import pytest

from nohair.book import chapters
from nohair.book.run import run

SMALL = {
    "01_forgetting": {
        "model": "smoke-4",
        "other_twins": ["config"],
        "untrained": ["smoke"],
        "prompt_tokens": 8,
        "horizon": 256,
        "prompts": 3,
        "continuations": 2,
        "window": [8, 256],
    },
    "02_theorem": {
        "model": "smoke-4",
        "prompt_tokens": 8,
        "horizon": 256,
        "prompts": 3,
        "continuations": 1,
        "window": [8, 256],
    },
    "03_relay": {
        "model": "smoke-4",
        "prompt_tokens": 16,
        "horizon": 256,
        "prompts": 3,
        "continuations": 1,
        "window": [8, 256],
        "depths": [1, 2, 3, 4, 6],
        "networks": ["smoke"],
        "deeper": ["smoke-4", "smoke-4 config"],
        "others": ["smoke"],
        "seeds": 2,
        "explore_gains": [0.5],
    },
    "04_bias": {
        "model": "smoke-4",
        "steps": [0, 64, 512],
        "stages": [64, 512],
        "others": ["tiny-llama@step64"],
        "lengths": {"tiny@step512": 1024, "tiny-short@step512": 512},
        "prompt_tokens": 8,
        "horizon": 256,
        "prompts": 3,
        "continuations": 1,
        "strengths": [0.0, 0.5, 1.0],
        "bias_from": 8,
        "window": [8, 256],
    },
}

# What those parameters leave in the outputs: the subject, and the window in the verdict on laws.
TRACES = {
    "01_forgetting": ["smoke-4", "t in [8, 256]"],
    # three pairs, one continuation, four blocks, 256 positions, two subjects
    "02_theorem": ["smoke-4", f"{3 * 4 * 256 * 2:,}"],
    # networks of 2, 4 and 4 blocks, P = 8 and 16: so many exponents compared
    "03_relay": ["smoke-4 config", f"{(2 + 4 + 4) * 2}", "8 and 16"],
    # stages, the other family and the large subject; a longer prompt; late positions
    "04_bias": ["step 512", "tiny-llama@step64", "smoke-4", f"P = {4 * 8}", "t in [64, 128]"],
}


@pytest.fixture(scope="session", params=[chapter.name for chapter in chapters.listed()])
def executed(request, tmp_path_factory):
    """Run one chapter with its small parameters; a chapter without them fails here."""
    tree = tmp_path_factory.mktemp("executed")
    outcome = run(chapters.find(request.param), SMALL[request.param], tree=tree)
    return outcome, nbformat.read(outcome.notebook, as_version=4)


def test_every_key_pasted_in_the_text_was_glued(executed):
    _, notebook = executed
    pasted, glued = set(), set()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            pasted |= set(re.findall(r"\{glue:\w+\}`([^`:]+)", cell.source))
        else:
            prefix = "application/papermill.record/"
            for output in cell.outputs:
                key = output.get("metadata", {}).get("scrapbook", {}).get("name", "")
                glued.add(key.removeprefix(prefix))
    assert pasted
    assert pasted <= glued


def test_every_figure_has_a_name_a_caption_and_a_text(executed):
    _, notebook = executed
    figures = 0
    for cell in notebook.cells:
        drawn = [o for o in cell.get("outputs", ()) if "image/svg+xml" in o.get("data", {})]
        if drawn:
            figures += 1
            assert len(drawn) == 1, cell.source
            about = cell.metadata["mystnb"]
            assert len(about["image"]["alt"]) > 40
            assert about["figure"]["name"].startswith("fig-")
            assert len(about["figure"]["caption"]) > 40
    assert figures >= 5


def test_the_parameters_reach_the_measurement(executed):
    outcome, notebook = executed
    text = "\n".join(str(cell.get("outputs", "")) for cell in notebook.cells)
    for trace in TRACES[outcome.chapter.name]:
        assert trace in text


def test_the_theorem_is_not_violated(executed):
    outcome, notebook = executed
    if outcome.chapter.name != "02_theorem":
        return
    glued = {
        output.metadata.scrapbook.name.removeprefix("application/papermill.record/"): output.data
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "scrapbook" in output.get("metadata", {})
    }
    (violations,) = glued["violations"].values()
    assert violations.strip("'") == "0"


def test_sources_are_thin_and_clean():
    for chapter in chapters.listed():
        notebook = nbformat.read(chapter.source, as_version=4)
        assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not cell.outputs
                assert cell.execution_count is None
                assert len(cell.source.splitlines()) <= 15, cell.source
                assert not re.search(r"^\s*(def|class) |register_\w*hook|lambda", cell.source, re.M)


def test_no_two_figures_of_the_book_have_the_same_name():
    names = [
        cell.metadata["mystnb"]["figure"]["name"]
        for chapter in chapters.listed()
        for cell in nbformat.read(chapter.source, as_version=4).cells
        if "figure" in cell.metadata.get("mystnb", {})
    ]
    assert len(names) > 20
    assert sorted(set(names)) == sorted(names)
