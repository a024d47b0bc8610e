"""OpenTelemetry traces: one span a request, with queue, prefill and decode under it. Needs ``pip install edged[otel]``."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

from edged import __version__
from edged.errors import ConfigError

if TYPE_CHECKING:
    from edged.metrics.requests import Observation

_CLOSE_SECONDS = 2.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Tracer:
    """Sends spans, in a thread of its own, and drops them when the collector does not take them.

    Spans are made when a request has ended: nothing is done for them while tokens stream. They hold no text.

    Args:
        endpoint: Where an OTLP collector takes spans over HTTP, such as ``http://127.0.0.1:4318/v1/traces``.
        exporter: Takes the spans instead, for tests.

    Raises:
        ConfigError: The packages are not installed.
    """

    def __init__(self, endpoint: str, *, exporter: Any = None) -> None:  # noqa: ANN401 - optional package
        try:
            from opentelemetry import trace  # noqa: PLC0415 - optional
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise ConfigError(
                f"traces.endpoint: a package for traces is missing ({error}): pip install 'edged[otel]', or leave it out",
                field="traces.endpoint",
            ) from error
        self._trace: Any = trace
        self._provider: Any = TracerProvider(
            resource=Resource.create({"service.name": "edged", "service.version": __version__})
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint, timeout=5))
        )
        self._tracer: Any = self._provider.get_tracer("edged", __version__)
        self._propagator: Any = TraceContextTextMapPropagator()

    def record(self, request: Observation, ended: float, error_type: str) -> None:
        """Make the spans of a request that has ended.

        Args:
            request: What is known of it.
            ended: When, in seconds of ``time.monotonic()``.
            error_type: Its error's code; empty if it finished.
        """
        # Spans want the time of day; what was measured is steady.
        offset = time.time_ns() - round(time.monotonic() * 1e9)

        def at(moment: float) -> int:
            return offset + round(moment * 1e9)

        parent = None
        if _TRACEPARENT.fullmatch(request.traceparent):
            parent = self._propagator.extract({"traceparent": request.traceparent})
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": "edged",
            "gen_ai.request.model": request.model,
            "edged.request.id": request.request_id,
        }
        finished = request.finished
        if finished is not None:
            attributes |= {
                "gen_ai.response.finish_reasons": [finished.reason],
                "gen_ai.usage.input_tokens": finished.prompt_tokens,
                "gen_ai.usage.output_tokens": finished.generated_tokens,
                "edged.usage.cached_tokens": finished.cached_tokens,
            }
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=at(request.arrived),
            attributes=attributes,
        )
        if error_type:
            span.set_attribute("error.type", error_type)
            span.set_status(self._trace.StatusCode.ERROR, error_type)
        inside = self._trace.set_span_in_context(span)
        moments = [
            ("queue", request.submitted_at, request.started_at),
            ("prefill", request.started_at, request.first_at),
            ("decode", request.first_at, None),
        ]
        for name, begin, end in moments:
            if begin is not None:
                child = self._tracer.start_span(name, context=inside, start_time=at(begin))
                child.end(at(ended if end is None else end))
        span.end(at(ended))

    def close(self) -> None:
        """Send what is left; a collector that is away does not hold up the daemon's end."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
