"""What the descriptors of the public API say of its messages' fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message


def is_repeated(field: Any) -> bool:  # noqa: ANN401 - a FieldDescriptor; the stubs have two classes of that name
    """Whether the field may stand several times (older protobuf has no ``is_repeated``)."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def single_fields(kind: type[Message]) -> tuple[str, ...]:
    """Names of the fields of a message that hold one value, in the order of the file."""
    return tuple(field.name for field in kind.DESCRIPTOR.fields if not is_repeated(field))
