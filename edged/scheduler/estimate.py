"""When a request would start, have its first token and be done: from measured speeds and who is before it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.scheduler.pace import Pace
    from edged.scheduler.request import Request

_FIRST_RETRY_SECONDS = 1.0
"""What a refused request is told before any request has ended."""
_LONGEST_RETRY_SECONDS = 60.0
_SIMULATED = 256
"""Waiting requests that are looked at one by one; of a longer queue the rest is taken to be like them."""


class Estimator:
    """Looks ahead.

    Args:
        pace: The measured speeds.
        places: Most requests that run at once.
        pages_of: Pages of a request's worst case.
    """

    def __init__(self, pace: Pace, places: int, pages_of: Callable[[Request], int]) -> None:
        self._pace = pace
        self._places = places
        self._pages_of = pages_of
        self._mean_tokens = 0.0  # of an answer
        self._mean_seconds = 0.0  # of a request, from start to end

    def note_end(self, request: Request, seconds: float) -> None:
        """A request has its whole answer, ``seconds`` after it started."""
        weight = 0.2 if self._mean_seconds else 1.0
        self._mean_seconds += (seconds - self._mean_seconds) * weight
        self._mean_tokens += (len(request.generated) - self._mean_tokens) * weight

    def retry_seconds(self, running: Sequence[Request], waiting: Sequence[Request], pages_free: int) -> float:
        """When a place in a full queue is likely to be free: when the next request of it starts."""
        seconds = None
        if waiting:
            seconds = self.start_seconds(waiting[0], running, (), pages_free)
        if seconds is None:
            if not self._mean_seconds:
                return _FIRST_RETRY_SECONDS
            seconds = self._mean_seconds / self._places
        return min(_LONGEST_RETRY_SECONDS, max(0.1, seconds))

    def first_token_seconds(self, request: Request, cached: int, running: Sequence[Request]) -> float | None:
        """Seconds from its start to its first token; None before speeds are known.

        Args:
            request: It.
            cached: Tokens of its prompt that are known.
            running: Who shares its steps. Prompts share them evenly: of a longer one only as much is in the way as the
                request has itself.
        """
        own = max(1, request.prompt_left - cached)
        others = sum(min(other.prompt_left, own) for other in running if other.prompt_left > 0)
        streams = sum(other.prompt_left <= 0 for other in running)
        return self._pace.prompt_seconds(own + others, streams)

    def answer_seconds(self, request: Request, running: Sequence[Request]) -> float:
        """Seconds from its first token to the last that it cannot end without; 0 before speeds are known."""
        a_token = self._pace.decode_seconds(len(running) + 1)
        return 0.0 if a_token is None else (request.least_tokens - 1) * a_token

    def start_seconds(
        self, request: Request, running: Sequence[Request], ahead: Sequence[Request], pages_free: int
    ) -> float | None:
        """Seconds until a request that does not fit now has its place and pages; None before speeds are known.

        Args:
            request: It.
            running: Requests that hold places and pages.
            ahead: Requests that start before it, the next one first.
            pages_free: Pages that nobody holds.
        """
        ends: list[tuple[float, int]] = []
        for other in running:
            seconds = self._left_seconds(other, len(running))
            if seconds is None:
                return None
            ends.append((seconds, self._pages_of(other)))
        heapq.heapify(ends)
        now, places = 0.0, self._places - len(running)
        looked_at = ahead[:_SIMULATED]
        for other in (*looked_at, request):
            pages = self._pages_of(other)
            while (places < 1 or pages > pages_free) and ends:
                now, freed = heapq.heappop(ends)
                places += 1
                pages_free += freed
            places -= 1
            pages_free -= pages
            seconds = self._left_seconds(other, self._places)
            if seconds is None:
                return None
            heapq.heappush(ends, (now + seconds, pages))
        return now * len(ahead) / len(looked_at) if len(looked_at) < len(ahead) else now

    def _left_seconds(self, request: Request, streams: int) -> float | None:
        """Seconds that a request still runs, if its answer has the usual length."""
        a_token = self._pace.decode_seconds(streams)
        prompt = self._pace.prompt_seconds(max(request.prompt_left, 0), streams - 1)
        if a_token is None or prompt is None:
            return None
        usual = self._mean_tokens or request.max_tokens
        done = len(request.generated)
        most = request.max_tokens - done
        tokens = min(most, max(usual - done, usual / 8, request.least_tokens - done))
        return prompt + tokens * a_token
