"""Questions to the engine that have one answer: numbered, so that answers find who asked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.errors import EdgedError
    from edged.worker.messages import Answered, Message


class Queries:
    """The questions that are open."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, asyncio.Future[Answered]] = {}

    async def ask(self, send: Callable[[Message], None], message_of: Callable[[int], Message]) -> Answered:
        """Send a question and wait for its answer.

        Args:
            send: Sends a message to the engine.
            message_of: Makes the message out of its number.

        Raises:
            EdgedError: The engine ended before it answered.
        """
        self._last += 1
        query = self._last
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._open[query] = answer
        try:
            send(message_of(query))
            return await answer
        finally:
            del self._open[query]

    def give(self, message: Answered) -> None:
        """An answer came; nobody's if who asked has gone."""
        answer = self._open.get(message.query)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def fail_all(self, error: Callable[[], EdgedError]) -> None:
        """No engine is left to answer."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(error())
