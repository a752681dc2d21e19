"""What a parameters cell declares, and which values reach a chapter (CASES 1, 2, 3)."""

from pathlib import Path

import nbformat
import numpy as np
import pytest
from small_book import notebook, write_chapter

from nohair.book import parameters
from nohair.book.chapters import Chapter
from nohair.errors import Refused

DECLARED = """
model = "smollm2"
revision = None
flag = True
size = 3
rate = 0.5
windows = [16, 1024]
names = ["text", "shuffled"]
options = {"a": 1}
commit: str | None = "main"
limit: int | None = None
metric: Literal["l2", "relative", "angle"] = "l2"
seed: Optional[int] = 0
query = "a = b"
"""


@pytest.fixture
def chapter(tmp_path: Path) -> Chapter:
    return write_chapter(tmp_path, "", DECLARED)


def declare(tmp_path: Path, *cells: str) -> dict[str, parameters.Parameter]:
    path = tmp_path / "some.ipynb"
    tag = {"tags": ["parameters"]}
    nbformat.write(notebook(*(("code", cell, tag) for cell in cells)), path)
    return parameters.declared(path)


def same(left: object, right: object) -> bool:
    return left == right and type(left) is type(right)


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("flag=false", False),
        ("flag=No", False),
        ("flag=off", False),
        ("flag=1", True),
        ("rate=1e-5", 1e-5),
        ("rate=2", 2.0),
        ("size=-4", -4),
        ("revision=12345e67", "12345e67"),
        ("revision=none", None),
        ("revision=true", "true"),
        ("model=null", "null"),
        ("model=1e5", "1e5"),
        ("model=", ""),
        ("model=a=b", "a=b"),
        ("commit=None", None),
        ("commit=123", "123"),
        ("limit=7", 7),
        ("limit=null", None),
        ("seed=none", None),
        ("metric=angle", "angle"),
        ("windows=[32, 64]", [32, 64]),
        ("windows=32,64", [32, 64]),
        ("windows=[]", []),
        ("names=[random, text]", ["random", "text"]),
        ("names=['a, b', 'c']", ["a, b", "c"]),
        ("names=1,2", ["1", "2"]),
        ('options={"a": null}', {"a": None}),
        ("query=\"'; __import__('os')", "\"'; __import__('os')"),
    ],
)
def test_a_text_arrives_with_the_type_of_its_default(
    chapter: Chapter, pair: str, value: object
) -> None:
    name = pair.partition("=")[0]
    read = parameters.parse(chapter, [pair])[name]
    assert same(read, value)
    assert same(parameters.check(chapter, {name: read})[name], value)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("flag=maybe", "give bool"),
        ("flag=2", "give bool"),
        ("size=3.5", "give int"),
        ("size=none", "give int"),
        ("size=1e3", "give int"),
        ("rate=fast", "give float"),
        ("rate=nan", "give float"),
        ("rate=1e999", "give float"),
        ("limit=many", "give int or none"),
        ("metric=cosine", "give one of 'l2', 'relative', 'angle'"),
        ("windows=[1, two]", "give list of int"),
        ("windows=[1, 2.5]", "give list of int"),
        ("names=[1, 2]", "give list of str"),
        ("options=[1]", "give dict"),
        ("options={[]: 1}", "give dict"),
    ],
)
def test_a_text_of_another_kind_is_refused_by_name_value_and_kind(
    chapter: Chapter, pair: str, expected: str
) -> None:
    name, _, text = pair.partition("=")
    with pytest.raises(Refused) as caught:
        parameters.parse(chapter, [pair])
    said = str(caught.value)
    assert f"'{name}'" in said
    assert repr(text) in said
    assert expected in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("rate", 2, 2.0),
        ("size", np.int64(5), 5),
        ("rate", np.float32(0.5), 0.5),
        ("flag", np.bool_(False), False),
        ("windows", (1, np.int32(2)), [1, 2]),
        ("revision", None, None),
    ],
)
def test_python_values_become_those_that_a_notebook_can_carry(
    chapter: Chapter, name: str, given: object, value: object
) -> None:
    checked = parameters.check(chapter, {name: given})[name]
    assert same(checked, value)
    assert not isinstance(checked, list) or all(map(same, checked, value))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("flag", 0),
        ("flag", "false"),
        ("size", True),
        ("size", 3.0),
        ("rate", "0.5"),
        ("rate", float("inf")),
        ("rate", 10**400),
        ("model", None),
        ("revision", 12345),
        ("metric", "L2"),
        ("windows", "16"),
        ("windows", [1, "2"]),
        ("options", {"a": object()}),
        ("options", {1: 2}),
        ("model", b"x"),
    ],
)
def test_python_values_of_another_kind_are_refused(
    chapter: Chapter, name: str, given: object
) -> None:
    with pytest.raises(Refused, match=f"'{name}' cannot be"):
        parameters.check(chapter, {name: given})


def test_defaults_fill_what_is_not_given(chapter: Chapter) -> None:
    full = parameters.check(chapter, {"size": 9})
    assert list(full)[:4] == ["model", "revision", "flag", "size"]
    assert (full["size"], full["rate"], full["query"]) == (9, 0.5, "a = b")


def test_an_unknown_name_is_refused_with_the_nearest(chapter: Chapter) -> None:
    with pytest.raises(Refused, match=r"no parameter 'modle': did you mean 'model'\?"):
        parameters.parse(chapter, ["modle=x"])
    with pytest.raises(Refused, match=r"no parameter 'modle': did you mean 'model'\?"):
        parameters.check(chapter, {"modle": "x"})
    with pytest.raises(Refused, match="write it as name=value"):
        parameters.parse(chapter, ["model"])


@pytest.mark.parametrize("cells", [(), ("a = 1", "b = 2")])
def test_there_is_exactly_one_parameters_cell(tmp_path: Path, cells: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match=f"has {len(cells)} code cells tagged 'parameters'"):
        declare(tmp_path, *cells)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("a = 1 + 1", "not a plain literal"),
        ("a = f()", "not a plain literal"),
        ("a = (1, 2)", "not a plain literal"),
        ("a = {1: 2}", "not a plain literal"),
        ("a = {[]: 2}", "not a plain literal"),
        ("a = 1e999", "not a plain literal"),
        ("a = b = 1", "does not belong"),
        ("a, b = 1, 2", "does not belong"),
        ("a: int", "does not belong"),
        ("import os", "does not belong"),
        ("a = 1\na = 2", "twice"),
        ("a = ", "no Python"),
        ("a: int = 'x'", "its annotation wants int"),
        ("a: Literal['x'] = 'y'", "its annotation wants one of 'x'"),
        ("a: Path = 'x'", "annotation"),
    ],
)
def test_a_cell_holds_plain_literals_only(tmp_path: Path, cell: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        declare(tmp_path, cell)
    assert "\n" not in str(caught.value)


def test_annotations_widen_the_type_of_the_default(tmp_path: Path) -> None:
    cell = "a: 'int | None' = None\nb: Union[str, float] = 1\nc: list[float] = [1]\nd: dict = {}"
    known = declare(tmp_path, "# a comment\n" + cell)
    assert {name: str(parameter.kind) for name, parameter in known.items()} == {
        "a": "int or none",
        "b": "str or float",
        "c": "list of float",
        "d": "dict",
    }
    assert same(known["b"].default, 1.0)
    assert same(known["c"].default[0], 1.0)
