"""Notices an engine that lives and does nothing: a GPU that never answers, a deadlock, a stopped process.

Signs of life come from the engine's step loop over the channel and from nowhere else: tokens, a report with a higher
count of steps, progress of loading, and a heartbeat each time the idle loop wakes. A timer thread in the engine would
go on beating while the loop hangs, so there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.worker.messages import Heartbeat, Loading, Report

if TYPE_CHECKING:
    from edged.config import WatchdogConfig
    from edged.worker.messages import ToDaemon

IDLE_SECONDS = 20.0
"""An idle engine beats each second; one that is silent for this long is ended."""
CHECK_SECONDS = 0.5
"""Time between two looks."""


class Watchdog:
    """Counts the silence of one engine.

    Silence is counted in looks, not read off a clock: when the whole machine or both processes stood still, the daemon
    did not look either, and the engine gets its time anew.

    Args:
        config: How long an engine may be silent.
    """

    def __init__(self, config: WatchdogConfig, step_timeout: float) -> None:
        self._load_timeout = config.load_timeout
        self._step_timeout = step_timeout
        self._idle_timeout = min(IDLE_SECONDS, step_timeout)
        self._silence = 0.0
        self._steps = -1
        self._loading: Loading | None = None
        self._serving = False

    def note(self, message: ToDaemon, *, busy: bool) -> bool:
        """Take a message; return whether it is a sign of life.

        Args:
            message: From the engine.
            busy: Requests are open. A report then counts only if steps were made since the last one.
        """
        if isinstance(message, Loading):
            alive = message != self._loading
            self._loading = message
        elif isinstance(message, Report):
            steps = sum(model.steps for model in message.models)
            alive = steps != self._steps or not busy
            self._steps = steps
        else:
            alive = not (isinstance(message, Heartbeat) and busy)
        if alive:
            self._silence = 0.0
        return alive

    def serve(self) -> None:
        """Loading is over."""
        self._serving = True
        self._silence = 0.0

    def look(self, seconds: float, *, busy: bool) -> str:
        """Add the time since the last look; return why the engine is to be ended, or nothing.

        Args:
            seconds: Time since the last look.
            busy: Requests are open.
        """
        self._silence += min(seconds, 2 * CHECK_SECONDS)
        if not self._serving:
            if self._silence <= self._load_timeout:
                return ""
            what = f"{self._loading.model}: {self._loading.what}" if self._loading else "its start"
            return f"loading made no progress for {self._silence:.0f} s (watchdog.load_timeout), last seen: {what}"
        limit = self._step_timeout if busy else self._idle_timeout
        if self._silence <= limit:
            return ""
        if busy:
            return f"no step was finished for {self._silence:.0f} s (watchdog.step_timeout)"
        return f"the idle engine gave no sign of life for {self._silence:.0f} s"
