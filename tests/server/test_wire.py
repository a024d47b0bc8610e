"""Requests that cannot be read say why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.errors import InvalidArgumentError
from edged.server.wire import read_message
from edged.v1 import inference_pb2

Request = inference_pb2.GenerateRequest


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field shorter than 128 bytes."""
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def refusal(data: bytes) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        read_message(Request, data)
    return caught.value


def test_a_good_request_is_read():
    request = Request(text="Grüße", priority=-3)
    assert read_message(Request, request.SerializeToString()) == request


def test_unknown_fields_are_no_fault():
    assert read_message(Request, field(2, b"hi") + field(14, b"\xff\xfe")).text == "hi"


def test_invalid_utf8_names_the_field_and_the_byte():
    error = refusal(field(2, b"abc\xffdef"))
    assert error.field == "text"
    assert "byte 3" in error.message
    assert "UTF-8" in error.message


def test_invalid_utf8_inside_messages_and_lists_is_found():
    message = field(1, b"user") + field(2, b"\xc3(")
    chat = field(1, field(1, b"system")) + field(1, message)
    assert refusal(field(4, chat)).field == "chat.messages[1].content"
    stops = field(2, b"ok") + field(2, b"ok too") + field(2, b"\x80")
    assert refusal(field(2, b"fine") + field(6, stops)).field == "stops.strings[2]"


@pytest.mark.parametrize("data", [b"\x12\xff", b"\xff\xff\xff", b"GET / HTTP/1.1\r\n"])
def test_garbage_names_the_message_type(data):
    error = refusal(data)
    assert "edged.v1.GenerateRequest" in error.message
    assert f"{len(data)} bytes" in error.message


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    try:
        assert isinstance(read_message(Request, data), Request)
    except InvalidArgumentError as error:
        assert error.message  # noqa: PT017 - both ends are allowed
