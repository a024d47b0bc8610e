"""Notices an engine that lives and does nothing: a GPU that never answers, a deadlock, a stopped process.

Signs of life come from the engine's step loop over the channel and from nowhere else: tokens, a report with a higher
count of steps, progress of loading, and a heartbeat each time the idle loop wakes. A timer thread in the engine would
go on beating while the loop hangs, so there is none.

How long an engine may be silent depends on what it does: a long chunk of a prompt on a slow CPU takes minutes. An engine that
evidently does nothing (:mod:`edged.worker.stillness`) has seconds. One that is seen at work within its time counts as alive
for systemd, whose watchdog can so be short: it is there for a daemon that stands still itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.worker.messages import Heartbeat, Loading, Report
from edged.worker.stillness import Stillness

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.config import WatchdogConfig
    from edged.worker.messages import ToDaemon

IDLE_SECONDS = 20.0
"""An idle engine beats each second; one that is silent for this long is ended."""
LEAST_SECONDS = 2.5
"""No idle engine is ended sooner: between two beats lie a second and what the machine adds."""
CHECK_SECONDS = 0.5
"""Time between two looks."""


class Watchdog:
    """Counts the silence of one engine.

    Silence is counted in looks, not read off a clock: when the whole machine or both processes stood still, the daemon
    did not look either, and the engine gets its time anew.

    Args:
        config: How long an engine may be silent.
        step_timeout: How long a step may take, in seconds.
        works_asleep: Whether a step may run elsewhere (on a GPU) while every thread of the engine sleeps.
    """

    def __init__(self, config: WatchdogConfig, step_timeout: float, *, works_asleep: bool = False) -> None:
        self._load_timeout = config.load_timeout
        self._step_timeout = step_timeout
        self._idle_timeout = max(LEAST_SECONDS, min(IDLE_SECONDS, step_timeout))
        self._stall_timeout = max(LEAST_SECONDS, min(config.stall_timeout, step_timeout))
        self._works_asleep = works_asleep
        self._silence = 0.0
        self._load_silence = 0.0
        self._still = 0.0
        self._works = False
        self._steps = -1
        self._loading: Loading | None = None
        self._serving = False
        self._changes: list[bool] = []

    def note(self, message: ToDaemon, *, busy: bool) -> bool:
        """Take a message; return whether it is a sign of life.

        Args:
            message: From the engine.
            busy: Requests are open. A report then counts only if steps were made since the last one.
        """
        if isinstance(message, Loading):
            alive = message != self._loading
            self._loading = message
            if alive:
                self._load_silence = 0.0
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
        self._silence = self._load_silence = 0.0

    def begin_change(self, *, in_loop: bool) -> None:
        """The engine loads or unloads a model beside those that serve.

        Args:
            in_loop: Its loop makes no step meanwhile.
        """
        self._changes.append(in_loop)
        self._silence = self._load_silence = 0.0

    def end_change(self, *, in_loop: bool) -> None:
        """That is done."""
        self._changes.remove(in_loop)
        self._silence = 0.0

    @property
    def patience(self) -> float:
        """Seconds within which there is a sign of life, or the next look says otherwise."""
        if not self._serving or any(self._changes):
            return self._load_timeout
        # An idle engine beats each second, most steps are shorter, and looks see a long one at work. When there was nothing of
        # this for a while, a look finds that, and it has the longer time.
        lively = self._silence <= self._stall_timeout / 2 or self._works
        return self._stall_timeout / 2 if lively and not self._changes else self._step_timeout

    @property
    def works(self) -> bool:
        """Whether the last look has found an engine that serves, is silent and may still be, at work."""
        return self._works

    def look(
        self, seconds: float, *, busy: bool, stillness: Callable[[], Stillness | None] = lambda: None
    ) -> str:
        """Add the time since the last look; return why the engine is to be ended, or nothing.

        Args:
            seconds: Time since the last look.
            busy: Requests are open.
            stillness: Says how the engine has stood still since it was last asked; it is asked about a silent one only.
        """
        seconds = min(seconds, 2 * CHECK_SECONDS)
        self._silence += seconds
        if not self._serving or self._changes:
            self._load_silence += seconds
        if self._load_silence > self._load_timeout and (not self._serving or self._changes):
            what = f"{self._loading.model}: {self._loading.what}" if self._loading else "its start"
            return f"loading made no progress for {self._load_silence:.0f} s (watchdog.load_timeout), last seen: {what}"
        what = f"the {'idle' if self._serving else 'loading'} engine gave no sign of life"
        if busy:
            what = "no step was finished"
        how = self._look_closer(seconds, stillness, busy=busy)
        if how is not None:
            return f"{what} for {self._silence:.0f} s and {how.value} (watchdog.stall_timeout)"
        if not self._serving or any(self._changes):
            return ""
        if self._silence <= (self._step_timeout if busy or self._changes else self._idle_timeout):
            return ""
        self._works = False  # work that leads to nothing is no sign of life
        return f"{what} for {self._silence:.0f} s{' (watchdog.step_timeout)' if busy else ''}"

    def _look_closer(
        self, seconds: float, stillness: Callable[[], Stillness | None], *, busy: bool
    ) -> Stillness | None:
        """How a silent engine stands still, once it has for long enough."""
        if self._silence <= self._stall_timeout / 2:
            self._still, self._works = 0.0, False
            return None
        how = stillness()
        self._works = how is Stillness.NONE and self._serving and not any(self._changes)
        # While it loads, it may wait for a compiler.
        idle_or_cpu = self._serving and not any(self._changes) and not (busy and self._works_asleep)
        if how in (None, Stillness.NONE) or (how is Stillness.ASLEEP and not idle_or_cpu):
            self._still = 0.0
            return None
        self._still += seconds
        long_enough = self._silence > self._stall_timeout and self._still >= self._stall_timeout / 2
        return how if long_enough else None
