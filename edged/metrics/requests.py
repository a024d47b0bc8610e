"""Figures of requests, as the daemon's clients see them.

Names and buckets are those of OpenTelemetry's semantic conventions for generative AI where they have one
(``gen_ai.server.time_to_first_token`` becomes ``gen_ai_server_time_to_first_token_seconds``), and ``edged_…`` elsewhere. No
label holds anything of a prompt or of a client: models, codes and reasons are few and known.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram, disable_created_metrics

from edged.errors import EdgedError
from edged.worker.messages import Finished, Started, Tokens

if TYPE_CHECKING:
    from types import TracebackType

    from prometheus_client import CollectorRegistry
    from typing_extensions import Self

    from edged.metrics.traces import Tracer
    from edged.worker.messages import Submit, ToDaemon

CHAT, TEXT, EMBEDDINGS = "chat", "text_completion", "embeddings"
"""``gen_ai.operation.name``."""
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION = tuple(0.01 * 2**power for power in range(16))
_MODEL, _OPERATION = "gen_ai_request_model", "gen_ai_operation_name"


class RequestMetrics:
    """Counts and times requests.

    Args:
        registry: Where the metrics are known.
        tracer: Makes a span of each request; None makes none.
    """

    def __init__(self, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        self.tracer = tracer
        disable_created_metrics()  # type: ignore[no-untyped-call] # a second series for each, which nobody asks for
        labels = (_MODEL, _OPERATION)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *more: str) -> Histogram:
            return Histogram(name, text, (*labels, *more), buckets=buckets, registry=registry)

        self.first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _FIRST_TOKEN,
        )
        self.per_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a token after the first (TPOT), one value a finished request.",
            _TOKEN,
        )
        self.duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request's arrival to its end; error_type is empty for those that finished.",
            _DURATION,
            "error_type",
        )
        self.between_messages = histogram(
            "edged_inter_token_latency_seconds",
            "Between two messages with tokens of one request (ITL); one has all tokens of a step.",
            _TOKEN,
        )
        self.queue = histogram(
            "edged_queue_time_seconds", "From a request's arrival to its start.", _DURATION
        )
        self.tokens = Counter(
            "gen_ai_server_token_usage_tokens",
            "Tokens of finished requests: input (cached ones among them), cached, output.",
            (*labels, "gen_ai_token_type"),
            registry=registry,
        )
        self.finished = Counter(
            "edged_requests_finished",
            "Requests that were answered to the end, by what ended them.",
            (*labels, "gen_ai_response_finish_reason"),
            registry=registry,
        )
        self.failed = Counter(
            "edged_requests_failed",
            "Requests that ended with an error, by its code; CANCELLED: the client went away.",
            (*labels, "error_type"),
            registry=registry,
        )
        self.denied = Counter(
            "edged_calls_denied",
            "Calls without a known token or without the scope.",
            ("code",),
            registry=registry,
        )

    def note_denied(self, code: str) -> None:
        """A guard refused a call."""
        self.denied.labels(code).inc()

    def observe(self, request_id: str, operation: str, traceparent: str = "") -> Observation:
        """Begin to watch one request; use it as a context manager around all that is done for it."""
        return Observation(self, request_id, operation, traceparent)


class Observation:
    """One request on its way.

    Args:
        metrics: Where its figures go.
        request_id: Its id.
        operation: ``chat``, ``text_completion`` or ``embeddings``.
        traceparent: Of the client, if it traces (W3C Trace Context).
    """

    def __init__(self, metrics: RequestMetrics, request_id: str, operation: str, traceparent: str) -> None:
        self._metrics = metrics
        self._labels = ("unknown", operation)
        self._arrived = time.monotonic()
        self._last = 0.0
        self.request_id = request_id
        self.operation = operation
        self.traceparent = traceparent
        self.submitted_at: float | None = None
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.finished: Finished | None = None

    @property
    def arrived(self) -> float:
        """When it came, in seconds of ``time.monotonic()``."""
        return self._arrived

    @property
    def model(self) -> str:
        """Its model; ``unknown`` if none was found."""
        return self._labels[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        code = "" if error is None else _error_type(error)
        now = time.monotonic()
        metrics = self._metrics
        metrics.duration.labels(*self._labels, code).observe(now - self._arrived)
        if error is not None:
            metrics.failed.labels(*self._labels, code).inc()
        if metrics.tracer is not None:
            metrics.tracer.record(self, now, code)

    def submit(self, submit: Submit) -> None:
        """The engine is asked."""
        self._labels = (submit.model, self.operation)
        self.submitted_at = time.monotonic()

    def note(self, message: ToDaemon) -> None:
        """The engine said something of it."""
        now = time.monotonic()
        metrics = self._metrics
        if isinstance(message, Tokens):
            if self.first_at is None:
                self.first_at = now
                metrics.first_token.labels(*self._labels).observe(now - self._arrived)
            else:
                metrics.between_messages.labels(*self._labels).observe(now - self._last)
            self._last = now
        elif isinstance(message, Started):
            self.started_at = now
            metrics.queue.labels(*self._labels).observe(now - self._arrived)
        elif isinstance(message, Finished):
            self._finish(message, now)

    def _finish(self, message: Finished, now: float) -> None:
        self.finished = message
        metrics = self._metrics
        metrics.finished.labels(*self._labels, message.reason).inc()
        for kind, count in (
            ("input", message.prompt_tokens),
            ("cached", message.cached_tokens),
            ("output", message.generated_tokens),
        ):
            metrics.tokens.labels(*self._labels, kind).inc(count)
        if self.first_at is not None and message.generated_tokens > 1:
            metrics.per_token.labels(*self._labels).observe(
                (now - self.first_at) / (message.generated_tokens - 1)
            )


def _error_type(error: BaseException) -> str:
    if isinstance(error, EdgedError):
        return error.code.name
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"
