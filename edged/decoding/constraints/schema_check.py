"""What of a JSON schema can be enforced. All that cannot is refused by name, before any token.

llguidance enforces the keywords below exactly. It refuses some others itself, but takes keywords that it does not know
for annotations; here everything that is neither enforced nor an annotation is refused with its place in the schema.
"""

from __future__ import annotations

import json
from typing import Any

from edged.errors import InvalidArgumentError

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
DEEPEST = 64
_EXACT = 2**53
"""Whole numbers up to this are told apart by llguidance, whose numbers are those of double precision."""

# A year is not 0000, and the 29th of February comes in leap years.
_REAL_DAYS = (
    "^(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})-",
    (
        "^(?:[0-9]{4}-(?:0[13-9]|1[0-2])-|[0-9]{4}-02-(?:[01]|2[0-8])"
        "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
    ),
)

_ONE = ("additionalProperties", "items")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def refuse(where: str, what: str) -> InvalidArgumentError:
    """An error that names a place of the schema."""
    return InvalidArgumentError(f"json_schema: {where} {what}", field="json_schema")


def read_schema(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Parse and check a schema.

    Raises:
        InvalidArgumentError: It is no JSON, nested too deeply, holds a keyword that cannot be enforced, or no finite JSON
            fits it.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise refuse("$", f"is nested too deeply; {DEEPEST} levels are allowed") from None
    except ValueError as error:
        raise refuse("$", f"is no JSON: {error}; give the JSON text of a schema") from None
    if not isinstance(schema, dict | bool):
        raise refuse("$", f"is {json.dumps(schema)[:60]}; give an object, true or false")
    _check(schema, "$", DEEPEST)
    if schema is False:
        raise refuse("$", "is false, which no JSON fits")
    try:
        finite = _Finiteness(schema).of(schema)
    except RecursionError:
        raise refuse("$", "has too long a chain of references; make it shorter") from None
    except (TypeError, AttributeError):
        finite = True  # a keyword has a value of a wrong type, which llguidance names
    if not finite:
        raise refuse(
            "$", "asks for JSON without an end: it comes back to itself through required parts alone"
        )
    return schema


def _check(schema: Any, where: str, depth: int) -> None:  # noqa: ANN401
    """Look at every keyword of a schema and of the schemas inside it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise refuse(where, f"is {json.dumps(schema)[:60]}; a schema is an object, true or false")
    if depth == 0:
        raise refuse(where, f"is nested too deeply; {DEEPEST} levels are allowed")
    for key, value in schema.items():
        path = f"{where}.{key[:100]}"
        if key not in ENFORCED and key not in ANNOTATIONS:
            raise refuse(
                path, "cannot be enforced; leave it out or say it in other words (docs/generation.md)"
            )
        if key == "format" and value not in FORMATS:
            raise refuse(path, f"is {json.dumps(value)[:60]}; these can be enforced: {', '.join(FORMATS)}")
        if key in ("const", "enum") and _rounded(value):
            raise refuse(
                path, "holds a whole number beyond 2^53, which cannot be enforced exactly; use a text"
            )
        for name, part in _parts(key, value, path):
            _check(part, name, depth - 1)
    _check_bounds(schema, where)


def _rounded(value: Any) -> bool:  # noqa: ANN401 - any JSON
    if isinstance(value, dict):
        return any(map(_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_rounded, value))
    return isinstance(value, int) and abs(value) > _EXACT


def _check_bounds(schema: dict[str, Any], where: str) -> None:
    """Refuse bounds of numbers that llguidance does not keep.

    Raises:
        InvalidArgumentError: The least number is beyond the exact ones, or a whole number is excluded and the other bound
            lies within its unit, where llguidance lets the excluded one through.
    """
    bounds = {
        key: value
        for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        if isinstance(value := schema.get(key), int | float) and not isinstance(value, bool)
    }
    for key, value in bounds.items():
        if value > _EXACT if key.endswith("inimum") else value < -_EXACT:
            raise refuse(f"{where}.{key}", "is beyond 2^53, which cannot be enforced exactly")
    kinds = schema.get("type", "number")
    if "number" not in (kinds if isinstance(kinds, list) else [kinds]):
        return
    for excluded, others in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        value = bounds.get(excluded)
        if value is None or value != value // 1:
            continue
        if any(abs(bounds[other] - value) < 1 for other in others if other in bounds):
            raise refuse(
                f"{where}.{excluded}",
                "cannot be enforced on a whole number with the other bound less than 1 away; name the least or the "
                f"largest number itself with {'minimum' if excluded == 'exclusiveMinimum' else 'maximum'}",
            )


def _parts(key: str, value: Any, path: str) -> list[tuple[str, Any]]:  # noqa: ANN401
    """The schemas inside a keyword's value, with their places."""
    if key in _LISTS or (key == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise refuse(path, "must be a list of schemas")
        return [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    if key in _ONE:
        return [(path, value)]
    if key in _MAPS:
        if not isinstance(value, dict):
            raise refuse(path, "must be an object of schemas")
        return [(f"{path}.{name[:100]}", each) for name, each in value.items()]
    return []


def exact(schema: Any) -> Any:  # noqa: ANN401
    """The same schema, with what llguidance knows of a keyword only nearly said exactly: which days there are."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS:
            result[key] = {name: exact(each) for name, each in value.items()}
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            result[key] = [exact(each) for each in value]
        else:
            result[key] = exact(value) if key in _ONE else value
    if schema.get("format") in ("date", "date-time"):
        result["allOf"] = [*result.get("allOf", ()), *({"pattern": pattern} for pattern in _REAL_DAYS)]
    return result


class _Finiteness:
    """Whether some finite JSON fits a schema, as far as references go: the least fixed point over all of its parts.

    Args:
        root: The schema that references start from.
    """

    def __init__(self, root: Any) -> None:  # noqa: ANN401
        self._root = root
        self._known: dict[int, bool] = {}  # by id of the part: those found finite
        changed = True
        while changed:
            before = len(self._known)
            self._visited: set[int] = set()
            self.of(root)
            changed = len(self._known) > before

    def of(self, schema: Any) -> bool:  # noqa: ANN401
        """Whether finite JSON fits ``schema``, a part of the root."""
        if not isinstance(schema, dict):
            return bool(schema)
        if id(schema) in self._known:
            return True
        if id(schema) in self._visited:
            return False
        self._visited.add(id(schema))
        if all(part(schema) for part in (self._reference, self._combined, self._object, self._array)):
            self._known[id(schema)] = True
            return True
        return False

    def _reference(self, schema: dict[str, Any]) -> bool:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True  # llguidance refuses what it cannot resolve
        target = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                return True
        return self.of(target)

    def _combined(self, schema: dict[str, Any]) -> bool:
        choices = [schema[key] for key in ("anyOf", "oneOf") if schema.get(key)]
        return all(any(self.of(each) for each in choice) for choice in choices) and all(
            self.of(each) for each in schema.get("allOf", ())
        )

    def _object(self, schema: dict[str, Any]) -> bool:
        if schema.get("type") != "object":
            return True
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        return all(self.of(properties[name]) for name in needed if name in properties)

    def _array(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        if schema.get("type") != "array" or not isinstance(least, int):
            return True
        first = schema.get("prefixItems", [])
        return all(self.of(each) for each in first[:least]) and (
            least <= len(first) or self.of(schema.get("items", True))
        )
