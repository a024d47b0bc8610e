"""Requests on a real executor, with drafts or without, and everything a client would be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edged.decoding.answer import Answer
from edged.decoding.host_options import make_host_sampler
from edged.decoding.sampling import Sampling
from edged.scheduler.holdings import Holdings
from edged.scheduler.request import Request
from edged.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from edged.decoding.stops import Stops


class NoText:
    """Stands for the detokenizer where the text says nothing."""

    def feed(self, token_id):
        return ""

    def flush(self):
        return ""


@dataclass
class Job:
    """One request."""

    prompt: list[int]
    stops: Stops
    sampling: Sampling = field(default_factory=Sampling)
    detokenizer: object = field(default_factory=lambda: NoText)
    grammar: object = lambda: None


@dataclass
class Told:
    """What a client is told of it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[object] = field(default_factory=list)
    finish: str = ""
    steps: int = 0


def answer_all(executor, jobs, speculator=None, *, together=4, clock=None):
    """What becomes of every job, in order; ``together`` of them share steps.

    ``clock`` says what a step took, of which the scheduler learns.
    """
    holdings = Holdings(
        executor.limits.pages, extra_tokens=0 if speculator is None else speculator.tree_size - 1
    )
    scheduler = Scheduler(
        executor.limits, prefill_chunk=64, queue_capacity=1000, holdings=holdings, speculator=speculator
    )
    told = [Told() for _ in jobs]
    waiting = list(enumerate(jobs))
    while waiting or scheduler.has_work:
        while waiting and len(scheduler.running) + len(scheduler.queue) < together:
            index, job = waiting.pop(0)
            grammar = job.grammar()
            scheduler.submit(
                Request(
                    str(index),
                    job.prompt,
                    job.sampling,
                    Answer(job.detokenizer(), job.stops),
                    max_tokens=job.stops.max_tokens,
                    host=make_host_sampler(job.sampling, job.stops, job.prompt, grammar),
                    grammar=grammar,
                ),
                0.0,
            )
        batch = scheduler.next_batch(0.0)
        rows = executor.step(batch).tolist()
        scheduler.stepped(0.0 if clock is None else clock(batch))
        for request in scheduler.drawing:
            one = told[int(request.request_id)]
            verification = request.verification
            if verification is None:
                token = rows.pop(0)
                if token < 0:
                    one.finish = "forbidden"
                    scheduler.cancel(request.request_id)
                    continue
                if request.host is not None and request.host.logprobs is not None:
                    one.logprobs.append(request.host.logprobs)
                taken, text = request.take(token)
            else:
                verification.finish([rows.pop(0) for _ in verification.tree.tokens])
                taken, text = verification.taken, verification.text
                one.logprobs += verification.logprobs
                scheduler.verified(request)
                if verification.forbidden:
                    one.finish = "forbidden"
            one.tokens += taken
            one.text += text
            one.steps = request.steps
            if one.finish == "forbidden":
                scheduler.cancel(request.request_id)
            elif request.answer.finish is not None:
                finish = request.answer.finish
                one.text += finish.text
                one.finish = f"{finish.reason} {finish.matched_stop} {finish.matched_token_id}"
                scheduler.finish(request, 0.0)
        assert not rows
        scheduler.check()
    assert scheduler.pool.pages_free == scheduler.pool.pages
    return told
