"""Figures of the daemon, its engine, its memory and its board, read when they are asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from edged import __version__
from edged.worker.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from edged.jetson import Board
    from edged.memory.ledger import Ledger
    from edged.worker.messages import ModelReport
    from edged.worker.supervisor import Supervisor

_MODEL = "gen_ai_request_model"
_GAUGES = (
    ("edged_requests_running", "running", "Requests that take part in steps."),
    ("edged_requests_suspended", "suspended", "Waiting requests that ran before and lie in host memory."),
    ("edged_kv_pages", "pages", "KV pages of 64 tokens in the pool."),
    ("edged_kv_pages_free", "pages_free", "KV pages that are free, cached ones among them."),
    ("edged_kv_pages_cached", "pages_cached", "Free KV pages whose content the prefix cache knows."),
    ("edged_kv_pages_pinned", "pages_pinned", "KV pages that sessions keep."),
    ("edged_sessions", "sessions", "Sessions that keep pages."),
    ("edged_host_pages", "host_pages", "Pages of host memory for suspended requests."),
    ("edged_host_pages_free", "host_pages_free", "Those of them that are free."),
)
_COUNTERS = (
    ("edged_prompt_tokens", "prompt_tokens", "Prompt tokens since the engine started."),
    ("edged_cached_tokens", "cached_tokens", "Prompt tokens that the prefix cache held."),
    ("edged_generated_tokens", "generated_tokens", "Generated tokens since the engine started."),
    ("edged_steps", "steps", "Steps since the engine started."),
    ("edged_drafted_tokens", "drafted_tokens", "Draft tokens that were verified."),
    ("edged_accepted_tokens", "accepted_tokens", "Draft tokens that were the ones drawn."),
    ("edged_suspensions", "suspensions", "Times that a request was suspended."),
)


class Admission(Protocol):
    """What is known of a cap on admission."""

    @property
    def capped(self) -> bool:
        """Whether fewer requests run at once because the board is hot."""

    def waiting(self, model: str, /) -> int:
        """Requests for a model that wait for that reason, which the engine does not know of."""


class DaemonCollector(Collector):
    """Reads everything that is not counted request by request.

    Args:
        supervisor: Knows the engine.
        ledger: The static budget.
        state: What a request would find now.
        board: Reads the board; None where this is no Jetson.
        admission: The thermal cap; None where there is none.
        certificate_expiry: When the certificate ends (seconds since 1970); None without TLS.
        uptime: Seconds since the daemon started.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        ledger: Ledger,
        *,
        state: Callable[[], State],
        board: Callable[[], Board | None] = lambda: None,
        admission: Admission | None = None,
        certificate_expiry: Callable[[], float | None] = lambda: None,
        uptime: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._state = state
        self._board = board
        self._admission = admission
        self._certificate_expiry = certificate_expiry
        self._uptime = uptime

    def collect(self) -> Iterator[Metric]:
        """Prometheus: every family with its values now."""
        yield _gauge("edged_info", "Version of edged.", {("version",): {(__version__,): 1}})
        yield _gauge("edged_uptime_seconds", "Time since the daemon started.", {(): {(): self._uptime()}})
        now = self._state()
        states: dict[tuple[str, ...], float] = {
            (state.value.lower(),): float(state is now) for state in State
        }
        yield _gauge("edged_state", "1 for the state that a request would find.", {("state",): states})
        yield _counter(
            "edged_engine_restarts",
            "Times that the engine was started again.",
            {(): {(): self._supervisor.restarts}},
        )
        rows: dict[tuple[str, ...], float] = {(row.name,): row.bytes for row in self._ledger.rows}
        yield _gauge("edged_ledger_bytes", "The static budget, row by row.", {("row",): rows})
        yield _gauge(
            "edged_ledger_budget_bytes", "What the configuration allows.", {(): {(): self._ledger.budget}}
        )
        yield _gauge(
            "edged_resident_bytes",
            "Resident set of each process; GPU memory is not in it.",
            {("process",): self._resident()},
        )
        expiry = self._certificate_expiry()
        if expiry is not None:
            yield _gauge(
                "edged_certificate_expiry_timestamp_seconds",
                "When the certificate in use ends.",
                {(): {(): expiry}},
            )
        yield from self._models()
        yield from self._hardware()

    def _resident(self) -> dict[tuple[str, ...], float]:
        pids = {"daemon": os.getpid(), "engine": self._supervisor.engine_pid}
        found: dict[tuple[str, ...], float] = {}
        for process, pid in pids.items():
            if pid:
                try:
                    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
                except (OSError, ValueError, IndexError):
                    continue
                found[process,] = pages * os.sysconf("SC_PAGE_SIZE")
        return found

    def _models(self) -> Iterator[Metric]:
        reports = list(self._supervisor.models.values())
        held = {
            report.name: 0 if self._admission is None else self._admission.waiting(report.name)
            for report in reports
        }
        yield _gauge(
            "edged_requests_waiting",
            "Requests that wait, for whatever reason.",
            {(_MODEL,): {(report.name,): float(report.waiting + held[report.name]) for report in reports}},
        )
        yield _gauge(
            "edged_requests_waiting_to_cool",
            "Those of them that wait because the board is hot, and for nothing else.",
            {(_MODEL,): {(name,): float(count) for name, count in held.items()}},
        )
        for name, field, text in _GAUGES:
            yield _gauge(name, text, {(_MODEL,): _by_model(reports, field)})
        for name, field, text in _COUNTERS:
            yield _counter(name, text, {(_MODEL,): _by_model(reports, field)})
        times: dict[tuple[str, ...], float] = {}
        counts: dict[tuple[str, ...], float] = {}
        for report in reports:
            for bucket in report.step_times:
                key = (report.name, str(bucket.tokens))
                counts[key], times[key] = bucket.count, bucket.seconds
        labels = (_MODEL, "bucket")
        yield _counter(
            "edged_bucket_steps", "Steps by the most tokens that a step of the bucket has.", {labels: counts}
        )
        yield _counter("edged_bucket_step_seconds", "Time of those steps.", {labels: times})

    def _hardware(self) -> Iterator[Metric]:
        if self._admission is not None:
            yield _gauge(
                "edged_admission_capped",
                "1 while fewer requests run at once because the board is hot.",
                {(): {(): float(self._admission.capped)}},
            )
        board = self._board()
        if board is None:
            return
        yield _gauge(
            "edged_board_info",
            "The board, its L4T release and its power mode.",
            {("model", "l4t", "power_mode"): {(board.model, board.l4t, board.power_mode): 1}},
        )
        celsius: dict[tuple[str, ...], float] = {(name,): value for name, value in board.temperatures.items()}
        yield _gauge("edged_board_temperature_celsius", "Temperature of each zone.", {("zone",): celsius})
        if board.thermal_margin is not None:
            yield _gauge(
                "edged_board_thermal_margin_celsius",
                "Degrees that the hottest zone is below its throttling point.",
                {(): {(): board.thermal_margin}},
            )
        watts: dict[tuple[str, ...], float] = {(name,): value for name, value in board.rails.items()}
        yield _gauge("edged_board_power_watts", "Power of each rail.", {("rail",): watts})
        events: dict[tuple[str, ...], float] = {
            (name,): value for name, value in board.throttle_events.items()
        }
        yield _counter("edged_board_throttle_events", "Over-current events since boot.", {("cause",): events})
        clocks: dict[tuple[str, ...], float] = {(name,): value for name, value in board.clocks.items()}
        yield _gauge("edged_board_clock_hertz", "Clocks now.", {("clock",): clocks})


_Values = "dict[tuple[str, ...], dict[tuple[str, ...], float]]"


def _by_model(reports: list[ModelReport], field: str) -> dict[tuple[str, ...], float]:
    return {(report.name,): float(getattr(report, field)) for report in reports}


def _gauge(name: str, text: str, content: dict[tuple[str, ...], dict[tuple[str, ...], float]]) -> Metric:
    return _fill(GaugeMetricFamily, name, text, content)


def _counter(name: str, text: str, content: dict[tuple[str, ...], dict[tuple[str, ...], float]]) -> Metric:
    return _fill(CounterMetricFamily, name, text, content)


def _fill(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    content: dict[tuple[str, ...], dict[tuple[str, ...], float]],
) -> Metric:
    ((labels, values),) = content.items()
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family
