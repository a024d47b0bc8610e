"""Which requests may start: what could never run, what comes too late, what fits, and whom it may put aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.errors import DeadlineError, InvalidArgumentError
from edged.executor.base import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import ExecutorLimits
    from edged.scheduler.estimate import Estimator
    from edged.scheduler.holdings import Holdings
    from edged.scheduler.queue import WaitingQueue
    from edged.scheduler.request import Request


class Admission:
    """The rules of one model.

    Args:
        limits: What the loaded executor can take.
        holdings: Pages, cache, sessions and host memory.
        queue: The requests that wait.
        running: Those that hold pages; its changes are seen.
        estimator: Knows how long requests take.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        holdings: Holdings,
        queue: WaitingQueue,
        running: Sequence[Request],
        estimator: Estimator,
    ) -> None:
        self._limits = limits
        self._holdings = holdings
        self._queue = queue
        self._running = running
        self._estimator = estimator

    def check(self, request: Request) -> None:
        """Refuse what could never run.

        Raises:
            InvalidArgumentError: Its prompt is empty, or its worst case is longer than the context or the pool.
        """
        if not len(request.prompt):
            raise InvalidArgumentError("the prompt has no tokens: give at least one", field="prompt")
        if request.most_tokens > self._limits.context_length:
            raise InvalidArgumentError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: together at most "
                f"{self._limits.context_length} (context_length)",
                field="stops.max_tokens",
            )
        pages, pool = self._holdings.pages_of(request), self._holdings.pool
        if pages > pool.pages:
            raise InvalidArgumentError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}, which is {pages} "
                f"pages: the pool has {pool.pages}",
                field="stops.max_tokens",
            )

    def check_deadline(self, request: Request, now: float, *, starts: bool) -> None:
        """Refuse what cannot be there in time: the first token, and the whole answer where its length is certain.

        Args:
            request: Has a deadline.
            now: Seconds of ``time.monotonic()``.
            starts: Whether it need not wait.

        Raises:
            DeadlineError: It would be late.
        """
        assert request.deadline is not None, "only asked of a request with a deadline"  # noqa: S101
        ahead = self._queue.ahead_of(request)
        cached = len(self._holdings.cached_prefix(request)) * PAGE_TOKENS
        estimate = self._estimator
        start: float | None = 0.0
        if not starts:
            start = estimate.start_seconds(request, self._running, ahead, self._holdings.pool.pages_free)
        first = estimate.first_token_seconds(request, cached, self._running if starts else ())
        if start is None or first is None:
            return  # nothing has been measured yet
        needed = start + first + estimate.answer_seconds(request, self._running)
        left = request.deadline - now
        if needed <= left:
            return
        tokens = len(request.prompt) - cached
        what = (
            "the first token" if request.least_tokens == 1 else f"the answer of {request.least_tokens} tokens"
        )
        raise DeadlineError(
            f"the deadline leaves {max(left, 0):.2f} s and {what} is expected after {needed:.2f} s "
            f"({start:.2f} s behind {len(ahead)} waiting and {len(self._running)} running requests, {first:.2f} s for "
            f"{tokens} prompt tokens): allow more time, shorten the prompt or raise the priority"
        )

    def fits(self, request: Request) -> bool:
        """Whether a place and the pages of its worst case are free, once what nobody holds has given way."""
        return len(self._running) < self._limits.max_sequences and self._holdings.make_room(request)

    def victims(self, request: Request) -> list[Request]:
        """The fewest running requests, the lowest in priority first, whose places and pages ``request`` would have.

        None that is as urgent by now: what has waited long enough is left alone, so that it comes to its end.
        """
        holdings = self._holdings
        if holdings.host is None or not holdings.host.slots:
            return []
        lower = [
            other
            for other in self._running
            if other.priority < request.priority and other.urgency < request.urgency
        ]
        lower.sort(key=lambda r: (r.priority, -r.order))
        places = self._limits.max_sequences - len(self._running)
        pages = holdings.pages_of(request)
        victims: list[Request] = []
        for other in lower:
            if not holdings.can_suspend([*victims, other]):
                continue
            victims.append(other)
            if (
                places + len(victims) >= 1
                and holdings.pool.pages_free + holdings.pages_freed_by(victims) >= pages
            ):
                return victims
        return []
