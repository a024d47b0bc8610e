"""Requests that wait for pages: a bounded queue, highest priority first and then in the order of arrival."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from edged.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.scheduler.request import Request


def _urgency(request: Request) -> tuple[int, int]:
    return (request.priority, -request.order)


class WaitingQueue:
    """Bounded queue of the requests of one model.

    Args:
        capacity: Most requests that wait; 0 means that a request starts at once or is refused.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._requests: list[Request] = []  # the last one is next

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, the next one first."""
        return reversed(self._requests)

    @property
    def next(self) -> Request | None:
        """The request that starts next."""
        return self._requests[-1] if self._requests else None

    def push(self, request: Request, retry_seconds: float) -> None:
        """Let ``request`` wait.

        Args:
            request: The request; its ``order`` is set.
            retry_seconds: What the refusal says about when to come back.

        Raises:
            ResourceExhaustedError: ``capacity`` requests wait already.
        """
        if len(self._requests) >= self.capacity:
            raise ResourceExhaustedError(
                f"{len(self._requests)} requests wait and the queue holds {self.capacity} (queue.capacity): "
                f"try again in {retry_seconds:.1f} s",
                retry_seconds=retry_seconds,
            )
        bisect.insort(self._requests, request, key=_urgency)

    def pop(self) -> Request:
        """Take the next request out."""
        return self._requests.pop()

    def remove(self, request: Request) -> None:
        """Take ``request`` out, wherever it stands."""
        self._requests.remove(request)
