"""One running generation of the client for threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc

from edged.client.events import Answer, AnswerBuilder, Event, Started, read_event
from edged.client.failures import LATE_ANSWER, read_failure
from edged.errors import CancelledError, EdgedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edged.client.address import Address
    from edged.client.attempts import Attempts


class Generation:
    """One running generation: an iterator of events.

    Raises (while iterating):
        EdgedError: The daemon refused or ended the request; the class says which code, the message why.
    """

    def __init__(
        self,
        send: Callable[[float | None], Any],
        address: Address,
        timeout: float | None,
        attempts: Attempts,
    ) -> None:
        self.delivered = False
        """Whether anything of the answer has come; Started alone is none of it."""
        self._send = send
        self._address = address
        self._timeout = timeout
        self._attempts = attempts
        self._cancelled = threading.Event()
        self._call = send(attempts.left())

    def __iter__(self) -> Iterator[Event]:
        try:
            while True:
                try:
                    yield from self._events()
                except grpc.RpcError as failure:
                    error = read_failure(failure, self._address, self._timeout, LATE_ANSWER)
                else:
                    return
                if self.delivered:
                    raise error
                self._send_again(error)
        finally:
            self._call.cancel()  # a loop that is left early ends the work; after the end it does nothing

    def _events(self) -> Iterator[Event]:
        """The events of one try.

        A client that waits is told of the start with the first piece of the answer: before, it may have to start anew.
        """
        started: list[Event] = []
        for response in self._call:
            event = read_event(response)
            if isinstance(event, Started):
                if self._attempts.patient:
                    started = [event]
                else:
                    yield event
                continue
            self.delivered = True
            yield from started
            started = []
            yield event

    def _send_again(self, error: EdgedError) -> None:
        """Send the request again, once it is time.

        Raises:
            EdgedError: That error, or that the time is over.
            CancelledError: Somebody has called ``cancel``.
        """
        if not self._cancelled.wait(self._attempts.pause(error)):
            try:
                self._call = self._send(self._attempts.left())
            except ValueError:  # the connection was closed meanwhile
                raise error from None
        if self._cancelled.is_set():
            raise CancelledError("the client cancelled the request")

    def cancel(self) -> None:
        """Stop the work; the daemon frees the request's pages at its next step. May be called from any thread."""
        self._cancelled.set()
        self._call.cancel()

    def texts(self) -> Iterator[str]:
        """The pieces of text alone, none of them empty."""
        for event in self:
            text = getattr(event, "text", "")
            if text:
                yield text

    def answer(self) -> Answer:
        """Wait for the end and return everything in one piece."""
        return self.answers()[0]

    def answers(self) -> tuple[Answer, ...]:
        """Wait for the end and return every answer, where ``n`` asked for several."""
        builder = AnswerBuilder()
        for event in self:
            builder.add(event)
        return builder.build_all()
