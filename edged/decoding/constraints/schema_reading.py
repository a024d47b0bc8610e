"""The text of a schema, read so that nothing of it is lost: what Python's reader would drop or round is refused."""

from __future__ import annotations

import json
import math
from typing import Any

from edged.errors import InvalidArgumentError

DEEPEST = 64


def refuse(where: str, what: str) -> InvalidArgumentError:
    """An error that names a place of the schema."""
    return InvalidArgumentError(f"json_schema: {where} {what}", field="json_schema")


def read_json(text: str) -> Any:  # noqa: ANN401 - any JSON
    """The value of a JSON text.

    Raises:
        InvalidArgumentError: It is no JSON, nested too deeply, has a key twice in one object, or holds a number or a text that
            JSON has not.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise refuse("$", f"is nested too deeply; {DEEPEST} levels are allowed") from None
    except ValueError as error:
        raise refuse("$", f"is no JSON: {error}; give the JSON text of a schema") from None
    refuse_halves(value)
    return value


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """The value of the JSON text that begins at ``start``, and where it ends.

    Raises:
        InvalidArgumentError: As :func:`read_json`, but for what is no JSON.
        ValueError: It is no JSON, or nested too deeply.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError from None
    refuse_halves(value)
    return value, end


def refuse_halves(value: Any) -> None:  # noqa: ANN401 - any JSON
    r"""Refuse half a character (``"\ud83d"``), which no UTF-8 text has.

    Raises:
        InvalidArgumentError: There is one.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise refuse(
            "$", f"holds {half}, half a surrogate pair, which no text has; give both halves"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise refuse("$", f"has the key {json.dumps(twice[:100])} twice in one object; leave one out")
    return value


def _constant(name: str) -> Any:  # noqa: ANN401
    raise refuse("$", f"holds {name}, which is no number of JSON; leave it out")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise refuse("$", f"holds {text[:40]}, which is beyond double precision; give a smaller number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_number)
