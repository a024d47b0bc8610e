"""What the engine last said of a model, as a message of the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.v1 import control_pb2

if TYPE_CHECKING:
    from edged.worker.measures import Percentiles
    from edged.worker.messages import ModelReport

_COPIED = (
    "executor",
    "device",
    "dtype",
    "context_length",
    "max_sequences",
    "pages",
    "pages_free",
    "running",
    "waiting",
    "prompt_tokens",
    "generated_tokens",
    "steps",
    "last_step_seconds",
    "pages_cached",
    "pages_pinned",
    "cached_tokens",
    "sessions",
    "suspended",
    "suspensions",
    "host_pages",
    "host_pages_free",
    "retry_seconds",
    "speculation",
    "drafted_tokens",
    "accepted_tokens",
)
"""Fields that have one name in both."""


def add_report(status: control_pb2.ModelStatus, report: ModelReport) -> None:
    """Put ``report`` into ``status``."""
    for name in _COPIED:
        setattr(status, name, getattr(report, name))
    if report.running:  # what was measured before an idle engine fell silent is no speed of now
        status.prompt_tokens_per_second = report.prompt_rate
        status.generated_tokens_per_second = report.generated_rate
    status.time_to_first_token.CopyFrom(_percentiles(report.first_token))
    status.inter_token_latency.CopyFrom(_percentiles(report.between_messages))
    status.time_per_output_token.CopyFrom(_percentiles(report.per_token))
    status.queue_time.CopyFrom(_percentiles(report.queue_time))


def _percentiles(measured: Percentiles) -> control_pb2.Percentiles:
    return control_pb2.Percentiles(
        p50=measured.p50, p90=measured.p90, p99=measured.p99, max=measured.most, count=measured.count
    )
