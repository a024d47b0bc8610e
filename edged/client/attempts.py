"""When a call that failed is sent again: by a client that waits, and only where nothing was answered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edged.errors import DeadlineError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.errors import EdgedError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


class Attempts:
    """The tries of one call.

    A daemon that loads or whose engine starts again refuses a call without having looked at it: it is asked again as long as
    there is time. A call that was under way when its engine or daemon ended may be what ended it, so it is sent a second
    time and no third.

    Args:
        patient: Whether it may be sent again at all.
        timeout: Seconds that all tries have together; None: any time.
        patience: Seconds from the first failure on in which it may be sent again; None: as long as ``timeout`` lets.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        timeout: float | None,
        *,
        patient: bool,
        patience: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patient = patient
        self._timeout = timeout
        self._patience = patience
        self._clock = clock
        self._end = None if timeout is None else clock() + timeout
        self._give_up: float | None = None
        self._lost = False
        self._last: EdgedError | None = None
        self._pause = _FIRST_PAUSE

    def left(self) -> float | None:
        """Seconds that the next try has."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def pause(self, error: EdgedError) -> float:
        """Seconds to wait before the next try.

        Args:
            error: How the last one ended; nothing of an answer had come.

        Raises:
            EdgedError: That error, where the call is not to be sent again.
            DeadlineError: The time is over; the message says what the last try found.
        """
        if isinstance(error, DeadlineError) and self._last is not None:
            raise self._too_late(self._last) from error
        if not self.patient or not isinstance(error, UnavailableError):
            raise error
        self._last = error
        if error.lost or error.retry_seconds is None:  # without a hint: the connection broke
            if self._lost:
                raise error
            self._lost = True
        now = self._clock()
        if self._give_up is None and self._patience is not None:
            self._give_up = now + self._patience
        if self._give_up is not None and now >= self._give_up:
            raise error
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        if self._end is None:
            return pause
        if now >= self._end:
            raise self._too_late(error) from error
        return min(pause, self._end - now)

    def _too_late(self, last: EdgedError) -> DeadlineError:
        return DeadlineError(f"no answer within the timeout of {self._timeout:g} s: {last.message}")
