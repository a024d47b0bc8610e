"""The one logger that a process gives TensorRT: into Python's logging, with the last complaints kept for messages."""

from __future__ import annotations

import collections
import logging
from typing import Any

KEPT = 32
"""Complaints kept."""

_log = logging.getLogger("plugins_trt.tensorrt")


class Complaints:
    """The last errors that TensorRT logged and that plugins raised, oldest first.

    TensorRT answers a failed parse, build or load with an empty result; why, it says to its logger alone.
    """

    def __init__(self) -> None:
        self._kept: collections.deque[str] = collections.deque(maxlen=KEPT)
        self.plugin_faults: list[str] = []

    def add(self, message: str) -> None:
        """Keep one."""
        self._kept.append(message.strip())

    def add_plugin_fault(self, message: str) -> None:
        """Keep what a plugin raised: it says more than TensorRT's lines about it."""
        if len(self.plugin_faults) < KEPT:
            self.plugin_faults.append(message)

    def clear(self) -> None:
        """Forget all; called before the work that the next ones will be about."""
        self._kept.clear()
        self.plugin_faults.clear()

    def summary(self) -> str:
        """What plugins raised, else what TensorRT logged, in one line."""
        lines = self.plugin_faults or list(self._kept)
        return "; ".join(dict.fromkeys(lines)) or "TensorRT gave no reason"


complaints = Complaints()


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
                complaints.add(message)
            _log.log(level, "%s", message)

    return Logger()
