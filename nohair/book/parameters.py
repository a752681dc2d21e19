"""What a chapter's `parameters` cell declares, and what a reader may give instead.

A default is a plain literal, and its type is the parameter's type. An annotation can widen it:
``revision: str | None = None``, ``metric: Literal["l2", "angle"] = "l2"``, ``windows: list[int]``.
A bare ``None`` stands for text that may be absent. Lists are the only sequence: they are what
JSON, YAML and papermill all carry unchanged.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from nohair.book.chapters import Chapter, read
from nohair.errors import Refused

Value = Any  # None, bool, int, float, str, or lists and dictionaries of these

TAG = "parameters"
_WORDS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True)
class Kind:
    """The values that one parameter takes.

    Attributes
    ----------
    types : tuple of type
        Accepted types, out of ``NoneType, bool, int, float, list, dict, str``.
    choices : tuple
        The only accepted values, when an annotation lists them; else empty.
    item : Kind, optional
        What the items of a list must be; anything plain when absent.
    """

    types: tuple[type, ...]
    choices: tuple[Value, ...] = ()
    item: Kind | None = None

    def __str__(self) -> str:
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        names = {NoneType: "none", list: f"list of {self.item}" if self.item else "list"}
        return " or ".join(names.get(type_, type_.__name__) for type_ in self.types)

    def accept(self, value: Value) -> Value:
        """Return a Python value as this kind has it.

        NumPy scalars become Python's, tuples become lists, integers become floats where only
        floats are wanted. Nothing else is converted.

        Raises
        ------
        ValueError
            If the value is of another kind.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, tuple):
            value = list(value)
        if type(value) not in self.types:
            if type(value) is not int or float not in self.types:
                raise ValueError
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        if isinstance(value, list) and self.item:
            value = [self.item.accept(item) for item in value]
        elif isinstance(value, list | dict):
            _plain(value)
        if self.choices and not any(_same(value, choice) for choice in self.choices):
            raise ValueError
        return value

    def read(self, text: str) -> Value:
        """Return the value that a reader wrote on a command line.

        Raises
        ------
        ValueError
            If the text is of another kind.
        """
        for type_, reader in _READERS.items():
            if type_ in self.types:
                try:
                    return self.accept(reader(text.strip() if type_ is not str else text, self))
                except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError):
                    continue
        raise ValueError


@dataclass(frozen=True)
class Parameter:
    """One declared parameter: its name, its default and the values it takes."""

    name: str
    default: Value
    kind: Kind


def declared(notebook: Path) -> dict[str, Parameter]:
    """Read the parameters that a notebook declares, without running it.

    Parameters
    ----------
    notebook : Path
        A notebook with exactly one code cell tagged ``parameters``, which holds nothing but
        assignments of plain literals.

    Returns
    -------
    dict
        The parameters by name, in the order of the cell.

    Raises
    ------
    Refused
        If there is no such cell, more than one, or one that holds anything else.
    """
    cells = [
        cell
        for cell in read(notebook).cells
        if cell.cell_type == "code" and TAG in cell.metadata.get("tags", [])
    ]
    if len(cells) != 1:
        raise Refused(
            f"{notebook.name} has {len(cells)} code cells tagged '{TAG}': it must have exactly one"
        )
    try:
        statements = ast.parse(cells[0].source).body
    except SyntaxError as problem:
        raise Refused(
            f"{notebook.name}: its '{TAG}' cell is no Python (line {problem.lineno}): mend it"
        ) from problem
    parameters: dict[str, Parameter] = {}
    for statement in statements:
        parameter = _declaration(statement, notebook.name)
        if parameter.name in parameters:
            raise Refused(
                f"{notebook.name} declares '{parameter.name}' twice: keep one of the two lines"
            )
        parameters[parameter.name] = parameter
    return parameters


def parse(chapter: Chapter, pairs: Iterable[str]) -> dict[str, Value]:
    """Read ``name=value`` texts as a command line gives them, each with its default's type.

    Raises
    ------
    Refused
        If a text has no ``=``, names no parameter of the chapter, or has a value of another kind.
    """
    known = declared(chapter.source)
    given = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise Refused(f"'{pair}' sets nothing: write it as name=value")
        parameter = _known(name.strip(), known, chapter)
        try:
            given[parameter.name] = parameter.kind.read(text)
        except ValueError:
            raise _wrong(parameter, text, chapter) from None
    return given


