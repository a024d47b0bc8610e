"""What edgectl's exit status says; the same for every command."""

from __future__ import annotations

import enum

from edged.errors import (
    CheckpointError,
    Code,
    ConfigError,
    EdgedError,
    InternalError,
    LedgerError,
    MessageTooLargeError,
    UnreachableError,
)


class ExitCode(enum.IntEnum):
    """Exit status of edgectl."""

    DONE = 0
    """Done; of ``status``: serving."""
    NO = 1
    """The answer is no: not serving, does not fit, a check failed."""
    UNREACHABLE = 2
    """Nobody answers at the address."""
    REFUSED = 3
    """The daemon refused the request; the same request will be refused again."""
    FAILED = 4
    """The daemon could not answer: it loads, is full, drains, ran out of time or broke. Later it may work."""
    FILE = 5
    """A file on this machine was refused: configuration, model folder, GGUF file."""
    USAGE = 64
    """The command line is wrong."""
    INTERNAL = 70
    """A fault of edgectl itself."""
    INTERRUPTED = 130
    """Ctrl-C."""
    PIPE_CLOSED = 141
    """Who read the output went away."""


EPILOG = (
    "Exit status: 0 done; 1 the answer is no (not serving, does not fit, a check failed); 2 unreachable; "
    "3 the daemon refused the request; 4 the daemon could not answer now; 5 a local file was refused; "
    "64 wrong command line; 130 Ctrl-C."
)

_REFUSALS = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.FAILED_PRECONDITION,
        Code.UNIMPLEMENTED,
        Code.PERMISSION_DENIED,
        Code.UNAUTHENTICATED,
    }
)


def exit_code_of(error: EdgedError) -> ExitCode:
    """The exit status that an error becomes."""
    if isinstance(error, UnreachableError):
        return ExitCode.UNREACHABLE
    if isinstance(error, (ConfigError, CheckpointError)):
        return ExitCode.FILE
    if isinstance(error, LedgerError):
        return ExitCode.NO
    if isinstance(error, InternalError):
        return ExitCode.FAILED
    if isinstance(error, MessageTooLargeError):
        return ExitCode.REFUSED
    return ExitCode.REFUSED if error.code in _REFUSALS else ExitCode.FAILED
