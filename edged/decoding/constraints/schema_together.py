"""Schemas that hold for one value together, by ``allOf``, references and chosen alternatives, and what is lost where they meet.

llguidance lets a whole number through that is excluded where the other bound lies within its unit
(``exclusiveMinimum: 0`` with ``maximum: 0.5``), wherever the two bounds come from.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from edged.decoding.constraints.schema_reading import refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from edged.decoding.constraints.schema_places import Places

_MOST = 50_000
"""Schemas looked at, each once for every company that it is in."""
_OPPOSITE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


class Holding(NamedTuple):
    """A schema that holds for a value.

    Attributes:
        schema: An object of keywords.
        chosen: Where it holds only with an alternative of an ``anyOf`` or ``oneOf``: the list's id and the index.
    """

    schema: dict[str, Any]
    chosen: frozenset[tuple[int, int]]

    def meets(self, other: Holding) -> bool:
        """Whether both can hold at once: they need no two alternatives of one list."""
        mine = dict(self.chosen)
        return all(mine.get(which, index) == index for which, index in other.chosen)


def refuse_lost_bounds(root: Any, places: Places) -> None:  # noqa: ANN401 - any JSON
    """Refuse bounds that are not kept where they meet.

    Args:
        root: The whole document.
        places: Its schemas.

    Raises:
        InvalidArgumentError: Two bounds meet of which one is lost, or there are too many to tell.
    """
    if not _may_meet(places):
        return
    for holding in companies(root, places):
        bounds = [
            (key, each.schema[key], each)
            for each in holding
            for key in ("minimum", "maximum", *_OPPOSITE)
            if key in each.schema
        ]
        for key, value, each in bounds:
            if key not in _OPPOSITE or value != value // 1:
                continue
            for other_key, other_value, other in bounds:
                if (
                    other_key in _OPPOSITE[key]
                    and abs(other_value - value) < 1
                    and each.meets(other)
                    and _may_be_a_fraction(holding, each, other)
                ):
                    raise refuse(
                        f"{places.name(each.schema)}.{key}",
                        f"cannot be enforced on a whole number ({value}) with the other bound less than 1 away "
                        f"({places.name(other.schema)}.{other_key} is {other_value}); name the least or the largest "
                        f"number itself with {'minimum' if key == 'exclusiveMinimum' else 'maximum'}",
                    )


def _may_meet(places: Places) -> bool:
    """Whether there are two such bounds at all."""
    return any(
        value == value // 1 and abs(other - value) < 1
        for key, others in _OPPOSITE.items()
        for value in set(places.values(key))
        for opposite in others
        for other in set(places.values(opposite))
    )


def companies(root: Any, places: Places) -> Iterator[list[Holding]]:  # noqa: ANN401 - any JSON
    """The schemas that hold together, for every value that a document speaks of.

    Args:
        root: The whole document.
        places: Its schemas.

    Raises:
        InvalidArgumentError: There are too many.
    """
    waiting: list[list[Holding]] = [[Holding(root, frozenset())]] if isinstance(root, dict) else []
    seen: set[frozenset[tuple[int, frozenset[tuple[int, int]]]]] = set()
    left = _MOST
    while waiting:
        start = waiting.pop()
        known = frozenset((id(each.schema), each.chosen) for each in start)
        if not start or known in seen:
            continue
        seen.add(known)
        holding = _together(start, places, left)
        left -= len(holding)
        yield holding
        waiting.extend(_inside(holding))


def _together(start: list[Holding], places: Places, most: int) -> list[Holding]:
    """All that holds where ``start`` does."""
    found: dict[tuple[int, frozenset[tuple[int, int]]], Holding] = {}
    waiting = list(reversed(start))
    while waiting:
        each = waiting.pop()
        key = (id(each.schema), each.chosen)
        if key in found:
            continue
        found[key] = each
        if len(found) > most:
            raise refuse(
                places.name(start[0].schema),
                "combines too many schemas to check; say it with fewer alternatives",
            )
        also = [places.target(each.schema), *_list(each.schema, "allOf")]
        waiting.extend(Holding(part, each.chosen) for part in also if isinstance(part, dict))
        for word in ("anyOf", "oneOf"):
            parts = _list(each.schema, word)
            for index, part in enumerate(parts):
                chosen = Holding(part, each.chosen | {(id(parts), index)})
                if isinstance(part, dict) and len(dict(chosen.chosen)) == len(chosen.chosen):
                    waiting.append(chosen)
    return list(found.values())


def _inside(holding: list[Holding]) -> Iterator[list[Holding]]:
    """What holds for each property and item of the value."""
    names = {name for each in holding for name in _map(each.schema, "properties")}
    for name in names:
        yield list(_of_property(holding, name))
    yield [
        Holding(part, each.chosen)
        for each in holding
        for part in (
            each.schema.get("additionalProperties"),
            *_map(each.schema, "patternProperties").values(),
        )
        if isinstance(part, dict)
    ]
    longest = max(len(_list(each.schema, "prefixItems")) for each in holding)
    for index in range(longest + 1):
        parts = []
        for each in holding:
            first, rest = _list(each.schema, "prefixItems"), each.schema.get("items")
            parts.append((first[index] if index < len(first) else rest, each))
        yield [Holding(part, each.chosen) for part, each in parts if isinstance(part, dict)]


def _of_property(holding: Iterable[Holding], name: str) -> Iterator[Holding]:
    for each in holding:
        parts = [
            part for pattern, part in _map(each.schema, "patternProperties").items() if _found(pattern, name)
        ]
        properties = _map(each.schema, "properties")
        if name in properties:
            parts.append(properties[name])
        elif not parts:
            parts.append(each.schema.get("additionalProperties"))
        for part in parts:
            if isinstance(part, dict):
                yield Holding(part, each.chosen)


def _found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True  # of another dialect: perhaps


def _may_be_a_fraction(holding: list[Holding], *both: Holding) -> bool:
    """Whether a value for which both hold can be a number that is not whole."""
    chosen = frozenset[tuple[int, int]]().union(*(each.chosen for each in both))
    for each in holding:
        kinds = each.schema.get("type", "number")
        if each.chosen <= chosen and "number" not in (kinds if isinstance(kinds, list) else [kinds]):
            return False
    return True


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _map(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}
