"""One model inside the engine: its executor, scheduler and tokenizer, and the turn that takes them one step further."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edged.errors import Code, EdgedError
from edged.executor.host_sampler import NO_TOKEN
from edged.log import get_logger
from edged.scheduler.scheduler import Scheduler
from edged.worker.embedding import add_states, embedded
from edged.worker.holdings import make_holdings
from edged.worker.intake import Intake
from edged.worker.logprobs import last_logprobs, token_logprobs
from edged.worker.measures import SpeedBook
from edged.worker.messages import (
    Cancel,
    Failed,
    Finished,
    ModelReport,
    SessionReport,
    Started,
    Submit,
    Timings,
    Tokens,
)
from edged.worker.request_terms import deadline_message, split_answers
from edged.worker.speculation import make_speculator

if TYPE_CHECKING:
    from edged.config import ModelConfig
    from edged.decoding.detokenizer import TokenTexts
    from edged.executor.base import Executor, StepBatch
    from edged.scheduler.request import Request
    from edged.scheduler.verification import Verification
    from edged.worker.channel import EngineChannel

_log = get_logger("engine")

_ALL_FORBIDDEN = (
    "no token is left to be drawn: logit_bias, bad words and min_tokens forbid all that the constraint and the vocabulary "
    "allow; forbid less"
)


class ModelRunner:
    """Runs the requests of one model.

    Args:
        config: The model's part of the configuration.
        executor: Loaded and checked.
        executor_name: ``torch`` or ``tensorrt``.
        texts: The model's tokenizer.
        queue_capacity: Most requests that wait.
        channel: To the daemon. What a request is to be told is queued there; the loop sends it.
        aging: Seconds of waiting that weigh as much as one step of priority.

    Raises:
        UnsupportedError: Requests are to be suspended and the executor cannot copy pages.
    """

    def __init__(
        self,
        config: ModelConfig,
        executor: Executor,
        texts: TokenTexts,
        *,
        executor_name: str,
        queue_capacity: int,
        channel: EngineChannel,
        aging: float = 10.0,
    ) -> None:
        self.config = config
        self.executor = executor
        self._executor_name = executor_name
        self._texts = texts
        self._limits = executor.limits
        self._holdings = make_holdings(config, executor)
        self._speculator = make_speculator(config, executor)
        self._scheduler = Scheduler(
            self._limits,
            prefill_chunk=config.prefill_chunk,
            queue_capacity=queue_capacity,
            aging=aging,
            prefill_share=config.prefill_share,
            holdings=self._holdings,
            speculator=self._speculator,
        )
        self._channel = channel
        self._send = channel.send
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._steps = 0
        self._step_seconds = 0.0
        self._speeds = SpeedBook()
        self._intake = Intake(
            config, self._limits, texts, keeps_sessions=bool(self._holdings.sessions.most_pages)
        )

    def prepare(self) -> None:
        """Make what the first request with a constraint would have to wait for, and every stream beside it."""
        self._intake.prepare()

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self._scheduler.has_work

    def submit(self, message: Submit) -> None:
        """Take a request with all its answers; of one that is refused each ends with Failed."""
        now = time.monotonic()
        answers = split_answers(message)
        try:
            requests = [self._intake.make_request(each, now) for each in answers]
            self._scheduler.submit_all(requests, now)
        except EdgedError as error:
            for each in answers:
                self._fail(each.request_id, error.code, error.message, error.retry_seconds, error.field)
            return
        _log.debug(
            "request taken",
            request_id=message.request_id,
            model=message.model,
            prompt_tokens=len(message.token_ids),
            max_tokens=message.stops.max_tokens,
        )

    def cancel(self, message: Cancel) -> bool:
        """Drop a request and free its pages; False if this model has none of that name."""
        request = self._scheduler.cancel(message.request_id, time.monotonic())
        if request is None:
            return False
        self._fail(message.request_id, Code.CANCELLED, message.reason)
        return True

    def turn(self) -> bool:
        """Run one step, if anything is to be run, and queue what came of it.

        Returns:
            Whether a request ended, so that pages are free that were not.
        """
        scheduler = self._scheduler
        now = time.monotonic()
        expired = scheduler.expire(now)
        for request in expired:
            self._fail(request.request_id, Code.DEADLINE_EXCEEDED, deadline_message(request))
        batch = scheduler.next_batch(now)
        if scheduler.started:
            self._send_started()
        if batch is None:
            return bool(expired)
        if scheduler.pooled:
            return self._turn_of_vectors(batch) or bool(expired)
        before = time.monotonic()
        drawn = self.executor.step(batch)
        now = time.monotonic()
        seconds = now - before
        scheduler.stepped(seconds)
        ended = []
        tokens = 0
        rows = iter(drawn.tolist())
        for request in scheduler.drawing:
            verification = request.verification
            if verification is None:
                count, forbidden = self._take(request, next(rows), seconds, now)
            else:
                verification.finish([next(rows) for _ in range(len(verification.tree))])
                count, forbidden = self._take_verified(request, verification, seconds, now)
            tokens += count
            if forbidden:
                scheduler.cancel(request.request_id, now)
                why = request.grammar.error if request.grammar is not None else ""
                self._fail(request.request_id, Code.INVALID_ARGUMENT, why or _ALL_FORBIDDEN)
            elif request.answer.finish is not None:
                self._send_finished(request, now)
                ended.append(request)
        for request in ended:
            scheduler.finish(request, now)
        self._generated_tokens += tokens
        self._speeds.generated.add(tokens, now)
        self._note_step(len(batch.token_ids), seconds, now)
        return bool(ended or expired)

    def _turn_of_vectors(self, batch: StepBatch) -> bool:
        """Run a step of prompts that become vectors, and queue those that are there; whether any is."""
        scheduler, before = self._scheduler, time.monotonic()
        hidden = self.executor.hidden_states(batch)
        now = time.monotonic()
        scheduler.stepped(now - before)
        ended = add_states(scheduler.pooled, hidden)
        for request in ended:
            try:
                self._send(embedded(request, now))
            except EdgedError as error:
                self._fail(request.request_id, error.code, error.message)
            scheduler.finish(request, now)
        self._note_step(len(batch.token_ids), now - before, now)
        return bool(ended)

    def _note_step(self, tokens: int, seconds: float, now: float) -> None:
        self._steps += 1
        self._step_seconds = seconds
        self._speeds.steps.add(tokens, seconds)
        prompt_tokens = self._scheduler.prompt_tokens
        if prompt_tokens:
            self._prompt_tokens += prompt_tokens
            self._speeds.prompt.add(prompt_tokens, now)

    def _take(self, request: Request, token: int, seconds: float, now: float) -> tuple[int, bool]:
        """Take a drawn token and queue what came of it: how many tokens, and whether none was left to be drawn."""
        if token == NO_TOKEN:
            return 0, True
        logprobs = last_logprobs(request.host, self._texts)
        self._note_tokens(request, now)
        taken, text = request.take(token)
        self._send(Tokens(request.request_id, taken, text, seconds, logprobs))
        return len(taken), False

    def _take_verified(
        self, request: Request, verification: Verification, seconds: float, now: float
    ) -> tuple[int, bool]:
        """Queue what came of a tree: how many tokens, and whether none was left to be drawn at its end."""
        taken = tuple(verification.taken)
        if taken:
            logprobs = tuple(token_logprobs(found, self._texts) for found in verification.logprobs)
            self._note_tokens(request, now)
            self._send(Tokens(request.request_id, taken, verification.text, seconds, logprobs))
        self._scheduler.verified(request)
        return len(taken), verification.forbidden

    def fail_all(self, running: str, waiting: str, retry_seconds: float) -> None:
        """End every request because the engine ends.

        Args:
            running: Message for those that took part in the step that failed (INTERNAL).
            waiting: Message for those that did not (UNAVAILABLE: the same request may work later).
            retry_seconds: When the latter may come again.
        """
        scheduler = self._scheduler
        for request in list(scheduler.running):
            scheduler.cancel(request.request_id)
            self._fail(request.request_id, Code.INTERNAL, running)
        self.refuse_all(waiting, retry_seconds)

    def refuse_all(self, message: str, retry_seconds: float | None, code: Code = Code.UNAVAILABLE) -> None:
        """End every request with ``code``."""
        scheduler = self._scheduler
        for request in [*scheduler.running, *scheduler.queue]:
            scheduler.cancel(request.request_id)
            self._fail(request.request_id, code, message, retry_seconds)

    def report(self) -> ModelReport:
        """State of the model now."""
        scheduler, config, limits = self._scheduler, self.config, self._limits
        holdings, speeds, now = self._holdings, self._speeds, time.monotonic()
        host = holdings.host
        return ModelReport(
            name=config.name,
            state="ready",
            executor=self._executor_name,
            device=config.device,
            dtype=config.dtype,
            context_length=limits.context_length,
            max_sequences=limits.max_sequences,
            pages=limits.pages,
            pages_free=scheduler.pool.pages_free,
            running=len(scheduler.running),
            waiting=len(scheduler.queue),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            last_step_seconds=self._step_seconds,
            step_times=speeds.steps.buckets(),
            cached_tokens=holdings.cached_tokens,
            pages_cached=scheduler.pool.pages_idle,
            pages_pinned=holdings.sessions.pages_pinned,
            sessions=len(holdings.sessions),
            suspended=scheduler.queue.suspended,
            suspensions=scheduler.suspensions,
            host_pages=0 if host is None else host.slots,
            host_pages_free=0 if host is None else host.slots_free,
            retry_seconds=scheduler.retry_seconds,
            prompt_rate=speeds.prompt.per_second(now),
            generated_rate=speeds.generated.per_second(now),
            first_token=speeds.first_token.percentiles(),
            between_messages=speeds.between_messages.percentiles(),
            per_token=speeds.per_token.percentiles(),
            queue_time=speeds.queue.percentiles(),
            speculation=config.speculation.method,
            drafted_tokens=0 if self._speculator is None else self._speculator.drafted,
            accepted_tokens=0 if self._speculator is None else self._speculator.accepted,
        )

    def sessions(self) -> tuple[SessionReport, ...]:
        """Every session, the one used last first."""
        now = time.monotonic()
        return tuple(
            SessionReport(tenant, name, len(session.pages), session.requests, now - session.used)
            for (tenant, name), session in self._holdings.sessions.items()
        )

    def drop_session(self, tenant: str, name: str) -> bool:
        """Let a session's pages go; False if there is none of that name."""
        return self._holdings.drop_session(tenant, name)

    def check(self) -> None:
        """Hold the pages and requests against their invariants.

        Raises:
            AssertionError: Pages are lost or owned twice.
        """
        self._scheduler.check()

    def _note_tokens(self, request: Request, now: float) -> None:
        """Keep the times of a request's messages with tokens: one for each step that gave it any."""
        if request.first_token_at == 0.0:
            request.first_token_at = now
            self._speeds.first_token.add(now - request.arrived, now)
        else:
            self._speeds.between_messages.add(now - request.last_token_at, now)
        request.last_token_at = now

    def _send_started(self) -> None:
        started, self._scheduler.started = self._scheduler.started, []
        for request in started:
            queued = request.started_at - request.arrived
            self._speeds.queue.add(queued, request.started_at)
            self._send(
                Started(request.request_id, len(request.prompt), request.cached_tokens, queue_seconds=queued)
            )
        self._channel.flush()  # before the first step, which may take long

    def _send_finished(self, request: Request, now: float) -> None:
        answer = request.answer
        finish = answer.finish
        assert finish is not None, "only an answer that ended is finished"  # noqa: S101
        drafts = request.drafts
        if answer.generated > 1:
            self._speeds.per_token.add((now - request.first_token_at) / (answer.generated - 1), now)
        self._send(
            Finished(
                request.request_id,
                finish.reason,
                finish.text,
                prompt_tokens=len(request.prompt),
                generated_tokens=answer.generated,
                cached_tokens=request.cached_tokens,
                matched_stop=finish.matched_stop,
                matched_token_id=finish.matched_token_id,
                timings=Timings(
                    queue=request.started_at - request.arrived,
                    prefill=request.first_token_at - request.started_at,
                    decode=now - request.first_token_at,
                    steps=request.steps,
                ),
                drafted_tokens=0 if drafts is None else drafts.drafted,
                accepted_tokens=0 if drafts is None else drafts.accepted,
            )
        )

    def _fail(
        self, request_id: str, code: Code, message: str, retry_seconds: float | None = None, field: str = ""
    ) -> None:
        self._send(Failed(request_id, code.value, message, retry_seconds, field))
        _log.debug("request failed", request_id=request_id, code=code.name, why=message)
