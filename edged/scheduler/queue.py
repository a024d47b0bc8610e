"""Requests that wait for pages: a bounded queue, the most urgent first.

Urgency is priority and age together: waiting for ``aging`` seconds weighs as much as one step of priority, so that a
request of low priority comes to its turn however many of higher priority arrive. Between two requests the order never
changes while they wait, because both grow older at the same rate; so it is one number for each.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from edged.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.scheduler.request import Request


def _order(request: Request) -> tuple[float, int]:
    return (request.urgency, -request.order)


def queue_is_full(
    waiting: int, capacity: int, count: int, retry_seconds: float, model: str = ""
) -> ResourceExhaustedError:
    """The error for a request that finds a queue too full.

    Args:
        waiting: Requests in it.
        capacity: Most requests that wait.
        count: Answers that are asked for (``sampling.n``); each takes a place.
        retry_seconds: When to come back.
        model: Whose queue it is, where more than one is meant.
    """
    whose = f" for model {model}" if model else ""
    several = f", which is too little room for {count} answers (sampling.n)" if count > 1 else ""
    return ResourceExhaustedError(
        f"{waiting} requests wait{whose} and the queue holds {capacity} (queue.capacity){several}: try again in "
        f"{retry_seconds:.1f} s",
        field="queue.capacity",
        retry_seconds=retry_seconds,
    )


class WaitingQueue:
    """Bounded queue of the requests of one model.

    Args:
        capacity: Most requests that wait; 0 means that a request starts at once or is refused.
        aging: Seconds of waiting that weigh as much as one step of priority.
    """

    def __init__(self, capacity: int, aging: float = 10.0) -> None:
        self.capacity = capacity
        self.aging = aging
        self._requests: list[Request] = []  # the last one is next
        self._suspended = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, the next one first."""
        return reversed(self._requests)

    @property
    def next(self) -> Request | None:
        """The request that starts next."""
        return self._requests[-1] if self._requests else None

    @property
    def suspended(self) -> int:
        """Requests among them that ran before and lie in host memory; they take no place of the queue."""
        return self._suspended

    @property
    def room(self) -> int:
        """Requests that it takes yet."""
        return self.capacity - (len(self._requests) - self._suspended)

    @property
    def is_full(self) -> bool:
        """Whether one more request is refused."""
        return self.room <= 0

    def weigh(self, request: Request) -> None:
        """Set a new request's urgency."""
        request.urgency = request.priority * self.aging - request.arrived

    def ahead_of(self, request: Request) -> list[Request]:
        """The waiting requests that start before ``request`` would, the next one first."""
        return self._requests[bisect.bisect_right(self._requests, _order(request), key=_order) :][::-1]

    def refuse(self, count: int, retry_seconds: float) -> ResourceExhaustedError:
        """:func:`queue_is_full`, for a request of ``count`` answers."""
        return queue_is_full(self.capacity - self.room, self.capacity, count, retry_seconds)

    def push(self, request: Request, retry_seconds: float) -> None:
        """Let ``request`` wait.

        Args:
            request: The request; its ``order`` and ``urgency`` are set.
            retry_seconds: What the refusal says about when to come back.

        Raises:
            ResourceExhaustedError: ``capacity`` requests wait already.
        """
        if self.is_full:
            raise self.refuse(1, retry_seconds)
        bisect.insort(self._requests, request, key=_order)

    def take_back(self, request: Request) -> None:
        """Let a running request wait again, its pages being elsewhere; it was admitted once and is not refused now."""
        request.suspended = True
        self._suspended += 1
        bisect.insort(self._requests, request, key=_order)

    def pop(self) -> Request:
        """Take the next request out."""
        request = self._requests.pop()
        self._note_leaving(request)
        return request

    def remove(self, request: Request) -> None:
        """Take ``request`` out, wherever it stands."""
        self._requests.remove(request)
        self._note_leaving(request)

    def _note_leaving(self, request: Request) -> None:
        if request.suspended:
            self._suspended -= 1
