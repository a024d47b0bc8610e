"""State of the engine as the daemon sees it."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from edged.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

_log = get_logger("supervisor")


class State(enum.Enum):
    """What the daemon can do for a client now; the values are the public API's names without their prefix."""

    LOADING = "LOADING"
    """The first engine starts or loads."""
    SERVING = "SERVING"
    """Requests are taken."""
    DRAINING = "DRAINING"
    """Running requests finish, new ones are refused; it ends with the engine's end."""
    RESTARTING = "RESTARTING"
    """The engine ended and a new one starts or loads."""
    FAILED = "FAILED"
    """The engine cannot be started; no new attempt is made."""


class StateKeeper:
    """The state, and who is told of it."""

    def __init__(self) -> None:
        self.now = State.LOADING
        self._callbacks: list[Callable[[State], None]] = []

    def subscribe(self, callback: Callable[[State], None]) -> Callable[[], None]:
        """Call ``callback`` with every new state; return what ends that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def wait_for(self, *states: State) -> State:
        """Wait until the state is one of ``states`` and return it."""
        changed = asyncio.Event()
        unsubscribe = self.subscribe(lambda _: changed.set())
        try:
            while self.now not in states:
                changed.clear()
                await changed.wait()
            return self.now
        finally:
            unsubscribe()

    def set(self, state: State) -> None:
        """Change the state."""
        if state is not self.now:
            self.now = state
            _log.info("state", state=state.value)
            self.tell()

    def tell(self) -> None:
        """Call who listens, also where something beside the state has changed."""
        for callback in tuple(self._callbacks):
            try:
                callback(self.now)
            except Exception:  # noqa: BLE001 - a fault of who listens is none of the engine's
                _log.exception("a subscriber of the state failed")
