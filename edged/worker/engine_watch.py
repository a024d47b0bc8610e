"""One engine's life as the daemon watches it: does it still do something, and why did it end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from edged.log import get_logger
from edged.worker.killed import describe_kill
from edged.worker.messages import EngineFailed
from edged.worker.stillness import Stillness, StillnessWatch
from edged.worker.watchdog import CHECK_SECONDS, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from edged.config import Config
    from edged.worker.messages import Loading, ToDaemon
    from edged.worker.process import EngineProcess

_log = get_logger("supervisor")


class EngineWatch:
    """What is noticed of one engine.

    Args:
        config: How long it may be silent.
        is_busy: Says whether requests are open.
    """

    def __init__(self, config: Config, is_busy: Callable[[], bool]) -> None:
        self.begun = time.monotonic()
        """When it was started."""
        self.ready_at: float | None = None
        """When it had loaded everything."""
        self.hung = ""
        """Why it is taken to hang; empty while it is not."""
        self.error: EngineFailed | None = None
        """What it said of its own end."""
        self._is_busy = is_busy
        self._watchdog = Watchdog(
            config.watchdog,
            config.step_timeout,
            works_asleep=any(model.device != "cpu" for model in config.models),
        )
        self._stillness: StillnessWatch | None = None

    @property
    def is_fatal(self) -> bool:
        """Whether the engine has said that a new one would end the same way."""
        return self.error is not None and self.error.fatal

    @property
    def served_seconds(self) -> float:
        """How long it has served."""
        return 0.0 if self.ready_at is None else time.monotonic() - self.ready_at

    def note(self, message: ToDaemon) -> bool:
        """Take a message; return whether it is a sign of life."""
        if isinstance(message, EngineFailed):
            self.error = message
        alive = self._watchdog.note(message, busy=self._is_busy())
        if alive and self._stillness is not None:
            self._stillness.forget()
        return alive

    @property
    def patience(self) -> float:
        """Seconds within which it gives a sign of life, or is found to give none."""
        return self._watchdog.patience

    @property
    def works(self) -> bool:
        """Whether the last look has found it at work, in a step that has lasted a while and may."""
        return self._watchdog.works

    @contextlib.contextmanager
    def changing(self, *, in_loop: bool) -> Iterator[None]:
        """It is asked to load or unload a model beside those that serve, and has more time until that is done.

        Args:
            in_loop: It makes no step meanwhile.
        """
        self._watchdog.begin_change(in_loop=in_loop)
        try:
            yield
        finally:
            self._watchdog.end_change(in_loop=in_loop)

    def serve(self) -> float:
        """It has loaded everything; return the seconds that took."""
        self.ready_at = time.monotonic()
        self._watchdog.serve()
        return self.ready_at - self.begun

    async def end_if_it_hangs(
        self, engine: EngineProcess, on_hung: Callable[[], None], on_look: Callable[[], None]
    ) -> None:
        """Look at it until it is gone; end it when it makes no progress.

        Args:
            engine: It.
            on_hung: Called before it is ended.
            on_look: Called after each look.
        """
        stillness = self._stillness = StillnessWatch(engine.pid)
        last = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            why = self._watchdog.look(now - last, busy=self._is_busy(), stillness=stillness.look)
            last = now
            on_look()
            if why and not self.hung:
                self.hung = why
                _log.error("the engine hangs and is ended", why=why, engine_pid=engine.pid)
                stopped = stillness.look() is Stillness.STOPPED
                on_hung()
                await (engine.end() if stopped else engine.abort())

    def reason(self, how: str, loading: Mapping[str, Loading]) -> str:
        """Why it ended.

        Args:
            how: Its exit status or signal.
            loading: What was being loaded then.
        """
        if self.hung:
            return f"{self.hung}; the watchdog ended it ({how})"
        if self.error is not None:
            return f"{self.error.message} ({how})"
        if how == "signal SIGKILL" and loading:
            return f"{how} while it loaded: {describe_kill(dict(loading))}"
        return how
