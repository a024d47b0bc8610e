"""Who runs in the next step of one model: continuous batching over pages that are promised at admission.

Sequences join and leave between steps. A request is admitted when a place and the pages of its worst case (prompt and
``max_tokens``) are free, so nothing that runs can run out later. Each step carries one token of every sequence that
decodes and pieces of prompts beside them: up to ``prefill_chunk`` tokens, and while streams run no more than the pace
allows, so that a long prompt does not stop them. The step after a request ended, was cancelled or missed its deadline
does not hold it, and its pages are free.

A request that cannot meet its deadline is refused when it comes. One of higher priority that finds no place may have
running ones of lower priority moved to host memory; they go on later where they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.errors import InvalidArgumentError
from edged.executor.base import PAGE_TOKENS, ExecutorLimits, StepBatch
from edged.scheduler.admission import Admission
from edged.scheduler.batch import BatchBuilder, share_prompt_tokens
from edged.scheduler.drafting import Drafting
from edged.scheduler.estimate import Estimator
from edged.scheduler.holdings import Holdings
from edged.scheduler.pace import Pace
from edged.scheduler.queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.scheduler.request import Request
    from edged.speculation.speculator import Speculator


class Scheduler:
    """Schedules the requests of one model.

    A turn is ``expire``, ``next_batch``, the executor's step, ``stepped``; ``submit``, ``cancel`` and ``finish`` come
    between steps.

    Args:
        limits: What the loaded executor can take.
        prefill_chunk: Most prompt tokens in one step.
        queue_capacity: Most requests that wait.
        aging: Seconds of waiting that weigh as much as one step of priority.
        prefill_share: Part of a step's time that prompts may take while streams run; 1: any.
        holdings: Pages, cache, sessions and host memory; a pool without any of the three by default.
        speculator: Chooses draft tokens; none are verified without it. ``holdings`` count with its trees.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        *,
        prefill_chunk: int,
        queue_capacity: int,
        aging: float = 10.0,
        prefill_share: float = 1.0,
        holdings: Holdings | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        if limits.max_step_tokens < limits.max_sequences:
            raise ValueError(
                f"a step of {limits.max_step_tokens} tokens cannot decode {limits.max_sequences} sequences"
            )
        self.limits = limits
        self.holdings = Holdings(limits.pages, caches=False) if holdings is None else holdings
        self.pool = self.holdings.pool
        self.queue = WaitingQueue(queue_capacity, aging)
        self.pace = Pace(prefill_share, prefill_chunk)
        self.running: list[Request] = []
        """Requests that hold pages, in the order of their admission."""
        self.started: list[Request] = []
        """Requests admitted for the first time since the reader last emptied this list."""
        self.drawing: list[Request] = []
        """The requests whose tokens the current batch draws, in the order of its rows."""
        self.pooled: list[tuple[Request, int]] = []
        """In a batch of prompts that become vectors: their requests, and how many of its rows each one has."""
        self.prompt_tokens = 0
        """Prompt tokens in the current batch."""
        self.suspensions = 0
        """Times that a request was moved to host memory."""
        self._drafting = None if speculator is None else Drafting(speculator)
        self._prefill_chunk = prefill_chunk
        self._estimator = Estimator(self.pace, limits.max_sequences, self.holdings.pages_of)
        self._admission = Admission(limits, self.holdings, self.queue, self.running, self._estimator)
        self._builder = BatchBuilder(limits, self.holdings.grow)
        self._by_id: dict[str, Request] = {}
        self._orders = 0
        self._pools = False  # whether the last batch was of such requests
        self._next_deadline = float("inf")
        self._decoding: list[Request] = []  # of the current batch
        # Prompts and forced text of the current batch, in tokens.
        self._pieces: list[tuple[Request, int]] = []

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._by_id)

    @property
    def retry_seconds(self) -> float:
        """When a place in a full queue is likely to be free, from the speeds and answers so far."""
        waiting = () if self.queue.next is None else (self.queue.next,)
        return self._estimator.retry_seconds(self.running, waiting, self.pool.pages_free)

    def submit(self, request: Request, now: float) -> None:
        """As :meth:`submit_all`, for a request of one answer."""
        self.submit_all((request,), now)

    def submit_all(self, requests: Sequence[Request], now: float) -> None:
        """Start what can start of a request's answers, and let the others wait; or refuse them all and change nothing.

        Args:
            requests: New ones that differ only in name and seed: the answers to one prompt; at least one.
            now: Seconds of ``time.monotonic()``.

        Raises:
            InvalidArgumentError: They can never run: the worst case of one is longer than the context or the pool, its
                prompt is empty, a name is taken, or there are more than places and queue ever take together.
            ResourceExhaustedError: More than the queue takes now would have to wait.
            DeadlineError: They would not have what they must have before their deadline.
        """
        for request in requests:
            if request.request_id in self._by_id:
                raise InvalidArgumentError(f"request id {request.request_id} is in use", field="request_id")
            self._admission.check(request)
        for request in requests:
            request.order = self._orders
            self._orders += 1
            self.queue.weigh(request)
        self._admit(now)
        first = requests[0]
        is_next = self.queue.next is None or first.urgency > self.queue.next.urgency
        starting, victims = self._admission.starting(requests) if is_next else (0, [])
        if len(requests) - starting > self.queue.room:
            self._admission.check_ever(requests)
            raise self.queue.refuse(len(requests), self.retry_seconds)
        if first.deadline is not None:
            self._admission.check_deadline(requests, now, starting, victims)
            self._next_deadline = min(self._next_deadline, first.deadline)
        for victim in victims:
            self._suspend(victim)
        for index, request in enumerate(requests):
            self._by_id[request.request_id] = request
            if index < starting:
                self._start(request, now)
            else:
                self.queue.push(request, 0.0)

    def cancel(self, request_id: str, now: float = 0.0) -> Request | None:
        """Drop a request and free its pages; None if it has ended already."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._drop(request, now)
        return request

    def expire(self, now: float) -> list[Request]:
        """Drop every request whose deadline has passed, running or waiting, and return them."""
        if now < self._next_deadline:
            return []
        expired = [r for r in self._by_id.values() if r.deadline is not None and r.deadline <= now]
        for request in expired:
            self._drop(request, now)
        self._next_deadline = min(
            (r.deadline for r in self._by_id.values() if r.deadline is not None), default=float("inf")
        )
        return expired

    def finish(self, request: Request, now: float) -> None:
        """A running request has its whole answer: free its pages."""
        self._estimator.note_end(request, now - request.started_at)
        request.finished_at = now
        self._drop(request, now)

    def next_batch(self, now: float) -> StepBatch | None:
        """Admit what fits and make the next step; None if nothing runs.

        Its arrays and ``drawing`` are valid until the next call.
        """
        self._admit(now)
        self.drawing, self.pooled = [], []
        self._decoding, self._pieces = [], []
        self.prompt_tokens = 0
        if not self.running:
            return None
        running = [r for r in self.running if r.pooling is None]
        # Vectors take turns with answers.
        self._pools = len(running) < len(self.running) and not (running and self._pools)
        if self._pools:
            batch = self._next_pooled(sum(r.stored >= len(r.prompt) for r in running))
            if batch is not None:
                return batch
        self._decoding = decoding = [r for r in running if r.stored >= len(r.prompt) and r.unstored == 1]
        if len(decoding) < len(running):
            forced = self._forced_pieces(len(decoding))
            prompts = self._prompt_pieces(len(decoding) + sum(tokens for _, tokens in forced))
            self.prompt_tokens = sum(tokens for _, tokens in prompts)
            self._pieces = forced + prompts
            # Beside pieces of prompts no drafts are verified: such a step is full as it is.
        elif self._drafting is not None and self._drafting.draft(
            decoding, max(0, self.limits.tree_tokens - len(decoding))
        ):
            self.drawing = decoding
            return self._builder.build_with_trees(decoding)
        batch, self.drawing = self._builder.build(decoding, self._pieces)
        return batch

    def _next_pooled(self, streams: int) -> StepBatch | None:
        """The next step of the prompts that become vectors; None if streams leave them no time in this one."""
        self._pieces = self._prompt_pieces(streams, pooled=True)
        if not self._pieces:
            return None
        self.prompt_tokens = sum(tokens for _, tokens in self._pieces)
        batch, counts = self._builder.build_pooled(self._pieces)
        self.pooled = [(request, count) for (request, _), count in zip(self._pieces, counts, strict=True)]
        return batch

    def stepped(self, seconds: float = 0.0) -> None:
        """The current batch ran: its tokens are in the pages.

        Args:
            seconds: What the step took; 0 where nothing is to be learnt from it.
        """
        if seconds:
            plain = seconds
            if self._drafting is not None and not self._pieces:
                plain = self._drafting.note_step(self._decoding, seconds)
            self.pace.note(len(self._decoding), self.prompt_tokens, plain)
        complete = self.holdings.complete
        for request in self._decoding:
            request.steps += 1
            if request.verification is not None:
                continue  # how much of its tree stays is known when its tokens have been taken (verified)
            request.stored += 1
            if not request.stored % PAGE_TOKENS:
                complete(request)
        for request, tokens in self._pieces:
            request.stored += tokens
            request.steps += 1
            complete(request)
        self._decoding, self._pieces = [], []

    def verified(self, request: Request) -> None:
        """A request has taken what its tree gave: the accepted nodes are in its pages."""
        verification = request.verification
        assert verification is not None, "only asked of a request that brought a tree"  # noqa: S101
        request.verification = None
        request.stored += len(verification.path)
        self.holdings.complete(request)
        if self._drafting is not None:
            self._drafting.note_verified(request, verification)

    def check(self) -> None:
        """Hold the state against its own invariants; for tests and the engine's idle self-check.

        Raises:
            AssertionError: Pages are lost or owned by nobody.
        """
        self.holdings.check(self.running)
        if len(self.running) + len(self.queue) != len(self._by_id):
            raise AssertionError("a request neither runs nor waits")
        suspended = sum(request.suspended for request in self.queue)
        if suspended != self.queue.suspended or any(r.suspended or r.saved for r in self.running):
            raise AssertionError("a request runs and is suspended")
        host = self.holdings.host
        if host is not None:
            saved = sum(len(r.saved.promised) for r in self.queue if r.saved is not None)
            if saved != host.slots - host.slots_free:
                raise AssertionError("host memory holds what no suspended request has")

    def _forced_pieces(self, streams: int) -> list[tuple[Request, int]]:
        """Answers that go on by more than one token, because a constraint forces what follows, and by how many."""
        answers = [r for r in self.running if r.stored >= len(r.prompt) and r.unstored > 1]
        left = self.limits.max_step_tokens - streams - len(answers)
        pieces = []
        for request in answers:
            more = min(request.unstored - 1, left)
            left -= more
            pieces.append((request, 1 + more))
        return pieces

    def _prompt_pieces(self, streams: int, *, pooled: bool = False) -> list[tuple[Request, int]]:
        """Which prompts go on beside ``streams`` streams, and by how many tokens: those that become vectors, or the others."""
        budget = min(self._prefill_chunk, self.limits.max_step_tokens - streams)
        budget = self.pace.prompt_tokens(streams, budget)
        prefilling = []
        begun: set[bytes] = set()
        for request in self.running:
            if request.prompt_left <= 0 or (request.pooling is not None) != pooled:
                continue
            self.holdings.adopt(request)
            digest = self.holdings.next_digest(request)
            if digest is not None:
                if digest in begun:
                    continue  # another one computes the very page; it is adopted when it is there
                begun.add(digest)
            prefilling.append(request)
        return share_prompt_tokens(prefilling, budget) if prefilling else []

    def _admit(self, now: float) -> None:
        """Start waiting requests while the next one fits; nobody overtakes it."""
        while (request := self.queue.next) is not None:
            if not self._admission.fits(request):
                victims = self._admission.victims(request)
                if not victims:
                    return
                for victim in victims:
                    self._suspend(victim)
            self._start(self.queue.pop(), now)

    def _suspend(self, request: Request) -> None:
        self.running.remove(request)
        self.holdings.suspend(request)
        self.queue.take_back(request)
        self.suspensions += 1

    def _start(self, request: Request, now: float) -> None:
        if not request.suspended:
            request.started_at = now
            self.started.append(request)
        self.holdings.start(request)
        if self._drafting is not None:
            self._drafting.begin(request)
        self.running.append(request)

    def _drop(self, request: Request, now: float) -> None:
        """Forget a request and free its pages."""
        del self._by_id[request.request_id]
        if self._drafting is not None:
            self._drafting.end(request)
        if request.table is None:
            self.queue.remove(request)
        else:
            self.running.remove(request)
            if request in self.started:  # it ended before anybody was told that it began
                self.started.remove(request)
        self.holdings.end(request, now)
