"""The schemas of a document by their places, and what its references mean."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from edged.decoding.constraints.schema_reading import refuse

Place = tuple[str, ...]
"""Keys and indices from the root."""


class Places:
    """Every schema of a document; filled in the order of the document.

    A reference leads to one of them or is refused: what stands inside ``default`` or ``enum`` is no schema, and nobody has
    looked at its keywords.
    """

    def __init__(self) -> None:
        self._schemas: dict[Place, Any] = {}
        self._bases: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._resources: dict[str, Place] = {"": ()}
        self._anchors: dict[str, Place] = {}

    def add(self, place: Place, name: str, schema: Any, base: str) -> str:  # noqa: ANN401 - any JSON
        """Note a schema.

        Args:
            place: Where it stands.
            name: The same for people.
            schema: An object or a truth value.
            base: The URI that references around it start from.

        Returns:
            The URI that references inside it start from.
        """
        self._schemas[place] = schema
        if not isinstance(schema, dict):
            return base
        if isinstance(schema.get("$id"), str):
            base = urldefrag(urljoin(base, schema["$id"])).url
            self._resources.setdefault(base, place)
        if isinstance(schema.get("$anchor"), str):
            self._anchors.setdefault(f"{base}#{schema['$anchor']}", place)
        self._bases[id(schema)] = base
        self._names[id(schema)] = name
        return base

    def has(self, keyword: str) -> bool:
        """Whether some schema has a keyword."""
        return bool(self.values(keyword))

    def values(self, keyword: str) -> list[Any]:
        """What the schemas have of a keyword."""
        return [
            schema[keyword]
            for schema in self._schemas.values()
            if isinstance(schema, dict) and keyword in schema
        ]

    def name(self, schema: dict[str, Any]) -> str:
        """The place of a schema, for people."""
        return self._names.get(id(schema), "$")

    def target(self, schema: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON
        """What the ``$ref`` of a schema leads to; None if it has none.

        Raises:
            InvalidArgumentError: It leads to no schema of the document.
        """
        reference = schema.get("$ref")
        if reference is None:
            return None
        where = f"{self.name(schema)}.$ref"
        if not isinstance(reference, str):
            raise refuse(where, "must be a text")
        full, fragment = urldefrag(urljoin(self._bases.get(id(schema), ""), reference))
        fragment = unquote(fragment)
        place = self._anchors.get(f"{full}#{fragment}")
        if place is None and full in self._resources and (not fragment or fragment.startswith("/")):
            parts = fragment.split("/")[1:]
            place = (
                *self._resources[full],
                *(part.replace("~1", "/").replace("~0", "~") for part in parts),
            )
        if place is None or place not in self._schemas:
            raise refuse(
                where,
                f"is {reference[:100]!r}, which leads to no schema inside this one; point to one in $defs",
            )
        if "patternProperties" in place[::2] or "patternProperties" in place[1::2]:
            raise refuse(where, f"is {reference[:100]!r}; point to a schema in $defs instead of a pattern's")
        return self._schemas[place]
