"""Reading request messages: what cannot be read says why, by the name of the field."""

from __future__ import annotations

from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from edged.errors import InvalidArgumentError
from edged.proto_fields import is_repeated

_LENGTH_DELIMITED = 2
_DEPTH_LIMIT = 100


def read_message(kind: type[Message], data: bytes) -> Message:
    """The request of type ``kind`` in ``data``.

    Raises:
        InvalidArgumentError: ``data`` is no such message; a string field that is not UTF-8 is named.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        bad = _find_invalid_utf8(kind.DESCRIPTOR, data)
        if bad is None:
            raise InvalidArgumentError(
                f"the request ({len(data)} bytes) is not a protobuf message of type {name}; build the client from "
                "the same protos/edged/v1 as the daemon"
            ) from None
        path, position = bad
        raise InvalidArgumentError(
            f"{path} is not UTF-8 (its byte {position} cannot stand there); encode the text as UTF-8",
            field=path,
        ) from None


def _find_invalid_utf8(
    descriptor: Any,  # noqa: ANN401 - a Descriptor; the stubs have two classes of that name
    data: bytes,
    prefix: str = "",
    depth: int = 0,
) -> tuple[str, int] | None:
    """Path of the first string field of ``data`` that is not UTF-8, and where; None if there is none."""
    fields = _length_delimited_fields(data)
    if fields is None or depth > _DEPTH_LIMIT:
        return None
    counts: dict[int, int] = {}
    for number, value in fields:
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        index = counts.get(number, 0)
        counts[number] = index + 1
        path = f"{prefix}{field.name}[{index}]" if is_repeated(field) else f"{prefix}{field.name}"
        if field.type == field.TYPE_STRING:
            try:
                value.decode("utf-8")
            except UnicodeDecodeError as error:
                return path, error.start
        elif field.type == field.TYPE_MESSAGE and field.message_type is not None:
            found = _find_invalid_utf8(field.message_type, value, f"{path}.", depth + 1)
            if found is not None:
                return found
    return None


def _length_delimited_fields(data: bytes) -> list[tuple[int, bytes]] | None:
    """Numbers and values of the fields of ``data`` that strings and messages are sent as; None for garbage.

    A message without fields keeps all that it reads as unknown fields, so protobuf's own parser walks the bytes.
    """
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return None
    return [(item.field_number, item.data) for item in iter(fields) if item.wire_type == _LENGTH_DELIMITED]
