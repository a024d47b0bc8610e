"""When a dead engine is started again, and when that is given up."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each attempt in a row; the first is made at once."""
STABLE_SECONDS = 30.0
"""An engine that served this long is no part of a crash loop."""
WINDOW_SECONDS = 3600.0
WINDOW_RESTARTS = 12
"""More restarts than this within the window are a crash loop too, however long each engine served."""


class RestartPolicy:
    """Counts the deaths of engines: in a row, and in the last hour.

    A crash loop ends after ``len(DELAYS)`` attempts: an engine that dies a sixth time without ever having served for
    half a minute will not get better by itself, and an operator must see it. So must one that serves for a minute and
    dies, again and again.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.attempts = 0
        """Restarts since an engine last served for ``STABLE_SECONDS``."""
        self._clock = clock
        self._restarts: deque[float] = deque(maxlen=WINDOW_RESTARTS)

    def next_delay(self, served_seconds: float) -> float | None:
        """Seconds until the next attempt, or None when there is none; :meth:`describe` then says why.

        Args:
            served_seconds: How long the engine that died had served.
        """
        if served_seconds >= STABLE_SECONDS:
            self.attempts = 0
        if self.attempts >= len(DELAYS) or self._is_often():
            return None
        self.attempts += 1
        self._restarts.append(self._clock())
        return DELAYS[self.attempts - 1]

    def describe(self) -> str:
        """The crash loop, in words."""
        if self._is_often():
            return f"the engine ended {WINDOW_RESTARTS + 1} times within {WINDOW_SECONDS / 60:.0f} minutes"
        return f"the engine ended {self.attempts + 1} times in a row"

    def _is_often(self) -> bool:
        full = len(self._restarts) == WINDOW_RESTARTS
        return full and self._clock() - self._restarts[0] < WINDOW_SECONDS
