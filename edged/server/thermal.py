"""Slows admission while the board is hot: fewer requests run at once, the others wait for their turn."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from edged.errors import DeadlineError, ResourceExhaustedError
from edged.jetson import is_jetson, read_board
from edged.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from edged.config import ThermalConfig
    from edged.jetson import Board

_LOOK_SECONDS = 1.0
_HYSTERESIS = 2.0
"""Degrees above the margin that end the cap: a board at its edge must not flap."""
_RETRY_SECONDS = 5.0

log = get_logger("server")


class ThermalGate:
    """Looks at the board once a second and holds requests back while its thermal margin is gone.

    A board that does not say its temperatures, and every machine that is no Jetson, is never hot.

    Args:
        config: The margin, and how many requests may run when it is gone.
        capacity: Most requests that wait for one model, here and in the engine; one more is refused.
        look: Reads the board.
        queued: How many wait for a model in the engine, as far as it has said.
    """

    def __init__(
        self,
        config: ThermalConfig,
        capacity: int,
        look: Callable[[], Board | None] | None = None,
        queued: Callable[[str], int] = lambda _model: 0,
    ) -> None:
        self._config = config
        self._capacity = capacity
        self._look = look or (read_board if is_jetson() else None)
        self._running = 0
        self._queued = queued
        self._waiting: Counter[str] = Counter()
        self._hot = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.board: Board | None = None
        """The last look; None where this is no Jetson."""

    @property
    def capped(self) -> bool:
        """Whether fewer requests run at once."""
        return self._hot and self._config.max_requests > 0

    @property
    def notice(self) -> str:
        """One line on a cap that is in force; empty otherwise."""
        if not self.capped or self.board is None or self.board.thermal_margin is None:
            return ""
        return (
            f"the board is {self.board.thermal_margin:.1f} °C below throttling (thermal.margin {self._config.margin}): at "
            f"most {self._config.max_requests} requests run at once (thermal.max_requests), {self._waiting.total()} wait for "
            "that alone"
        )

    def waiting(self, model: str) -> int:
        """Requests for ``model`` that wait here; the engine does not know of them yet."""
        return self._waiting[model]

    def start(self) -> None:
        """Begin to look, on the running loop."""
        if self._look is not None:
            self._task = asyncio.get_running_loop().create_task(self._keep_looking(), name="edged-thermal")

    def close(self) -> None:
        """Stop looking, and let everybody through: what waits is refused by who comes next."""
        if self._task is not None:
            self._task.cancel()
        self._hot = False
        self._wake()

    @asynccontextmanager
    async def place(self, model: str, deadline: float | None) -> AsyncIterator[None]:
        """Hold a request's place while it runs; wait for one while the board is hot.

        Args:
            model: Name of its model.
            deadline: The call's, in seconds of ``time.monotonic()``.

        Raises:
            ResourceExhaustedError: As many requests wait as the queue holds.
            DeadlineError: The deadline passed first.
        """
        if self._is_full():
            await self._wait(model, deadline)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._wake()

    def _is_full(self) -> bool:
        return self.capped and self._running >= self._config.max_requests

    async def _wait(self, model: str, deadline: float | None) -> None:
        waiting = self._waiting[model] + self._queued(model)
        if waiting >= self._capacity:
            raise ResourceExhaustedError(
                f"the board is hot, and {waiting} requests wait for model {model} (queue.capacity {self._capacity}): try "
                f"again in {_RETRY_SECONDS:g} s",
                field="queue.capacity",
                retry_seconds=_RETRY_SECONDS,
            )
        self._waiting[model] += 1
        try:
            while self._is_full():
                changed = self._changed
                left = None if deadline is None else deadline - time.monotonic()
                try:
                    await asyncio.wait_for(changed.wait(), left)
                except asyncio.TimeoutError:
                    raise DeadlineError(
                        "the deadline passed while the request waited for the board to cool; allow more time"
                    ) from None
        finally:
            self._waiting[model] -= 1

    async def _keep_looking(self) -> None:
        assert self._look is not None  # noqa: S101 - started only then
        while True:
            # Some milliseconds of reading system files, which i2c may stretch: not in the loop of the streams.
            self.note(await asyncio.to_thread(self._look))
            await asyncio.sleep(_LOOK_SECONDS)

    def note(self, board: Board | None) -> None:
        """Take a look at the board."""
        self.board = board
        margin = None if board is None else board.thermal_margin
        was = self.capped
        if margin is None:
            self._hot = False
        elif self._hot:
            self._hot = margin < self._config.margin + _HYSTERESIS
        else:
            self._hot = margin < self._config.margin
        if self.capped != was:
            if self.capped:
                log.warning("the board is hot: fewer requests run at once", margin=margin)
            else:
                log.info("the board has cooled: requests run as ever", margin=margin)
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
