"""When a dead engine is started again, and when that is given up."""

from __future__ import annotations

DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each attempt in a row; the first is made at once."""
STABLE_SECONDS = 30.0
"""An engine that served this long is no part of a crash loop."""


class RestartPolicy:
    """Counts the deaths of engines in a row.

    A crash loop ends after ``len(DELAYS)`` attempts: an engine that dies a sixth time without ever having served for
    half a minute will not get better by itself, and an operator must see it.
    """

    def __init__(self) -> None:
        self.attempts = 0
        """Restarts since an engine last served for ``STABLE_SECONDS``."""

    def next_delay(self, served_seconds: float) -> float | None:
        """Seconds until the next attempt, or None when there is none.

        Args:
            served_seconds: How long the engine that died had served.
        """
        if served_seconds >= STABLE_SECONDS:
            self.attempts = 0
        if self.attempts >= len(DELAYS):
            return None
        self.attempts += 1
        return DELAYS[self.attempts - 1]
