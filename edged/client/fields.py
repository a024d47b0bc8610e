"""Sets fields of request messages; what a field cannot hold is refused by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.descriptor import FieldDescriptor

from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

_WHOLE_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""What a field of each whole type can hold; the daemon checks the rest."""


def set_field(message: Message, name: str, value: object) -> None:
    """Set a field; None leaves it out."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        limits = _WHOLE_NUMBERS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
        why = "give a whole number from {} to {}".format(*limits) if limits else str(error)
        raise InvalidArgumentError(f"{name} is {value!r}: {why}", field=name) from error


def extend_field(message: Message, name: str, values: Iterable[object]) -> None:
    """Fill a repeated field."""
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} cannot be sent: {error}", field=name) from error
