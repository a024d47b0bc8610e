"""The engine's loop: receive, schedule, step, send. It alone calls the executors.

Between two steps lies what a client sees beside the step itself, so a turn sends its tokens first and keeps its books
afterwards, and nothing here blocks while a request runs. Without work the loop sleeps in the kernel until a message
comes, and wakes each second to say that it is alive (:mod:`edged.worker.watchdog`).
"""

from __future__ import annotations

import enum
import itertools
import time
from typing import TYPE_CHECKING

from edged.errors import Code
from edged.log import get_logger
from edged.worker.messages import (
    Answered,
    Cancel,
    Configure,
    Drain,
    DropSession,
    Failed,
    Heartbeat,
    ListSessions,
    Report,
    Shutdown,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.worker.channel import EngineChannel
    from edged.worker.runner import ModelRunner

_log = get_logger("engine")

REPORT_SECONDS = 0.25
"""Least time between two reports while steps run."""
HEARTBEAT_SECONDS = 1.0
"""The idle loop says this often that it is alive."""
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
        for runner in itertools.cycle(self._runners):
            working = any(runner.has_work for runner in self._runners)
            if not working:
                if self._draining:
                    return End.DRAINED
                self._become_idle()
            if not self._receive(wait=not working):
                return End.SHUTDOWN
            if runner.has_work:
                self._turn(runner)
        raise AssertionError("an engine has at least one model")

    def _receive(self, *, wait: bool) -> bool:
        """Act on the messages that have arrived; False if the engine is to end."""
        messages = self._channel.receive(HEARTBEAT_SECONDS if wait else 0.0)
        if not messages:
            if wait:
                self._channel.send(Heartbeat())
                self._channel.flush()
            return True
        self._report_due = True
        for message in messages:
            if isinstance(message, Shutdown):
                for runner in self._runners:
                    runner.refuse_all("the daemon stops", _RETRY_SECONDS)
                return False
            self._handle(message)
        self._channel.flush()
        return True

    def _turn(self, runner: ModelRunner) -> None:
        """One step of one model; its tokens are on their way when this returns."""
        self._report_due = True
        try:
            ended = runner.turn()
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
        # Whoever learns that a request ended finds its pages free in the status.
        if ended or time.monotonic() - self._reported >= REPORT_SECONDS:
            self._queue_report()
        self._channel.flush()

    def _handle(self, message: ToEngine) -> None:
        """Act on one message."""
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
            if any(runner.cancel(message) for runner in self._runners):
                self._queue_report()
        elif isinstance(message, ListSessions):
            runner = self._by_name.get(message.model)
            sessions = () if runner is None else runner.sessions()
            self._channel.send(Answered(message.query, sessions))
        elif isinstance(message, DropSession):
            runner = self._by_name.get(message.model)
            found = runner is not None and runner.drop_session(message.tenant, message.name)
            self._channel.send(Answered(message.query, found=found))
            self._queue_report()
        elif isinstance(message, Drain):
            self._draining = True
        elif isinstance(message, Configure):
            _log.warning("a second configuration came and is not looked at")

    def _become_idle(self) -> None:
        """Check the books and report, once, before the loop sleeps."""
        if self._report_due:
            for runner in self._runners:
                runner.check()
            self._queue_report()
            self._channel.flush()
            self._report_due = False

    def _queue_report(self) -> None:
        self._reported = time.monotonic()
        self._channel.send(
            Report(tuple(runner.report() for runner in self._runners), self._reported - self._started)
        )
