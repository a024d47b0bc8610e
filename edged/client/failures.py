"""Turns a failed call into one of edged's typed errors, with the daemon's own message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from edged.errors import (
    Code,
    EdgedError,
    MessageTooLargeError,
    UnavailableError,
    UnreachableError,
    from_code,
)

if TYPE_CHECKING:
    from edged.client.address import Address

_DETAILS_KEY = "grpc-status-details-bin"
# Codes that gRPC itself or a proxy may send and edged does not.
_NEAREST = {
    grpc.StatusCode.UNKNOWN: Code.INTERNAL,
    grpc.StatusCode.DATA_LOSS: Code.INTERNAL,
    grpc.StatusCode.ABORTED: Code.UNAVAILABLE,
    grpc.StatusCode.ALREADY_EXISTS: Code.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE: Code.INVALID_ARGUMENT,
}

LATE = "allow more time"
"""What to do about a call that was not answered in time."""
LATE_ANSWER = "allow more time or ask for fewer tokens"
"""The same of a generation."""
LATE_VECTORS = "allow more time or send fewer inputs"
"""The same of embeddings."""


def late_load(model: str) -> str:
    """The same of loading ``model``, which the daemon goes on with."""
    return f"model {model} does not serve yet; a load that has begun goes on, and edgectl status shows how far it is"


def late_unload(model: str, *, cancel: bool) -> str:
    """The same of unloading ``model``.

    Args:
        model: Its name.
        cancel: Whether its requests were not waited for.
    """
    if cancel:
        return f"model {model} is not unloaded yet; what has begun goes on, and edgectl status shows how far it is"
    return (
        f"model {model} had requests still and serves on, unless edgectl status shows it unloaded by now; allow more time, "
        "or end its requests with --cancel (cancel_requests)"
    )


def read_failure(
    failure: grpc.RpcError, address: Address, timeout: float | None, late: str = LATE
) -> EdgedError:
    """The typed error of a failed call.

    Args:
        failure: What gRPC raised.
        address: Where the call went.
        timeout: The call's timeout in seconds, for the message.
        late: How things stand once that has passed, and what to do.
    """
    status: grpc.StatusCode = failure.code()
    message: str = failure.details() or status.name
    field, retry, lost = _read_details(failure.trailing_metadata())
    code = _NEAREST.get(status) or Code(status.value[0])
    if code is Code.DEADLINE_EXCEEDED and timeout is not None and "deadline exceeded" in message.lower():
        # gRPC's own words; a refusal by the daemon says what it expected.
        message = f"no complete answer within the timeout of {timeout:g} s: {late}"
    if code is Code.CANCELLED and message == status.name:
        # gRPC's word for a call that a server ended by stopping; our own reasons and a client's cancel have texts.
        code, message = Code.UNAVAILABLE, "the daemon stopped before it had answered"
    if code is Code.UNAVAILABLE and retry is None and not lost:
        # The daemon's own refusals carry a retry hint; this may be gRPC's word for a daemon that is not there.
        unreachable = address.unreachable()
        if unreachable is not None:
            return unreachable
        if "handshake" in message.lower() or "certificate" in message.lower():
            return UnreachableError(
                f"edged at {address} and this client do not agree on TLS ({message}): name the authority of its "
                "certificate with --tls-ca (EDGED_TLS_CA), and a certificate of your own if it asks for one",
                field="address",
            )
        if message.startswith("failed to connect"):  # and now it is there: it has just been started
            return UnreachableError(f"cannot reach edged at {address} yet: {message}", field="address")
        return UnavailableError(f"the connection to edged at {address} broke: {message}")
    if code is Code.RESOURCE_EXHAUSTED and "larger than max" in message:
        return MessageTooLargeError(
            f"{message} bytes: send less, or raise limits.message_size in the daemon's configuration"
        )
    error = from_code(code.value, message, field=field, retry_seconds=retry)
    if isinstance(error, UnavailableError):
        error.lost = lost
    return error


def _read_details(metadata: object) -> tuple[str, float | None, bool]:
    """Field of the first BadRequest violation, delay of RetryInfo and whether the request was lost, as trailing metadata say."""
    for key, value in metadata or ():  # type: ignore[attr-defined]
        if key == _DETAILS_KEY:
            return _parse_details(value)
    return "", None, False


def _parse_details(data: bytes) -> tuple[str, float | None, bool]:
    # Only failures need these messages; importing them would slow down every start of edgectl.
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from google.rpc import error_details_pb2, status_pb2  # noqa: PLC0415

    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return "", None, False
    field, retry, lost = "", None, False
    for detail in status.details:
        bad, info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        about = error_details_pb2.ErrorInfo()
        if detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(info):
            retry = info.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(about):
            lost = lost or (about.domain, about.reason) == ("edged", "REQUEST_LOST")
    return field, retry, lost
