"""The engine's loop: receive, schedule, step, send. It alone calls the executors.

Between two steps lies what a client sees beside the step itself, so a turn sends its tokens first and keeps its books
afterwards, and nothing here blocks while a request runs. Without work the loop sleeps in the kernel until a message
comes, and wakes each second to say that it is alive (:mod:`edged.worker.watchdog`).
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

from edged.errors import Code, EdgedError
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
    LoadModel,
    Report,
    Shutdown,
    Submit,
    ToEngine,
    UnloadModel,
)
from edged.worker.model_loader import settle
from edged.worker.request_terms import split_answers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edged.worker.channel import EngineChannel
    from edged.worker.model_loader import ModelLoader
    from edged.worker.runner import ModelRunner

_log = get_logger("engine")

REPORT_SECONDS = 0.25
"""Least time between two reports while steps run."""
LOADING_SECONDS = 0.05
"""The idle loop looks this often for what a loading model says."""
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
        loader: Loads others beside them.
        check_steps: Hold the pages against their invariants after each step too, not only before the loop sleeps.
    """

    def __init__(
        self,
        channel: EngineChannel,
        runners: Iterable[ModelRunner],
        loader: ModelLoader,
        *,
        check_steps: bool = False,
    ) -> None:
        self._channel = channel
        self._check_steps = check_steps
        self._by_name = {runner.config.name: runner for runner in runners}
        self._loader = loader
        self._started = time.monotonic()
        self._reported = self._beaten = 0.0
        self._report_due = True
        self._draining = False

    def run(self) -> End:
        """Serve until the daemon says otherwise.

        Raises:
            ChannelClosedError: The daemon is gone.
            Exception: A step failed. Every request has been told.
        """
        while True:
            for runner in tuple(self._by_name.values()) or (None,):
                working = any(each.has_work for each in self._by_name.values())
                if not working:
                    if self._draining:
                        return End.DRAINED
                    self._become_idle()
                if not self._receive(wait=not working):
                    return End.SHUTDOWN
                if self._loader.is_loading:
                    self._take_loaded()
                if runner is not None and runner.has_work:
                    self._turn(runner)

    def _receive(self, *, wait: bool) -> bool:
        """Act on the messages that have arrived; False if the engine is to end."""
        patience = LOADING_SECONDS if self._loader.is_loading else HEARTBEAT_SECONDS
        messages = self._channel.receive(patience if wait else 0.0)
        if not messages:
            if wait:
                self._beat()
            return True
        self._report_due = True
        for message in messages:
            if isinstance(message, Shutdown):
                for runner in self._by_name.values():
                    runner.refuse_all(
                        "the daemon stops and has cut the request off; send it again once the daemon runs",
                        _RETRY_SECONDS,
                    )
                return False
            self._handle(message)
        self._channel.flush()
        return True

    def _beat(self) -> None:
        """Say that the idle loop is alive; while a model loads it wakes more often than that is news."""
        now = time.monotonic()
        if not self._loader.is_loading or now - self._beaten >= HEARTBEAT_SECONDS:
            self._beaten = now
            self._channel.send(Heartbeat())
            self._channel.flush()

    def _turn(self, runner: ModelRunner) -> None:
        """One step of one model; its tokens are on their way when this returns."""
        self._report_due = True
        try:
            ended = runner.turn()
            if self._check_steps:
                runner.check()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            runner.fail_all(
                running=f"a step of model {runner.config.name} failed ({what}); the engine starts again",
                waiting=f"the engine of model {runner.config.name} ended before the request ran; try again",
                retry_seconds=_RETRY_SECONDS,
            )
            for other in self._by_name.values():
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
            self._submit(message)
        elif isinstance(message, Cancel):
            # A request that has ended already is none of the runners': its Finished is on the way.
            if any(runner.cancel(message) for runner in self._by_name.values()):
                self._queue_report()
        elif isinstance(message, LoadModel):
            self._loader.begin(message.query, message.model)
        elif isinstance(message, UnloadModel):
            self._unload(message)
        elif isinstance(message, ListSessions | DropSession):
            self._answer_sessions(message)
        elif isinstance(message, Drain):
            self._draining = True
        elif isinstance(message, Configure):
            _log.warning("a second configuration came and is not looked at")

    def _submit(self, message: Submit) -> None:
        runner = self._by_name.get(message.model)
        if runner is not None:
            runner.submit(message)
            return
        why = f"model {message.model} is not loaded; edgectl load {message.model} loads it"
        for each in split_answers(message):
            self._channel.send(Failed(each.request_id, Code.FAILED_PRECONDITION.value, why))

    def _answer_sessions(self, message: ListSessions | DropSession) -> None:
        runner = self._by_name.get(message.model)
        if isinstance(message, ListSessions):
            self._channel.send(Answered(message.query, () if runner is None else runner.sessions()))
            return
        found = runner is not None and runner.drop_session(message.tenant, message.name)
        self._channel.send(Answered(message.query, found=found))
        self._queue_report()

    def _take_loaded(self) -> None:
        """Serve a model that has been loaded, or say why it has not."""
        for query, name, made in self._loader.take():
            if isinstance(made, EdgedError):
                self._channel.send(Answered(query, found=False, code=made.code.value, message=made.message))
            else:
                self._by_name[name] = made
                self._queue_report()
                self._channel.send(Answered(query))
        self._channel.flush()

    def _unload(self, message: UnloadModel) -> None:
        """Give a model's memory back."""
        runner = self._by_name.pop(message.model, None)
        if runner is not None:
            why = (
                f"model {message.model} was unloaded before the request had ended; edgectl load {message.model} loads it "
                "again, then send the request again"
            )
            runner.refuse_all(why, None, Code.FAILED_PRECONDITION)
            runner.executor.close()
            del runner
            settle()
            self._queue_report()
        self._channel.send(Answered(message.query))

    def _become_idle(self) -> None:
        """Check the books and report, once, before the loop sleeps."""
        if self._report_due:
            for runner in self._by_name.values():
                runner.check()
            self._queue_report()
            self._channel.flush()
            self._report_due = False

    def _queue_report(self) -> None:
        self._reported = time.monotonic()
        self._channel.send(
            Report(
                tuple(runner.report() for runner in self._by_name.values()), self._reported - self._started
            )
        )
