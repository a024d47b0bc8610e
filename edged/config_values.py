"""One YAML value into one Python value, refused with what was found and what is allowed."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from edged.config_faults import show, show_plain
from edged.config_schema import allowed_values
from edged.units import exact_size, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yaml.nodes import Node

_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,30})")
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]{0,30}(?:\.[0-9_]{0,30})?(?:[eE][-+]?[0-9]{1,3})?")
_KINDS = {
    "str": "text",
    "int": "a number",
    "float": "a number",
    "bool": "a truth value",
    "null": "no value",
    "timestamp": "a date",
}


class Refusal(Exception):  # noqa: N818 - the fault is made where its place is known
    """A value does not fit its key. ``found`` replaces the value in the message where that says more."""

    def __init__(self, remedy: str, found: str = "") -> None:
        super().__init__(remedy)
        self.remedy = remedy
        self.found = found


def scalar(node: Node, kind: Any, metadata: Mapping[str, Any], folder: Path) -> Any:  # noqa: ANN401
    """The value of one key.

    Args:
        node: What the file holds.
        kind: ``int``, ``float``, ``bool``, ``str`` or ``Path``.
        metadata: Limits of the key (:mod:`edged.config`).
        folder: Where relative paths start.

    Raises:
        Refusal: It does not fit; the message says what is allowed.
    """
    allowed = allowed_values(kind, metadata)
    if not isinstance(node, yaml.ScalarNode):
        raise Refusal(f"write {allowed}")
    if is_null(node):
        raise Refusal(f"write {allowed}, or remove the key")
    if metadata["unit"]:
        return _with_unit(node, metadata, allowed)
    if kind in (int, float):
        return _number(node, kind, metadata, allowed)
    if kind is bool:
        return _truth(node, allowed)
    text = _text(node, metadata, allowed)
    return _path(text, folder) if kind is Path else text


def _truth(node: yaml.ScalarNode, allowed: str) -> bool:
    if node.tag != _TAG + "bool":
        raise Refusal(f"write {allowed}")
    return node.value.lower() in ("true", "yes", "on")


def _text(node: yaml.ScalarNode, metadata: Mapping[str, Any], allowed: str) -> str:
    value: str = node.value
    is_choice = metadata["choices"] and value in metadata["choices"]  # YAML 1.1 takes off for a truth value
    if node.tag != _TAG + "str" and not is_choice:
        quoted = f'; text that looks like something else needs quotes: "{value}"'
        raise Refusal(f"write {allowed}" + (quoted if not metadata["choices"] and len(value) <= 60 else ""))
    if not value.isprintable():
        raise Refusal(f"write {allowed}, without control characters")
    if metadata["choices"] and value not in metadata["choices"]:
        close = get_close_matches(value[:64].lower(), metadata["choices"], n=1)
        raise Refusal(f"write {allowed}" + (f"; did you mean {close[0]}?" if close else ""))
    if metadata["pattern"] and not re.fullmatch(metadata["pattern"], value):
        raise Refusal(f"write {allowed} that matches {metadata['pattern']}")
    return value


def _with_unit(node: yaml.ScalarNode, metadata: Mapping[str, Any], allowed: str) -> Any:  # noqa: ANN401 - int or float
    size = metadata["unit"] == "size"
    if node.tag in (_TAG + "int", _TAG + "float"):
        try:
            example = _unitless_example(float(node.value.replace("_", "")), size=size)
        except ValueError:
            example = "512MiB" if size else "30s"
        raise Refusal(f"write it with a unit, such as {example}", f"{show_plain(node.value)} without a unit")
    if node.tag != _TAG + "str":
        raise Refusal(f"write {allowed}")
    try:
        value: int | float = parse_size(node.value) if size else parse_duration(node.value)
    except ValueError as error:
        raise Refusal(f"write {error}") from None
    _within(value, metadata, allowed)
    return value


def _unitless_example(number: float, *, size: bool) -> str:
    """The number with the unit that was most likely meant."""
    if not size:
        return f"{number:g}s" if 0 <= number < 1e6 else "30s"
    if number >= 2**20 and number.is_integer() and number <= 2**53:
        return exact_size(int(number))
    return f"{number:g}MiB" if 0 < number < 2**20 else "512MiB"


def _number(node: yaml.ScalarNode, kind: Any, metadata: Mapping[str, Any], allowed: str) -> Any:  # noqa: ANN401
    tags = {int: ("int",), float: ("int", "float")}[kind]
    pattern = {int: _INTEGER, float: _FLOAT}[kind]
    if node.tag not in [_TAG + tag for tag in tags] or not pattern.fullmatch(node.value):
        text = node.tag == _TAG + "str"
        plain = re.fullmatch(r"[-+]?[0-9]+(?:\.[0-9]+)?", node.value) is not None and node.style is not None
        raise Refusal(f"write {allowed}" + (" without quotes" if text and plain else ""))
    value = kind(node.value.replace("_", ""))
    _within(value, metadata, allowed)
    return value


def _within(value: float, metadata: Mapping[str, Any], allowed: str) -> None:
    low, high, multiple = metadata["low"], metadata["high"], metadata["multiple"]
    inside = (low is None or value >= low) and (high is None or value <= high)
    if not inside or (multiple > 1 and value % multiple):
        raise Refusal(f"write {allowed}")


def _path(text: str, folder: Path) -> Path:
    if not text.strip():
        raise Refusal("write a path", "an empty path")
    if re.search(r"\$(?:\{|[A-Za-z_])", text):
        raise Refusal("write the path itself: environment variables are not expanded, only ~ is")
    if re.match(r"[a-z]+://|unix:", text):
        raise Refusal("write a plain path, absolute or relative to the folder of this file")
    try:
        return folder / Path(text).expanduser()
    except RuntimeError:
        raise Refusal("write the home folder itself: there is no such user, or HOME is not set") from None


def is_null(node: Node) -> bool:
    """Whether nothing stands behind a key."""
    return isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"


def describe(node: Node) -> str:
    """A value as a message names it, with its kind where YAML's reading may surprise."""
    if isinstance(node, yaml.MappingNode):
        return "keys"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if is_null(node):
        return "no value"
    name = node.tag.removeprefix(_TAG)
    if name == "str":
        return show(node.value)
    return f"{show_plain(node.value)} ({_KINDS.get(name, 'tag ' + show(name))})"
