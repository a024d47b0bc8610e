"""Protobuf messages as JSON for programs: numbers stay numbers, every field is there, enum values are plain words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message


def as_object(message: Message) -> dict[str, Any]:
    """A message as a dictionary, with every field of its type.

    protobuf's own JSON writes 64-bit numbers as strings and leaves out zeros, which scripts trip over.
    """
    return {field.name: _value(getattr(message, field.name), field) for field in message.DESCRIPTOR.fields}


def _value(value: Any, field: Any) -> Any:  # noqa: ANN401 - descriptors have one class in C and one in Python
    if isinstance(value, (str, bytes, int, float)) or hasattr(value, "DESCRIPTOR"):
        return _single(value, field)
    return [_single(item, field) for item in value]  # the containers of repeated fields have no common class


def _single(value: Any, field: Any) -> Any:  # noqa: ANN401 - as above
    if field.enum_type is not None:
        # STATE_SERVING of the enum State is "serving".
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", field.enum_type.name).upper() + "_"
        word = field.enum_type.values_by_number.get(value)
        return word.name.removeprefix(prefix).lower() if word is not None else "unknown"
    return as_object(value) if field.message_type is not None else value
