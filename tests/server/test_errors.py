"""Errors as statuses with details."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

from edged import errors
from edged.server.errors import MESSAGE_BYTES, clip, status_code, to_status


def details(error: errors.EdgedError) -> dict[str, object]:
    kinds = (error_details_pb2.BadRequest, error_details_pb2.QuotaFailure, error_details_pb2.RetryInfo)
    found = {}
    for packed in to_status(error).details:
        for kind in kinds:
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    return found


def test_every_code_has_a_grpc_status():
    for code in errors.Code:
        assert status_code(code).value[0] == code.value
    assert status_code(errors.Code.NOT_FOUND) is grpc.StatusCode.NOT_FOUND


def test_bad_request_names_the_field():
    found = details(errors.InvalidArgumentError("text is empty", field="text"))
    assert set(found) == {"BadRequest"}
    (violation,) = found["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("text", "text is empty")


def test_quota_failure_and_retry_info():
    found = details(errors.ResourceExhaustedError("the queue is full", field="queue", retry_seconds=1.25))
    assert set(found) == {"QuotaFailure", "RetryInfo"}
    assert found["QuotaFailure"].violations[0].subject == "queue"
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == 1250


def test_retry_info_of_zero_is_sent():
    assert "RetryInfo" in details(errors.UnavailableError("restarting", retry_seconds=0.0))


def test_an_error_without_more_has_no_details():
    assert not details(errors.InternalError("broken"))


@pytest.mark.parametrize("text", ["x" * 10_000, "漢" * 10_000, "🙂" * 10_000])
def test_long_messages_are_cut_between_characters(text):
    message = to_status(errors.InvalidArgumentError(text, field="text")).message
    assert len(message.encode()) <= MESSAGE_BYTES
    assert message.endswith("…")
    assert set(message) == {text[0], "…"}


def test_clip_leaves_short_text_and_replaces_surrogates():
    assert clip("Grüße", 7) == "Grüße"
    assert clip("a\ud800b") == "a?b"
