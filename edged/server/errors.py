"""The one mapping of edged's errors to gRPC statuses with ``google.rpc`` details.

The details travel as a serialized ``google.rpc.Status`` in the trailing metadata ``grpc-status-details-bin``, which
gRPC libraries of all languages read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from edged.errors import Code, EdgedError, InvalidArgumentError, ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from typing import Any

    from google.protobuf.message import Message

DETAILS_KEY = "grpc-status-details-bin"
LOST = "REQUEST_LOST"
"""``ErrorInfo.reason`` of a request that was under way when its engine ended."""
MESSAGE_BYTES = 1024
"""Longest message that is sent. Trailing metadata is limited to 8 KiB by gRPC; percent-encoding can triple a message
and the details repeat it."""

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


def clip(text: str, limit: int = MESSAGE_BYTES) -> str:
    """``text``, cut to at most ``limit`` UTF-8 bytes, with an ellipsis where it was cut."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8")
    return data[: limit - 3].decode("utf-8", "ignore") + "…"


def status_code(code: Code) -> grpc.StatusCode:
    """Name that gRPC gives a canonical code."""
    return _STATUS_CODES[code.value]


def to_status(error: EdgedError) -> status_pb2.Status:
    """``google.rpc.Status`` with BadRequest, QuotaFailure, ErrorInfo and RetryInfo where they apply."""
    message = clip(error.message)
    status = status_pb2.Status(code=error.code.value, message=message)
    details: list[Message] = []
    if isinstance(error, InvalidArgumentError) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhaustedError):
        subject = error.field or "edged"
        details.append(
            error_details_pb2.QuotaFailure(
                violations=[error_details_pb2.QuotaFailure.Violation(subject=subject, description=message)]
            )
        )
    if isinstance(error, UnavailableError) and error.lost:
        details.append(error_details_pb2.ErrorInfo(reason=LOST, domain="edged"))
    if error.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(max(error.retry_seconds, 0.0) * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: EdgedError) -> NoReturn:
    """End the call with the error's status. Never returns: gRPC raises out of the handler."""
    status = to_status(error)
    trailing = ((DETAILS_KEY, status.SerializeToString()),) if status.details else ()
    await context.abort(status_code(error.code), status.message, trailing_metadata=trailing)
    raise AssertionError("gRPC's abort returned")
