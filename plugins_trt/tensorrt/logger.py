"""The one logger that a process gives TensorRT: into Python's logging, with what it said last kept."""

from __future__ import annotations

import collections
import logging
import re
from typing import Any

from plugins_trt.tensorrt.pin import pin

KEPT = 32
"""Messages kept."""

_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")

_log = logging.getLogger("plugins_trt.tensorrt")
# A program without logging of its own hears the reasons from the errors that carry them.
_log.addHandler(logging.NullHandler())


class Record:
    """What TensorRT and the plugins said since the last `clear`.

    TensorRT answers a failed parse, build or load with an empty result; why, it says to its logger alone. So it does
    with the memory of a plan that no GPU is there to load.
    """

    def __init__(self) -> None:
        self._errors: collections.deque[str] = collections.deque(maxlen=KEPT)
        self._faults: collections.deque[str] = collections.deque(maxlen=KEPT)
        self.activation_bytes: list[int] = []
        """Device memory that a context of each profile needs for activations and scratch, in the order logged."""

    def add_error(self, message: str) -> None:
        """Keep an error of TensorRT's."""
        self._errors.append(" ".join(message.split()))

    def add_fault(self, message: str) -> None:
        """Keep what a plugin raised: it says more than TensorRT's lines about it."""
        self._faults.append(message)

    def add_line(self, message: str) -> None:
        """Take figures from any other line."""
        match = _ACTIVATION.search(message)
        if match:
            self.activation_bytes.append(int(match[1]))

    def clear(self) -> None:
        """Forget all; called before the work that the next lines will be about."""
        self._errors.clear()
        self._faults.clear()
        self.activation_bytes.clear()

    def reason(self) -> str:
        """What plugins raised, else what TensorRT logged, in one line."""
        return "; ".join(dict.fromkeys(self._faults or self._errors)) or "TensorRT gave no reason"


record = Record()
"""The process's: TensorRT has one logger a process."""


def make_logger(module: Any) -> Any:  # noqa: ANN401 - the bindings have no types
    """A logger for the bindings ``module``.

    The process makes one alone: TensorRT keeps the first for its global parts and warns about any other.
    """
    severity = module.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.CRITICAL,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.DEBUG,
        severity.VERBOSE: logging.DEBUG,
    }

    class Logger(module.ILogger):  # type: ignore[misc]
        """Called from any thread of TensorRT."""

        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:  # noqa: ANN401
            """One line."""
            level = levels.get(severity, logging.ERROR)
            if level >= logging.ERROR:
                record.add_error(message)
            else:
                record.add_line(message)
            _log.log(level, "%s", message)

    logger = Logger()
    pin(logger)
    return logger
