"""When the engine is expected to serve, and what a client that comes before is told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edged.errors import UnavailableError
from edged.worker.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_LOAD_SECONDS = 5.0
"""What a client is told to wait for before any engine has loaded."""
_LEAST_SECONDS = 0.5


class Outlook:
    """Expects that the next load takes as long as the last one."""

    def __init__(self) -> None:
        self._load_seconds = _FIRST_LOAD_SECONDS
        self._expected_at = 0.0

    def note_load(self, seconds: float) -> None:
        """An engine has loaded its models in ``seconds``."""
        self._load_seconds = seconds

    def expect(self, delay: float = 0.0) -> None:
        """An engine starts in ``delay`` seconds."""
        self._expected_at = time.monotonic() + delay + self._load_seconds

    @property
    def wait_seconds(self) -> float:
        """How long a client should wait before it tries again."""
        return max(_LEAST_SECONDS, self._expected_at - time.monotonic())

    def refusal(self, state: State, last_error: str) -> UnavailableError:
        """Why a request is not taken in ``state``, and when it would be.

        Args:
            state: What the daemon can do now; not SERVING.
            last_error: Why the engine last ended.
        """
        if state is State.FAILED:
            return UnavailableError(f"the engine cannot be started: {last_error}")
        if state is State.DRAINING:
            return UnavailableError(
                "the daemon stops and takes no new requests", retry_seconds=self._load_seconds
            )
        wait = self.wait_seconds
        what = "loads its models" if state is State.LOADING else "starts again"
        return UnavailableError(f"the engine {what}: try again in {wait:.1f} s", retry_seconds=wait)

    def loss(self, why: str, *, stopping: bool) -> Callable[[], UnavailableError]:
        """What makes the error of a request that its engine has left behind; each request gets one of its own.

        Args:
            why: What became of the engine.
            stopping: No engine comes after it.
        """
        if stopping:
            stopped = "the daemon stops and has cut the request off; send it again once the daemon runs"
            return lambda: UnavailableError(stopped, lost=True)
        wait = self.wait_seconds
        message = f"{why}: the request is lost, try again in {wait:.1f} s"
        return lambda: UnavailableError(message, retry_seconds=wait, lost=True)
