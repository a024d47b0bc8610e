"""Logging of both processes: JSON lines for machines, coloured text for a terminal, one request id through all of it.

``configure`` is called once at the start of a process. Prompts and answers never enter the log: code logs counts, and
fields that could carry them by mistake are replaced by their length. Tracebacks are printed without local variables
for the same reason.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

import structlog

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PRIVATE_FIELDS = frozenset(
    {"answer", "chat", "content", "messages", "prompt", "rendered", "stops", "strings", "text", "token_ids"}
)
_FIRST_KEYS = ("timestamp", "level", "process", "component", "message", "request_id")
# What journald takes from the start of a line (sd-daemon(3)).
_PRIORITIES = {"debug": "<7>", "info": "<6>", "warning": "<4>", "error": "<3>", "critical": "<2>"}


def configure(
    level: str = "info", style: str = "auto", *, process: str = "", stream: TextIO | None = None
) -> None:
    """Set up structlog and the standard library's logging (which grpc and asyncio use) for this process.

    Args:
        level: Least important level: ``debug``, ``info``, ``warning`` or ``error``.
        style: ``json``, ``text``, or ``auto``: text on a terminal, JSON elsewhere (also under systemd).
        process: ``daemon`` or ``engine``; stands in every line.
        stream: Where lines go; standard error by default.
    """
    target = sys.stderr if stream is None else stream
    as_text = style == "text" or (style == "auto" and target.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if as_text else "iso", utc=not as_text),
        _hide_private_fields,
    ]
    if process:
        shared.insert(1, _add_process(process))
    final = _text_processors(target) if as_text else _json_processors(journal=_is_journal(target))

    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=_SteadfastLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _add_library],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries talk at debug and info about every connection; only their warnings say something to an operator.
    root.setLevel(max(LEVELS[level], logging.WARNING))


def get_logger(name: str) -> FilteringBoundLogger:
    """Logger whose lines carry ``component=name``; it follows a later :func:`configure`."""
    logger: FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


def request_scope(request_id: str) -> AbstractContextManager[None]:
    """Context in which every line of this task or thread carries ``request_id``."""
    return structlog.contextvars.bound_contextvars(request_id=request_id)


class _SteadfastLogger(structlog.WriteLogger):
    """Writes lines. A full disk or a reader that is gone loses the line and not the request that it told of."""

    def msg(self, message: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


class _SteadfastLoggerFactory:
    """Makes the loggers of one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, *_: object) -> _SteadfastLogger:
        return _SteadfastLogger(self._stream)


def _add_process(process: str) -> Processor:
    """Processor that says which of the two processes speaks."""

    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    return add


def _add_library(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Name the library that spoke through the standard library's logging."""
    event["component"] = event["_record"].name
    return event


def _hide_private_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace what may hold a user's words by its length."""
    for key in _PRIVATE_FIELDS.intersection(event):
        value = event[key]
        event[key] = f"<{len(value)} hidden>" if hasattr(value, "__len__") else "<hidden>"
    return event


def _put_first_things_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Order a line for the eye."""
    return {**{key: event[key] for key in _FIRST_KEYS if key in event}, **event}


def _json_processors(*, journal: bool) -> list[Processor]:
    """Last processors for JSON lines; ``journal`` puts journald's priority before each line."""
    processors: list[Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("message"),
        _put_first_things_first,
    ]
    render = structlog.processors.JSONRenderer(sort_keys=False, ensure_ascii=False)
    if not journal:
        return [*processors, render]

    def render_for_journal(logger: WrappedLogger, method: str, event: EventDict) -> str:
        return f"{_PRIORITIES.get(str(event.get('level')), '<6>')}{render(logger, method, event)!s}"

    return [*processors, render_for_journal]


def _text_processors(target: TextIO) -> list[Processor]:
    """Last processors for a person; the traceback has no local variables."""
    return [
        structlog.dev.ConsoleRenderer(
            colors=target.isatty() and "NO_COLOR" not in os.environ,
            exception_formatter=structlog.dev.plain_traceback,
            pad_event_to=30,
        )
    ]


def _is_journal(target: Any) -> bool:  # noqa: ANN401 - any text stream, also one without a descriptor
    """Whether ``target`` is connected to journald (systemd names its socket in JOURNAL_STREAM)."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(target.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"
