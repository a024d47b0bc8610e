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

    def check_ever(self, requests: Sequence[Request]) -> None:
        """Refuse for good what is refused now and would be so on an idle engine, too.

        Args:
            requests: The answers to one prompt; each has passed :meth:`check`.

        Raises:
            InvalidArgumentError: Places or pages of all that the queue does not take are more than there are.
        """
        count, capacity, places = len(requests), self._queue.capacity, self._limits.max_sequences
        at_once = count - capacity
        pages, pool = self._holdings.pages_of(requests[0]), self._holdings.pool.pages
        if at_once > places:
            raise too_many_answers(count, places, capacity)
        if at_once * pages > pool:
            raise InvalidArgumentError(
                f"sampling.n is {count} and the queue holds {capacity} (queue.capacity), so {at_once} answers of {pages} "
                f"pages must start together: the pool has {pool}; ask for fewer answers or a smaller max_tokens",
                field="sampling.n",
            )

    def check_deadline(
        self, requests: Sequence[Request], now: float, starting: int, victims: Sequence[Request]
    ) -> None:
        """Refuse what cannot be there in time: the first token, and the whole answer where its length is certain.

        Args:
            requests: The answers to one prompt, with one deadline: the last of them says whether it is kept.
            now: Seconds of ``time.monotonic()``.
            starting: How many of them need not wait.
            victims: Running requests that are put aside for these.

        Raises:
            DeadlineError: It would be late.
        """
        request, mates, starts = requests[-1], requests[:-1], starting == len(requests)
        assert request.deadline is not None, "only asked of a request with a deadline"  # noqa: S101
        ahead = [*self._queue.ahead_of(request), *mates]
        cached = len(self._holdings.cached_prefix(request)) * PAGE_TOKENS
        estimate = self._estimator
        start: float | None = 0.0
        if not starts:
            stay = [other for other in self._running if other not in victims]
            pages_free = self._holdings.pool.pages_free + self._holdings.pages_freed_by(victims)
            start = estimate.start_seconds(request, stay, ahead, pages_free)
        first = estimate.first_token_seconds(request, cached, (*self._running, *mates) if starts else ())
        if start is None or first is None:
            return  # nothing has been measured yet
        needed = start + first + estimate.answer_seconds(request, (*self._running, *mates))
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

    def starting(self, requests: Sequence[Request]) -> tuple[int, list[Request]]:
        """How many answers to one prompt can start now, and the running requests that are put aside for them.

        As many as can; none where the queue does not take the others, because then all are refused.
        """
        count, request = len(requests), requests[0]
        # What never finds a place in the queue must start together.
        together = max(1, count - self._queue.capacity)
        for some in range(min(count, self._limits.max_sequences), max(0, count - self._queue.room - 1), -1):
            if self.fits(request, some, together):
                return some, []
            victims = self.victims(request, some)
            if victims:
                return some, victims
        return 0, []

    def fits(self, request: Request, count: int = 1, together: int = 1) -> bool:
        """Whether places and the pages of the worst case are free, once what nobody holds has given way.

        Args:
            request: It.
            count: How many of its like are to start.
            together: The fewest of them that may; pins of sessions yield to these.
        """
        return len(self._running) + count <= self._limits.max_sequences and self._holdings.make_room(
            request, count, together
        )

    def victims(self, request: Request, count: int = 1) -> list[Request]:
        """The fewest running requests, lowest in priority first, whose places and pages ``count`` like it would have.

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
        pages = holdings.pages_of(request) * count
        victims: list[Request] = []
        for other in lower:
            if not holdings.can_suspend([*victims, other]):
                continue
            victims.append(other)
            if (
                places + len(victims) >= count
                and holdings.pool.pages_free + holdings.pages_freed_by(victims) >= pages
            ):
                return victims
        return []


def too_many_answers(count: int, places: int, capacity: int) -> InvalidArgumentError:
    """The error for more answers to one prompt than an idle model takes.

    Args:
        count: Answers that are asked for.
        places: Most sequences that run at once.
        capacity: Most requests that wait.
    """
    return InvalidArgumentError(
        f"sampling.n is {count}, and at most {places} answers run (max_sequences) and {capacity} wait (queue.capacity) at "
        f"once: ask for at most {places + capacity}",
        field="sampling.n",
    )
