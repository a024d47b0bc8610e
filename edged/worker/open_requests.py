"""The requests that the engine has and has not ended: every one of them ends here, exactly once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from edged.errors import InvalidArgumentError, ResourceExhaustedError
from edged.log import get_logger
from edged.scheduler.admission import too_many_answers
from edged.scheduler.queue import queue_is_full
from edged.worker.messages import Failed, Finished, Started, Tokens
from edged.worker.request_terms import split_answers
from edged.worker.stream import RequestStream, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from edged.config import Config
    from edged.errors import EdgedError
    from edged.worker.messages import ModelReport, Submit

_log = get_logger("supervisor")


class OpenRequests:
    """Table of the open streams.

    Args:
        on_cancel: Called with a stream and a reason when the engine is to drop a request.
        config: How many may wait, and how many one client may have.
    """

    def __init__(self, on_cancel: Callable[[RequestStream, str], None], config: Config) -> None:
        self._capacity = config.queue.capacity
        self._buffer = config.queue.stream_buffer
        self._most_of_client = config.limits.requests_per_client
        self.finished = 0
        """Requests that ended with Finished."""
        self.failed = 0
        """Requests that ended with an error."""
        self._on_cancel = on_cancel
        self._streams: dict[str, RequestStream] = {}
        self._pending: Counter[str] = Counter()
        self._of_client: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def pending(self, model: str) -> int:
        """Requests of ``model`` that have no pages yet, as far as the engine has said."""
        return self._pending[model]

    def models(self) -> set[str]:
        """Models with open requests."""
        return {stream.model for stream in self._streams.values()}

    def make(self, message: Submit, client: str, report: ModelReport) -> list[RequestStream]:
        """The streams of a new request, one for each answer. Refused before the engine is asked is what is certain to be.

        Args:
            message: The request.
            client: Whose it is.
            report: What the engine last said of its model.

        Raises:
            InvalidArgumentError: Its name is taken, or it asks for more answers than model or client can ever have.
            ResourceExhaustedError: More answers wait than the queue holds, or the client has as many as it may.
        """
        self._check_room(message.model, client, report, message.sampling.n)
        names = [each.request_id for each in split_answers(message)]
        if not self._streams.keys().isdisjoint(names):
            raise InvalidArgumentError(f"request id {message.request_id} is in use", field="request_id")
        return [
            RequestStream(name, message.model, self._buffer, self._on_cancel, client=client) for name in names
        ]

    def _check_room(self, model: str, client: str, report: ModelReport, count: int) -> None:
        most = self._most_of_client if client else 0
        if count > self._capacity + report.max_sequences:
            raise too_many_answers(count, report.max_sequences, self._capacity)
        if most and count > most:
            raise InvalidArgumentError(
                f"sampling.n is {count}, and one client may have {most} answers at once (limits.requests_per_client): ask for "
                f"at most {most}",
                field="sampling.n",
            )
        if self._pending[model] + count > self._capacity + report.max_sequences:
            # More than the queue holds are on their way to it, so it is full.
            waiting = min(self._pending[model], self._capacity)
            raise queue_is_full(waiting, self._capacity, count, report.retry_seconds, model)
        has = self._of_client[client]
        if most and has + count > most:
            asked = f" and {count} more are asked for (sampling.n)" if count > 1 else ""
            raise ResourceExhaustedError(
                f"{has} requests of this client wait or run{asked}, and one client may have {most} "
                "(limits.requests_per_client): wait until one of them has ended",
                field="limits.requests_per_client",
                retry_seconds=report.retry_seconds,
            )

    def add(self, streams: Iterable[RequestStream]) -> None:
        """Take a request that the engine has been sent."""
        for stream in streams:
            self._streams[stream.request_id] = stream
            self._pending[stream.model] += 1
            self._of_client[stream.client] += 1

    def give(self, message: Started | Tokens | Finished | Failed) -> None:
        """Give what the engine said to the reader it is for; nobody's if its request has ended already."""
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        if isinstance(message, Failed):
            self._end(stream, error_of(message))
            return
        if isinstance(message, Started):
            self._pending[stream.model] -= 1
        elif isinstance(message, Finished):
            self.finished += 1
            self._forget(stream)
        if not stream.push(message):
            self.failed += 1
            self._forget(stream)
            self._on_cancel(stream, "the client reads too slowly")
            _log.warning("a client reads too slowly; its request was dropped", request_id=stream.request_id)

    def fail_all(self, error: Callable[[], EdgedError]) -> None:
        """End every request because no engine is left to do it; each gets an error of its own."""
        for stream in tuple(self._streams.values()):
            self._end(stream, error())

    def _end(self, stream: RequestStream, error: EdgedError) -> None:
        self.failed += 1
        self._forget(stream)
        stream.fail(error)

    def _forget(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self._of_client[stream.client] -= 1
        if not self._of_client[stream.client]:
            del self._of_client[stream.client]
        if not stream.started:
            self._pending[stream.model] -= 1
