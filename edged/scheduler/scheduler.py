"""Who runs in the next step of one model: continuous batching over pages that are promised at admission.

Sequences join and leave between steps. A request is admitted when a place and the pages of its worst case (prompt and
``max_tokens``) are free, so nothing that runs can run out later. Each step carries one token of every sequence that
decodes, and fills what ``prefill_chunk`` leaves with pieces of prompts, so that a long prompt does not stop the streams
that run. The step after a request ended, was cancelled or missed its deadline does not hold it, and its pages are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.errors import InvalidArgumentError
from edged.executor.base import PAGE_TOKENS, ExecutorLimits, SamplingRow, StepBatch
from edged.memory.kv_pool import PagePool, pages_for
from edged.scheduler.queue import WaitingQueue

if TYPE_CHECKING:
    from edged.scheduler.request import Request

_FIRST_RETRY_SECONDS = 1.0
"""What a refused request is told before any request has ended."""


class Scheduler:
    """Schedules the requests of one model.

    A turn is ``expire``, ``next_batch``, the executor's step, ``stepped``; ``submit``, ``cancel`` and ``finish`` come
    between steps.

    Args:
        limits: What the loaded executor can take.
        prefill_chunk: Most prompt tokens in one step.
        queue_capacity: Most requests that wait.
    """

    def __init__(self, limits: ExecutorLimits, *, prefill_chunk: int, queue_capacity: int) -> None:
        if limits.max_step_tokens < limits.max_sequences:
            raise ValueError(
                f"a step of {limits.max_step_tokens} tokens cannot decode {limits.max_sequences} sequences"
            )
        self.limits = limits
        self.pool = PagePool(limits.pages)
        self.queue = WaitingQueue(queue_capacity)
        self.running: list[Request] = []
        """Requests that hold pages, in the order of their admission."""
        self.started: list[Request] = []
        """Requests admitted since the reader last emptied this list."""
        self.drawing: list[Request] = []
        """The requests whose tokens the current batch draws, in the order of its rows."""
        self.prompt_tokens = 0
        """Prompt tokens in the current batch."""
        self._prefill_chunk = prefill_chunk
        self._by_id: dict[str, Request] = {}
        self._orders = 0
        self._next_deadline = float("inf")
        self._mean_seconds = 0.0  # of a request, from start to end
        self._moved: list[tuple[Request, int]] = []  # requests of the current batch and their new tokens
        # The batch's arrays are views of these, valid until the next batch is made.
        self._token_ids = np.zeros(limits.max_step_tokens, np.int32)  # [T]
        self._positions = np.zeros(limits.max_step_tokens, np.int32)  # [T]
        self._starts = np.zeros(limits.max_sequences + 1, np.int32)  # [S + 1]
        self._lengths = np.zeros(limits.max_sequences, np.int32)  # [S]
        self._counting = np.arange(limits.max_step_tokens + 1, dtype=np.int32)  # [T + 1]

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._by_id)

    @property
    def retry_seconds(self) -> float:
        """When a place in the queue is likely to be free, from the mean time of the requests so far."""
        if not self._mean_seconds:
            return _FIRST_RETRY_SECONDS
        return min(60.0, max(0.1, self._mean_seconds / self.limits.max_sequences))

    def submit(self, request: Request, now: float) -> None:
        """Start a request, or let it wait.

        Args:
            request: A new request.
            now: Seconds of ``time.monotonic()``.

        Raises:
            InvalidArgumentError: It can never run: its worst case is longer than the context or the pool, its prompt is
                empty, or its name is taken.
            ResourceExhaustedError: The queue is full.
        """
        self._check(request)
        request.order = self._orders
        self._orders += 1
        self._admit(now)
        if not len(self.queue) and self._fits(request):
            self._start(request, now)
        else:
            self.queue.push(request, self.retry_seconds)
        self._by_id[request.request_id] = request
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, request_id: str) -> Request | None:
        """Drop a request and free its pages; None if it has ended already."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._drop(request)
        return request

    def expire(self, now: float) -> list[Request]:
        """Drop every request whose deadline has passed, running or waiting, and return them."""
        if now < self._next_deadline:
            return []
        expired = [r for r in self._by_id.values() if r.deadline is not None and r.deadline <= now]
        for request in expired:
            self._drop(request)
        self._next_deadline = min(
            (r.deadline for r in self._by_id.values() if r.deadline is not None), default=float("inf")
        )
        return expired

    def finish(self, request: Request, now: float) -> None:
        """A running request has its whole answer: free its pages."""
        seconds = now - request.started_at
        self._mean_seconds += (seconds - self._mean_seconds) * (0.2 if self._mean_seconds else 1.0)
        request.finished_at = now
        self._drop(request)

    def next_batch(self, now: float) -> StepBatch | None:
        """Admit what fits and make the next step; None if nothing runs.

        Its arrays and ``drawing`` are valid until the next call.
        """
        self._admit(now)
        self.drawing = drawing = []
        self._moved = moved = []
        if not self.running:
            return None
        decoding = [request for request in self.running if request.stored >= len(request.prompt)]
        tokens = count = len(decoding)
        tables = []
        sampling: list[SamplingRow] = []
        if count:
            stored = [request.stored for request in decoding]
            self._token_ids[:count] = [request.last_token for request in decoding]
            self._positions[:count] = stored
            self._lengths[:count] = stored
            self._starts[: count + 1] = self._counting[: count + 1]
            for request, position in zip(decoding, stored, strict=True):
                if position >= request.room:
                    self._grow(request, position + 1)
                tables.append(request.pages)
                sampling.append(request.sampling_row(position + 1))
                moved.append((request, 1))
            drawing += decoding
        logit_rows = list(range(count))

        if count < len(self.running):
            left = min(self._prefill_chunk, self.limits.max_step_tokens - count)
            for request in self.running:
                take = min(request.prompt_left, left)
                if take <= 0:
                    continue
                first, end = request.stored, request.stored + take
                self._token_ids[tokens : tokens + take] = request.prompt[first:end]
                self._positions[tokens : tokens + take] = self._counting[:take]
                self._positions[tokens : tokens + take] += first
                self._lengths[count] = first
                tokens += take
                count += 1
                left -= take
                self._starts[count] = tokens
                if end > request.room:
                    self._grow(request, end)
                tables.append(request.pages)
                moved.append((request, take))
                if end == len(request.prompt):
                    drawing.append(request)
                    logit_rows.append(tokens - 1)
                    sampling.append(request.sampling_row(end))
        self.prompt_tokens = tokens - len(decoding)
        return StepBatch(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            sequence_starts=self._starts[: count + 1],
            lengths=self._lengths[:count],
            page_tables=tables,
            logit_rows=np.array(logit_rows, np.int32),
            sampling=sampling,
        )

    def stepped(self) -> None:
        """The current batch ran: its tokens are in the pages."""
        for request, tokens in self._moved:
            request.stored += tokens
            request.steps += 1
        self._moved = []

    def check(self) -> None:
        """Hold the state against its own invariants; for tests and the engine's idle self-check.

        Raises:
            AssertionError: Pages are lost or owned twice.
        """
        self.pool.check()
        promised = sum(len(r.table.promised) for r in self.running if r.table is not None)
        if promised != self.pool.pages_used:
            raise AssertionError(f"{self.pool.pages_used} pages are in use, running requests hold {promised}")
        if len(self.running) + len(self.queue) != len(self._by_id):
            raise AssertionError("a request neither runs nor waits")

    def _check(self, request: Request) -> None:
        """Refuse what could never run."""
        if not len(request.prompt):
            raise InvalidArgumentError("the prompt has no tokens: give at least one", field="prompt")
        if request.request_id in self._by_id:
            raise InvalidArgumentError(f"request id {request.request_id} is in use", field="request_id")
        if request.most_tokens > self.limits.context_length:
            raise InvalidArgumentError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: together at most "
                f"{self.limits.context_length} (context_length)",
                field="stops.max_tokens",
            )
        pages = pages_for(request.most_tokens, PAGE_TOKENS)
        if pages > self.pool.pages:
            raise InvalidArgumentError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}, which is {pages} "
                f"pages: the pool has {self.pool.pages}",
                field="stops.max_tokens",
            )

    def _fits(self, request: Request) -> bool:
        return len(self.running) < self.limits.max_sequences and self.pool.can_allocate(
            pages_for(request.most_tokens, PAGE_TOKENS)
        )

    def _admit(self, now: float) -> None:
        """Start waiting requests while the next one fits; nobody overtakes it."""
        while (request := self.queue.next) is not None and self._fits(request):
            self._start(self.queue.pop(), now)

    def _start(self, request: Request, now: float) -> None:
        request.started_at = now
        request.table = self.pool.allocate(pages_for(request.most_tokens, PAGE_TOKENS))
        self.running.append(request)
        self.started.append(request)

    def _grow(self, request: Request, tokens: int) -> None:
        """Bring pages for ``tokens`` tokens into use."""
        table = request.table
        assert table is not None, "a running request has a table"  # noqa: S101
        self.pool.append(table, pages_for(tokens, PAGE_TOKENS))
        request.pages = table.pages
        request.room = len(table) * PAGE_TOKENS

    def _drop(self, request: Request) -> None:
        """Forget a request and free its pages."""
        del self._by_id[request.request_id]
        if request.table is None:
            self.queue.remove(request)
            return
        self.running.remove(request)
        if request in self.started:  # it ended before anybody was told that it began
            self.started.remove(request)
        self.pool.free(request.table)
        request.table = None