def check(chapter: Chapter, given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the chapter's full parameters: its defaults, with the given values in their place.

    Raises
    ------
    Refused
        If a name is not declared or a value is of another kind than its default.
    """
    known = declared(chapter.source)
    full = {name: parameter.default for name, parameter in known.items()}
    for name, value in given.items():
        parameter = _known(name, known, chapter)
        try:
            full[name] = parameter.kind.accept(value)
        except (ValueError, OverflowError):
            raise _wrong(parameter, value, chapter) from None
    return full


def _known(name: str, known: Mapping[str, Parameter], chapter: Chapter) -> Parameter:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise Refused(
        f"chapter {chapter.name} has no parameter '{name}': {hint}"
        f"It has: {', '.join(known) or 'none'}"
    )


def _wrong(parameter: Parameter, value: Value, chapter: Chapter) -> Refused:
    return Refused(
        f"chapter {chapter.name}: '{parameter.name}' cannot be {value!r}: "
        f"give {parameter.kind} (its default is {parameter.default!r})"
    )


def _declaration(statement: ast.stmt, notebook: str) -> Parameter:
    annotation = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
        literal: ast.expr | None = statement.value
    elif isinstance(statement, ast.AnnAssign):
        target, literal, annotation = statement.target, statement.value, statement.annotation
    else:
        target, literal = statement, None  # type: ignore[assignment]
    line = ast.unparse(statement).splitlines()[0]
    if not isinstance(target, ast.Name) or literal is None:
        raise Refused(f"{notebook}: '{line}' does not belong in the '{TAG}' cell: use name = value")
    try:
        default = _plain(ast.literal_eval(literal))
    except (ValueError, TypeError):
        raise Refused(
            f"{notebook}: the default of '{target.id}' is not a plain literal ({line}): "
            "use None, a truth value, a number, a text, a list or a dictionary"
        ) from None
    try:
        kind = _annotated(annotation) if annotation else _kind_of(default)
    except ValueError:
        raise Refused(
            f"{notebook}: the annotation in '{line}' is not understood: "
            "use None, bool, int, float, str, list, dict, Literal, Optional or |"
        ) from None
    try:
        return Parameter(target.id, kind.accept(default), kind)
    except (ValueError, OverflowError):
        raise Refused(
            f"{notebook}: the default of '{target.id}' is {default!r}, its annotation wants {kind}"
        ) from None


def _plain(value: Value) -> Value:
    """Return the value if it is made of plain, finite literals; raise ValueError otherwise."""
    if type(value) is list:
        for item in value:
            _plain(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError
            _plain(item)
    elif type(value) is float:
        if not math.isfinite(value):
            raise ValueError
    elif type(value) not in (NoneType, bool, int, str):
        raise ValueError
    return value


def _same(value: Value, choice: Value) -> bool:
    return type(value) is type(choice) and value == choice


def _kind_of(default: Value) -> Kind:
    if default is None:
        return Kind((NoneType, str))
    if isinstance(default, list):
        items = {_kind_of(item) for item in default}
        # Mixed lists promise nothing about their items.
        return Kind((list,), item=items.pop() if len(items) == 1 else None)
    return Kind((type(default),))


def _annotated(node: ast.expr) -> Kind:
    names = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict}
    match node:
        case ast.Constant(value=None):
            return Kind((NoneType,))
        case ast.Constant(value=str(quoted)):
            return _annotated(_expression(quoted))
        case ast.Name(id=name) if name in names:
            return Kind((names[name],))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right])
        case ast.Subscript(value=ast.Name(id=outer) | ast.Attribute(attr=outer), slice=inner):
            inners = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if outer == "Union":
                return _union(inners)
            if outer == "Optional" and len(inners) == 1:
                return _union([*inners, ast.Constant(value=None)])
            if outer == "Literal":
                choices = tuple(_plain(ast.literal_eval(choice)) for choice in inners)
                return Kind(tuple(dict.fromkeys(type(choice) for choice in choices)), choices)
            if outer in ("list", "List") and len(inners) == 1:
                return Kind((list,), item=_annotated(inners[0]))
            if outer in ("dict", "Dict"):
                return Kind((dict,))
    raise ValueError


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as problem:
        raise ValueError from problem


def _union(nodes: Iterable[ast.expr]) -> Kind:
    kinds = [_annotated(node) for node in nodes]
    types = tuple(dict.fromkeys(type_ for kind in kinds for type_ in kind.types))
    choices = tuple(choice for kind in kinds for choice in kind.choices)
    if choices and NoneType in types:
        choices += () if None in choices else (None,)
    return Kind(types, choices, next((kind.item for kind in kinds if kind.item), None))


def _read_none(text: str, _: Kind) -> None:
    if text.lower() not in ("none", "null"):
        raise ValueError


def _read_bool(text: str, _: Kind) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError
    return _WORDS[text.lower()]


def _read_list(text: str, kind: Kind) -> Value:
    for reader in (json.loads, ast.literal_eval) if text.startswith(("[", "(")) else ():
        try:
            value = reader(text)
        except (ValueError, SyntaxError):
            continue
        if isinstance(value, list | tuple):
            return value
    if kind.item is None:
        raise ValueError
    # Bare words, as in [text, shuffled] or 16,1024: each is read on its own.
    inside = text.removeprefix("[").removesuffix("]").strip()
    return [kind.item.read(word.strip()) for word in inside.split(",")] if inside else []


def _read_dict(text: str, _: Kind) -> Value:
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


# In the order in which a text is tried: any text can be a str, so it comes last.
_READERS: dict[type, Callable[[str, Kind], Value]] = {
    NoneType: _read_none,
    bool: _read_bool,
    int: lambda text, _: int(text),
    float: lambda text, _: float(text),
    list: _read_list,
    dict: _read_dict,
    str: lambda text, _: text,
}
