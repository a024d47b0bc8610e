"""Calls written as Python: parsed as syntax, never evaluated."""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

from edged.decoding.parsing.calls import make_call

if TYPE_CHECKING:
    from edged.decoding.parsing.calls import Call, Tools

_FENCE = re.compile(r"\s*```[a-zA-Z]*[ \t]*\n(.*?)(?:\n?[ \t]*```)?\s*", re.DOTALL)
_NAMES = {"true": True, "false": False, "null": None, "none": None}
_LONGEST = 256 * 1024
_PARTS = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<triple>\"{3}|'{3})
      | (?P<quote>["'])""",
    re.VERBOSE,
)


class _MalformedError(Exception):
    """The syntax is Python, and no call with plain values."""


def read_python_calls(body: str, tools: Tools) -> list[Call] | None:
    """The calls of a block, one a line, with keyword arguments that are plain values; None where it is malformed."""
    fenced = _FENCE.fullmatch(body)
    source = (fenced[1] if fenced else body).strip()
    if not source or len(source) > _LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know stays as it is
            tree = ast.parse(source)
        return [_call(statement, tools) for statement in tree.body] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError, _MalformedError):
        return None


def ends_inside_string(body: str) -> bool:
    """Whether Python would still be reading a string at the end of ``body``."""
    place = 0
    while (match := _PARTS.search(body, place)) is not None:
        place = match.end()
        if match.lastgroup == "comment":
            continue
        mark = match[0]
        pattern = r"(?:[^\\]|\\.)*?" + mark if len(mark) == 3 else rf"(?:[^\\\n{mark}]|\\.)*(?:{mark}|\n)"
        closing = re.compile(pattern, re.DOTALL).match(body, place)
        if closing is None:
            return True
        place = closing.end()
    return False


def _call(statement: ast.stmt, tools: Tools) -> Call:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        raise _MalformedError
    node = statement.value
    name = tools.name(_dotted(node.func))
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise _MalformedError
    arguments = {}
    for keyword in node.keywords:
        assert keyword.arg is not None, "checked above"  # noqa: S101
        arguments[tools.argument(name, keyword.arg)] = _value(keyword.value)
    call = make_call(name, arguments)
    if call is None:
        raise _MalformedError
    return call


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _MalformedError


def _value(node: ast.expr) -> Any:  # noqa: ANN401 - any JSON
    """The plain value that an expression spells."""
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Name) and node.id.lower() in _NAMES:
        return _NAMES[node.id.lower()]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _MalformedError
        return -number if isinstance(node.op, ast.USub) else number
    raise _MalformedError


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise _MalformedError
    return node.value


def _constant(value: object) -> str | bool | int | float | None:
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise _MalformedError
