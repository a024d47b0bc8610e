from __future__ import annotations

from fake_executor import FakeExecutor

from edged.decoding.answer import Answer
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops
from edged.executor.base import ExecutorLimits
from edged.memory.host_pages import HostPages
from edged.scheduler.holdings import Holdings
from edged.scheduler.request import Request
from edged.scheduler.scheduler import Scheduler


class NoText:
    def feed(self, token_id):
        return ""

    def flush(self):
        return ""


class HandStepped:
    """A scheduler and an executor (a fake one by default), stepped by hand.

    Time is counted in steps unless `step_seconds` says what a step of (streams, prompt tokens) takes.
    """

    def __init__(
        self,
        *,
        pages=32,
        max_sequences=4,
        max_step_tokens=64,
        prefill_chunk=16,
        queue=8,
        context=1024,
        caches=False,
        session_pages=0,
        host_pages=0,
        executor=None,
        step_seconds=None,
        speculator=None,
        **options,
    ):
        self.limits = ExecutorLimits(max_step_tokens, max_sequences, context, pages, vocabulary=97)
        self.executor = FakeExecutor(self.limits) if executor is None else executor
        host = HostPages(
            host_pages, self.executor.page_bytes, self.executor.read_pages, self.executor.write_pages
        )
        self.holdings = Holdings(
            pages,
            caches=caches,
            session_pages=session_pages,
            host=host,
            extra_tokens=0 if speculator is None else speculator.tree_size - 1,
        )
        self.scheduler = Scheduler(
            self.limits,
            prefill_chunk=prefill_chunk,
            queue_capacity=queue,
            holdings=self.holdings,
            speculator=speculator,
            **options,
        )
        self.step_seconds = step_seconds
        self.tokens = {}
        self.order = []  # names of the requests as they started
        self.now = 0.0

    def request(self, name, prompt, max_tokens=4, *, sampling=None, **options):
        answer = Answer(NoText(), Stops(max_tokens))
        return Request(
            name, prompt, sampling or Sampling(), answer, max_tokens=max_tokens, arrived=self.now, **options
        )

    def submit(self, name, prompt, max_tokens=4, **options):
        request = self.request(name, prompt, max_tokens, **options)
        self.scheduler.submit(request, self.now)
        return request

    def step(self):
        """One turn, as the engine's loop makes it; the requests that ended in it."""
        if self.step_seconds is None:
            self.now += 1.0
        scheduler = self.scheduler
        ended = scheduler.expire(self.now)
        batch = scheduler.next_batch(self.now)
        self.order += [request.request_id for request in scheduler.started]
        scheduler.started = []
        if batch is None:
            return ended
        drawn = self.executor.step(batch)
        seconds = 0.0
        if self.step_seconds is not None:
            seconds = self.step_seconds(len(batch.lengths) - len(scheduler._pieces), scheduler.prompt_tokens)
            self.now += seconds
        scheduler.stepped(seconds)
        rows = drawn.tolist()
        for request in scheduler.drawing:
            verification = request.verification
            if verification is None:
                taken, _ = request.take(rows.pop(0))
            else:
                verification.finish([rows.pop(0) for _ in verification.tree.tokens])
                scheduler.verified(request)
                taken = verification.taken
            self.tokens.setdefault(request.request_id, []).extend(taken)
            if request.answer.finish is not None:
                scheduler.finish(request, self.now)
                ended.append(request)
        assert not rows
        scheduler.check()
        return ended

    def run(self, steps=10_000):
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the requests do not end")
