"""What the dataclasses of :mod:`edged.config` say about keys: their types, what each may hold, which keys exist."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged.config import Config
from edged.config_faults import child
from edged.units import exact_duration, exact_size

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def known_keys() -> tuple[str, ...]:
    """The path of every key there is, lists as ``models[]``."""

    def walk(kind: type[Any], path: str) -> list[str]:
        places: list[str] = []
        for name, hint in field_types(kind).items():
            inner, place = without_none(hint), child(path, name)
            if typing.get_origin(inner) is tuple:
                inner, place = typing.get_args(inner)[0], place + "[]"
            places.append(place)
            if dataclasses.is_dataclass(inner):
                places.extend(walk(typing.cast("type[Any]", inner), place))
        return places

    return tuple(walk(Config, ""))


def field_types(kind: type[Any]) -> dict[str, Any]:
    """Field name → type of a dataclass, in order."""
    return _field_types(typing.cast("typing.Hashable", kind))


@cache
def _field_types(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass type
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a file must give this key."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def without_none(kind: Any) -> Any:  # noqa: ANN401 - a type
    """``X`` of ``X | None``."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def allowed_values(kind: Any, metadata: Mapping[str, Any]) -> str:  # noqa: ANN401 - a type
    """What a key may hold, as messages and the reference say it: ``a whole number from 1 to 256``."""
    kind = without_none(kind)
    if metadata["choices"]:
        return "one of " + ", ".join(str(choice) for choice in metadata["choices"])
    if metadata["unit"] == "size":
        return "a size" + _limits(metadata, lambda value: exact_size(int(value)))
    if metadata["unit"] == "duration":
        return "a duration" + _limits(metadata, exact_duration)
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _limits(
            metadata, lambda value: f"{value:g}" if isinstance(value, float) else f"{value:d}"
        )
    if typing.get_origin(kind) is tuple:
        return "a list" + (f" of {metadata['low']} to {metadata['high']} entries" if metadata["high"] else "")
    return {bool: "true or false", Path: "a path", str: "text"}.get(kind, "keys")


def _limits(metadata: Mapping[str, Any], show_limit: Any) -> str:  # noqa: ANN401 - number to text
    low, high = metadata["low"], metadata["high"]
    multiple = f", a multiple of {metadata['multiple']}" if metadata["multiple"] > 1 else ""
    if low is not None and high is not None:
        return f" from {show_limit(low)} to {show_limit(high)}{multiple}"
    if low is not None:
        return f" of at least {show_limit(low)}{multiple}"
    return (f" of at most {show_limit(high)}" if high is not None else "") + multiple
