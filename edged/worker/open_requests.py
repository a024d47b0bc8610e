"""The requests that the engine has and has not ended: every one of them ends here, exactly once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from edged.log import get_logger
from edged.worker.messages import Failed, Finished, Started, Tokens
from edged.worker.stream import RequestStream, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.errors import EdgedError

_log = get_logger("supervisor")


class OpenRequests:
    """Table of the open streams.

    Args:
        on_cancel: Called with a stream and a reason when the engine is to drop a request.
    """

    def __init__(self, on_cancel: Callable[[RequestStream, str], None]) -> None:
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

    def of_client(self, client: str) -> int:
        """Requests of ``client``, waiting or running."""
        return self._of_client[client]

    def add(self, stream: RequestStream) -> None:
        """Take a request that the engine has been sent."""
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
