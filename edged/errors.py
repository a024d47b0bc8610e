"""Every error that edged raises on purpose, each with the one gRPC status code it becomes.

An error is raised where the fault is known. Its message names the key or argument, the value found and what to do.
The server maps it to a status in one place; the engine process sends it through the channel as ``(code, message)``
and the daemon raises the same class again with :func:`from_code`.
"""

from __future__ import annotations

import enum


class Code(enum.Enum):
    """Canonical status codes (the numbers of ``google.rpc.Code``)."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class EdgedError(Exception):
    """Base of all errors.

    Args:
        message: What is wrong, with the value, and what to do.
        field: The request field or configuration key at fault, if there is one (``BadRequest`` detail).
        retry_seconds: When a new try makes sense, if it does (``RetryInfo`` detail).
    """

    code = Code.INTERNAL

    def __init__(self, message: str, *, field: str = "", retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_seconds = retry_seconds


class InvalidArgumentError(EdgedError):
    """The request can never work as it is."""

    code = Code.INVALID_ARGUMENT


class NotFoundError(EdgedError):
    """A model, session or request of that name does not exist."""

    code = Code.NOT_FOUND


class ResourceExhaustedError(EdgedError):
    """The budget or a bounded queue is full."""

    code = Code.RESOURCE_EXHAUSTED


class MessageTooLargeError(ResourceExhaustedError):
    """A message is over the daemon's limit: unlike a full queue, it will be refused again."""


class FailedPreconditionError(EdgedError):
    """The system is not in the state that the call needs."""

    code = Code.FAILED_PRECONDITION


class UnauthenticatedError(EdgedError):
    """The call carries no credential that is known."""

    code = Code.UNAUTHENTICATED


class PermissionDeniedError(EdgedError):
    """The caller is known, or need not be, and may not make this call here."""

    code = Code.PERMISSION_DENIED


class UnavailableError(EdgedError):
    """The service cannot answer now; the same call may work later.

    Args:
        lost: The call was under way when what ran it ended, and may have been the cause (``ErrorInfo`` detail).
    """

    code = Code.UNAVAILABLE

    def __init__(
        self, message: str, *, field: str = "", retry_seconds: float | None = None, lost: bool = False
    ) -> None:
        super().__init__(message, field=field, retry_seconds=retry_seconds)
        self.lost = lost


class UnreachableError(UnavailableError):
    """Nothing answers at the daemon's address; raised by the client alone."""


class DeadlineError(EdgedError):
    """The caller's deadline passed."""

    code = Code.DEADLINE_EXCEEDED


class CancelledError(EdgedError):
    """The caller went away."""

    code = Code.CANCELLED


class UnsupportedError(EdgedError):
    """A valid request for something that edged does not have."""

    code = Code.UNIMPLEMENTED


class InternalError(EdgedError):
    """A fault of edged's own."""

    code = Code.INTERNAL


class ConfigError(InvalidArgumentError):
    """The configuration file is refused; ``field`` is the key's path (``models[0].context_length``)."""


class CheckpointError(FailedPreconditionError):
    """A model file or folder is refused; nothing of it stays loaded or half-written."""


class ListenError(FailedPreconditionError):
    """The daemon cannot listen where the configuration says."""


class LedgerError(ResourceExhaustedError):
    """The configuration does not fit its memory budget; the message says what would."""


_BY_CODE: dict[Code, type[EdgedError]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        NotFoundError,
        ResourceExhaustedError,
        FailedPreconditionError,
        UnauthenticatedError,
        PermissionDeniedError,
        UnavailableError,
        DeadlineError,
        CancelledError,
        UnsupportedError,
        InternalError,
    )
}


def from_code(code: int, message: str, *, field: str = "", retry_seconds: float | None = None) -> EdgedError:
    """Rebuild the error that crossed the channel as ``code`` and ``message``."""
    return _BY_CODE[Code(code)](message, field=field, retry_seconds=retry_seconds)
