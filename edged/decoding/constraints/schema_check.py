"""What of a JSON schema can be enforced. All that cannot is refused by name, before any token."""

from __future__ import annotations

import json
from typing import Any

from edged.decoding.constraints.schema_keywords import (
    check_bounds,
    check_keyword,
    check_least_properties,
    parts,
)
from edged.decoding.constraints.schema_places import Place, Places
from edged.decoding.constraints.schema_reading import DEEPEST, read_json, refuse
from edged.decoding.constraints.schema_together import refuse_lost_bounds

MOST_SCHEMAS = 16_000
"""Of one document; llguidance takes 16 665 that are simple."""


def read_schema(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Parse and check a schema.

    Raises:
        InvalidArgumentError: It is no JSON, nested too deeply, holds a keyword that cannot be enforced, or no finite JSON
            fits it.
    """
    schema = read_json(text)
    check_schema(schema)
    return schema


def check_schema(schema: Any) -> Places:  # noqa: ANN401 - any JSON
    """Check a schema that :func:`read_json` has read.

    Returns:
        Its schemas by place.

    Raises:
        InvalidArgumentError: As :func:`read_schema`.
    """
    if not isinstance(schema, dict | bool):
        raise refuse("$", f"is {json.dumps(schema)[:60]}; give an object, true or false")
    places = Places()
    _Check(places).all(schema)
    if schema is False:
        raise refuse("$", "is false, which no JSON fits")
    try:
        finite = _Finiteness(schema, places).of(schema)
        refuse_lost_bounds(schema, places)
    except RecursionError:
        raise refuse("$", "has too long a chain of references; make it shorter") from None
    if not finite:
        raise refuse(
            "$", "asks for JSON without an end: it comes back to itself through required parts alone"
        )
    return places


class _Check:
    """Looks at every keyword of a schema and of the schemas inside it.

    Args:
        places: Takes what was looked at.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._schemas: list[dict[str, Any]] = []
        self._count = 0

    def all(self, root: Any) -> None:  # noqa: ANN401 - any JSON
        """Look at a whole document.

        Raises:
            InvalidArgumentError: Something in it cannot be enforced.
        """
        self._one(root, "$", (), "", DEEPEST)
        for schema in self._schemas:
            self._places.target(schema)  # which must be one of those seen

    def _one(self, schema: Any, where: str, place: Place, base: str, depth: int) -> None:  # noqa: ANN401
        self._count += 1
        if self._count > MOST_SCHEMAS:
            raise refuse(
                "$", f"has more than {MOST_SCHEMAS} schemas in it, which is the most; ask for less at once"
            )
        if isinstance(schema, bool):
            self._places.add(place, where, schema, base)
            return
        if not isinstance(schema, dict):
            raise refuse(where, f"is {json.dumps(schema)[:60]}; a schema is an object, true or false")
        if depth == 0:
            raise refuse(where, f"is nested too deeply; {DEEPEST} levels are allowed")
        base = self._places.add(place, where, schema, base)
        self._schemas.append(schema)
        for key, value in schema.items():
            path = f"{where}.{key[:100]}"
            check_keyword(key, value, path)
            for name, part, step in parts(key, value, path):
                self._one(part, name, (*place, *step), base, depth - 1)
        check_bounds(schema, where)
        check_least_properties(schema, where)


class _Finiteness:
    """Whether some finite JSON fits a schema, as far as references go: the least fixed point over all of its parts.

    Args:
        root: The whole document.
        places: What its references mean.
    """

    def __init__(self, root: Any, places: Places) -> None:  # noqa: ANN401
        self._places = places
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
        return "$ref" not in schema or self.of(self._places.target(schema))

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
