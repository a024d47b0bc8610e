"""What a request gives back: its messages in order, until it finishes or an error ends it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from edged.errors import CancelledError, Code, EdgedError, ResourceExhaustedError, from_code
from edged.worker.messages import Failed, Finished, Started, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

Event = Started | Tokens | Finished


class RequestStream:
    """Async iterator over the events of one request: one Started, any number of Tokens, one Finished.

    It ends after Finished. Where the request failed, the events that came before are given first and then the error is
    raised, whatever it is: CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE with ``retry_seconds`` when the engine died. A
    reader that falls more than ``limit`` events behind loses its request with RESOURCE_EXHAUSTED; nobody waits for it.

    Used as a context manager it cancels the request when the block is left before the end.

    Args:
        request_id: Name of the request.
        model: Name of its model.
        limit: Events kept for the reader.
        on_cancel: Called with the stream and a reason when the request is to be dropped by the engine.
        client: Whose request it is.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        limit: int,
        on_cancel: Callable[[RequestStream, str], None],
        *,
        client: str = "",
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.client = client
        self.started = False
        """Whether the request has its pages."""
        self._limit = limit
        self._on_cancel = on_cancel
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: EdgedError | None = None
        self._on_failure: list[Callable[[EdgedError], None]] = []

    @property
    def ended(self) -> bool:
        """Whether Finished or an error has come; events may still wait for the reader."""
        return self._ended

    def cancel(self, reason: str = "the client cancelled the request") -> None:
        """Drop the request: its pages are free at the engine's next step. Without effect once it has ended.

        A reader that goes on gets CANCELLED, or the end of an answer that was complete before the engine knew.
        """
        if not self._ended:
            self._on_cancel(self, reason)

    def when_failed(self, callback: Callable[[EdgedError], None]) -> None:
        """Call ``callback`` with the error as soon as the request fails.

        For a reader that may be blocked in writing to a client that reads nothing: it cannot learn from the iterator
        that its request is lost.
        """
        if self._error is not None:
            callback(self._error)
        else:
            self._on_failure.append(callback)

    def push(self, event: Event) -> bool:
        """For the supervisor: an event came. False if the reader has fallen too far behind to be given it."""
        if len(self._events) >= self._limit and not isinstance(event, Finished):
            self.fail(
                ResourceExhaustedError(
                    f"the client is {self._limit} messages behind (queue.stream_buffer) and its request was dropped: "
                    "read faster, or raise queue.stream_buffer"
                )
            )
            return False
        self._events.append(event)
        if isinstance(event, Finished):
            self._ended = True
        elif isinstance(event, Started):
            self.started = True
        self._wake()
        return True

    def fail(self, error: EdgedError) -> None:
        """For the supervisor: the request ended badly."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        callbacks, self._on_failure = self._on_failure, []
        for callback in callbacks:
            callback(error)
        self._wake()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    async def __aenter__(self) -> RequestStream:  # noqa: PYI034 - typing.Self is 3.11
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel("the client went away")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def error_of(message: Failed) -> EdgedError:
    """The error that ended a request in the engine."""
    if message.code == Code.CANCELLED.value:
        return CancelledError(message.message)
    return from_code(message.code, message.message, field=message.field, retry_seconds=message.retry_seconds)
