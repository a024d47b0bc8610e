"""The engine's loop: receive, schedule, step, send. It alone calls the executors.

Between two steps lies what a client sees beside the step itself, so a turn sends its tokens first and keeps its books
afterwards, and nothing here blocks while a request runs. Without work the loop sleeps in the kernel until a message
comes.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

from edged.errors import Code
from edged.log import get_logger
from edged.worker.messages import Cancel, Configure, Drain, Failed, Report, Shutdown, Submit, ToEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.worker.channel import EngineChannel
    from edged.worker.runner import ModelRunner

_log = get_logger("engine")

REPORT_SECONDS = 0.25
"""Least time between two reports while steps run."""
_RETRY_SECONDS = 2.0
"""When a request that never ran may come again; the daemon knows better once it has seen an engine load."""


class End(enum.Enum):
    """Why the loop returned."""

    DRAINED = "drained"
    SHUTDOWN = "shutdown"


class EngineLoop:
    """Serves the requests of every model of the engine, one step of each in turn.

    Args:
        channel: To the daemon.
        runners: The loaded models.
    """

    def __init__(self, channel: EngineChannel, runners: Sequence[ModelRunner]) -> None:
        self._channel = channel
        self._runners = tuple(runners)
        self._by_name = {runner.config.name: runner for runner in runners}
        self._started = time.monotonic()
        self._reported = 0.0
        self._report_due = True
        self._draining = False

    def run(self) -> End:
        """Serve until the daemon says otherwise.

        Raises:
            ChannelClosedError: The daemon is gone.
            Exception: A step failed. Every request has been told.
        """
        while True:
            working = any(runner.has_work for runner in self._runners)
            if not working:
                if self._draining:
                    return End.DRAINED
                self._become_idle()
            for message in self._channel.receive(0.0 if working else None):
                if isinstance(message, Shutdown):
                    for runner in self._runners:
                        runner.refuse_all("the daemon stops", _RETRY_SECONDS)
                    return End.SHUTDOWN
                self._handle(message)
            for runner in self._runners:
                if runner.has_work:
                    self._turn(runner)
            self._channel.flush()
            if time.monotonic() - self._reported >= REPORT_SECONDS:
                self._send_report()

    def _turn(self, runner: ModelRunner) -> None:
        self._report_due = True
        try:
            runner.turn()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            runner.fail_all(
                running=f"a step of model {runner.config.name} failed ({what}); the engine starts again",
                waiting=f"the engine of model {runner.config.name} ended before the request ran; try again",
                retry_seconds=_RETRY_SECONDS,
            )
            for other in self._runners:
                other.refuse_all(
                    "the engine ended because another model's step failed; try again", _RETRY_SECONDS
                )
            raise

    def _handle(self, message: ToEngine) -> None:
        """Act on one message."""
        self._report_due = True
        if isinstance(message, Submit):
            runner = self._by_name.get(message.model)
            if runner is None:
                self._channel.send(
                    Failed(
                        message.request_id,
                        Code.NOT_FOUND.value,
                        f"no model is called {message.model}: there are {', '.join(self._by_name)}",
                    )
                )
            else:
                runner.submit(message)
        elif isinstance(message, Cancel):
            # A request that has ended already is none of the runners': its Finished is on the way.
            any(runner.cancel(message) for runner in self._runners)
        elif isinstance(message, Drain):
            self._draining = True
        elif isinstance(message, Configure):
            _log.warning("a second configuration came and is not looked at")

    def _become_idle(self) -> None:
        """Check the books and report, once, before the loop sleeps."""
        if self._report_due:
            for runner in self._runners:
                runner.check()
            self._send_report()
            self._report_due = False

    def _send_report(self) -> None:
        self._reported = time.monotonic()
        self._channel.send(
            Report(tuple(runner.report() for runner in self._runners), self._reported - self._started)
        )
        self._channel.flush()
