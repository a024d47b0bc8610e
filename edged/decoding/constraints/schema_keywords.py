"""The keywords of JSON schemas: which are enforced, what they may say, and where they hold further schemas.

llguidance enforces the keywords below exactly where their values are looked at first: it takes keywords that it does not know
for annotations, rounds numbers and counts a key that comes twice as two. What would come out otherwise than it is said is
refused with its place in the schema.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from edged.decoding.constraints.schema_patterns import rust_pattern
from edged.decoding.constraints.schema_reading import refuse
from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.decoding.constraints.schema_places import Place

ENFORCED = frozenset(
    {
        "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "properties",
        "additionalProperties", "patternProperties", "required", "minProperties", "maxProperties", "items",
        "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    }
)  # fmt: skip
ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$id",
        "$schema", "$anchor",
    }
)  # fmt: skip
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
MOST_PROPERTIES = 4096
"""Of one object: compiling them takes the square of their number."""
_EXACT = 2**53
"""Whole numbers up to this are told apart by llguidance, whose numbers are those of double precision."""
_SMALLEST = 1e-7
_LARGEST = 1e15
"""Of numbers that are written with a point."""
_DIGITS = 15
_MOST_COUNT = 2**31 - 1
_MOST_UNITS = 5000
"""A state for each remainder."""


ONE = ("additionalProperties", "items")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
DEFINITIONS = ("$defs", "definitions")
MAPS = ("properties", "patternProperties", *DEFINITIONS)
_TEXTS = ("pattern", "format", "$ref", "$id", "$anchor")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_NUMBERS = ("minimum", "maximum", *EXCLUSIVE, "multipleOf")


def check_keyword(key: str, value: Any, path: str) -> None:  # noqa: ANN401 - any JSON
    """Look at one keyword and its value, but not at the schemas inside.

    Raises:
        InvalidArgumentError: It cannot be enforced.
    """
    if key not in ENFORCED and key not in ANNOTATIONS:
        raise refuse(path, "cannot be enforced; leave it out or say it in other words (docs/generation.md)")
    _check_value(key, value, path)
    if key == "format" and value not in FORMATS:
        raise refuse(path, f"is {json.dumps(value)[:60]}; these can be enforced: {', '.join(FORMATS)}")
    if key in ("const", "enum") and _rounded(value):
        raise refuse(
            path,
            "holds a number beyond 2^53 (1e15 with a point), below 1e-7 or with more than 15 digits, which cannot be enforced exactly; use a "
            "text",
        )
    if key == "properties" and isinstance(value, dict) and len(value) > MOST_PROPERTIES:
        raise refuse(
            path, f"has {len(value)} properties, and at most {MOST_PROPERTIES} can be enforced; nest them"
        )
    if key == "pattern":
        _translated(value, path)
    if key == "patternProperties" and isinstance(value, dict):
        translated = {_translated(name, f"{path}.{name[:100]}") for name in value}
        if len(translated) < len(value):
            raise refuse(path, "has two patterns that mean the same; make them one")


def _check_value(key: str, value: Any, path: str) -> None:  # noqa: ANN401 - any JSON
    """Look at the type of a keyword's value.

    Raises:
        InvalidArgumentError: The keyword takes none of that type.
    """
    if key in _TEXTS and not isinstance(value, str):
        raise refuse(path, f"is {json.dumps(value)[:60]}; give a text")
    if key in _NUMBERS and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise refuse(path, f"is {json.dumps(value)[:60]}; give a number")
    if key in COUNTS and (
        not isinstance(value, int | float) or isinstance(value, bool) or value < 0 or value != value // 1
    ):
        raise refuse(path, f"is {json.dumps(value)[:60]}; give a whole number of at least 0")
    if key in COUNTS and value > _MOST_COUNT:
        raise refuse(path, f"is {value}, and at most {_MOST_COUNT} can be enforced; no answer is that long")
    if key == "multipleOf" and value <= 0:
        raise refuse(path, f"is {value}; give a number above 0")
    if key == "multipleOf" and _units(value) > _MOST_UNITS:
        raise refuse(path, f"is {value}, and at most {_MOST_UNITS} units of its last digit can be enforced")
    if key == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise refuse(path, f"is {json.dumps(value)[:60]}; give a list of texts")


def _units(value: float) -> Decimal:
    """A number in units of its last digit: 125 for 1.25."""
    number = Decimal(repr(value)).normalize()
    exponent = number.as_tuple().exponent
    return number.scaleb(-min(int(exponent), 0))


def _translated(pattern: str, path: str) -> str:
    try:
        return rust_pattern(pattern)
    except InvalidArgumentError as error:
        raise refuse(path, f"cannot be enforced: it {error.message}") from None


def _rounded(value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether llguidance would write some number of a value otherwise than it is."""
    if isinstance(value, dict):
        return any(map(_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_rounded, value))
    if isinstance(value, int):
        return abs(value) > _EXACT
    return isinstance(value, float) and (abs(value) > _LARGEST or _fine(value))


def _fine(value: float) -> bool:
    """Whether a number is so small or has so many digits that llguidance rounds it."""
    digits = "".join(map(str, Decimal(repr(value)).as_tuple().digits)).rstrip("0")
    return value != 0 and (abs(value) < _SMALLEST or len(digits) > _DIGITS)


def check_bounds(schema: dict[str, Any], where: str) -> None:
    """Refuse bounds whose numbers llguidance does not tell apart.

    Raises:
        InvalidArgumentError: The least or the largest number is beyond the exact ones.
    """
    bounds = {
        key: value
        for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        if isinstance(value := schema.get(key), int | float) and not isinstance(value, bool)
    }
    for key, value in bounds.items():
        size = value if key.endswith("inimum") else -value
        if size > _EXACT or (size == _EXACT and key.startswith("exclusive")):
            raise refuse(f"{where}.{key}", "is beyond 2^53, which cannot be enforced exactly")
        if value != value // 1 and _fine(value):
            raise refuse(
                f"{where}.{key}",
                "is below 1e-7 or has more than 15 digits, which cannot be enforced exactly; round it",
            )


def check_least_properties(schema: dict[str, Any], where: str) -> None:
    """Refuse a least number of properties that keys which come twice could make up.

    Raises:
        InvalidArgumentError: The keys that must come are fewer.
    """
    least = schema.get("minProperties", 0)
    if least > max(1, len(set(schema.get("required", ())))):
        raise refuse(
            f"{where}.minProperties",
            f"is {least}, and only as many as the keys that are required can be enforced, or 1: a key that the schema does "
            "not name may come twice; require keys",
        )


def parts(key: str, value: Any, path: str) -> Iterator[tuple[str, Any, Place]]:  # noqa: ANN401
    """The schemas inside a keyword's value, with their places for people and as steps from the schema.

    Raises:
        InvalidArgumentError: The value is not what the keyword takes.
    """
    if key in LISTS or (key == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise refuse(path, "must be a list of schemas")
        for index, each in enumerate(value):
            yield f"{path}[{index}]", each, (key, str(index))
    elif key in ONE:
        yield path, value, (key,)
    elif key in MAPS:
        if not isinstance(value, dict):
            raise refuse(path, "must be an object of schemas")
        for name, each in value.items():
            yield f"{path}.{name[:100]}", each, (key, name)
