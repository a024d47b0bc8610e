"""A status as lines and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from edged.cli.board_lines import board_lines
from edged.cli.ledger_table import ledger_table
from edged.cli.terminal import visible
from edged.client.readiness import describe_state, state_name

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edged.v1 import control_pb2

_STYLES = {
    "serving": "bold green",
    "loading": "yellow",
    "draining": "yellow",
    "restarting": "bold red",
    "failed": "bold red",
}


def status_parts(
    status: control_pb2.GetStatusResponse, address: str, *, with_ledger: bool = True
) -> list[RenderableType]:
    """What ``edgectl status`` shows, from top to bottom.

    Args:
        status: The daemon's answer.
        address: Where it was asked.
        with_ledger: Also the static budget.
    """
    state = state_name(status.state)
    engine = f"engine {status.engine_pid}" if status.engine_pid else "no engine"
    restarts = f", {status.engine_restarts} engine restarts" if status.engine_restarts else ""
    failed = f", {status.requests_failed} failed" if status.requests_failed else ""
    parts: list[RenderableType] = [
        Text.assemble(
            f"edged {status.version}  ",
            (visible(describe_state(status)), _STYLES.get(state, "")),
            f"  up {_span(status.uptime_seconds)}",
        ),
        f"address    {', '.join(status.addresses) or address}",
        f"processes  daemon {status.daemon_pid}, {engine}{restarts}",
        f"requests   {status.requests_finished} finished{failed}",
    ]
    if status.metrics_address:
        parts.append(f"metrics    {status.metrics_address}")
    if status.HasField("board"):
        parts += board_lines(status.board)
        parts += [Text(visible(fault), style="yellow") for fault in status.board.faults]
    parts += [Text(visible(notice), style="yellow") for notice in status.notices]
    if status.last_error and state == "serving":
        parts.append(Text(f"last engine error: {visible(status.last_error)}", style="yellow"))
    if status.models:
        parts += ["", _models_table(status)]
    busy = [model for model in status.models if model.time_to_first_token.count]
    if busy:
        parts += ["", _speeds_table(busy)]
    if with_ledger and status.ledger.rows:
        ledger = status.ledger
        parts += ["", ledger_table(ledger.rows, total=ledger.total_bytes, budget=ledger.budget_bytes)]
    return parts


def _models_table(status: control_pb2.GetStatusResponse) -> Table:
    table = _table(
        ("model", "state", "executor", "device", "dtype"),
        ("context", "sequences", "pages free", "running", "waiting", "prompt tok", "answer tok"),
    )
    for model in status.models:
        state = state_name(model.state)
        waiting = f"{model.waiting}/{model.queue_capacity}" if model.queue_capacity else str(model.waiting)
        table.add_row(
            model.name,
            Text(state, style=_STYLES.get(state, "")),
            model.executor,
            model.device,
            model.dtype,
            str(model.context_length),
            str(model.max_sequences),
            f"{model.pages_free}/{model.pages}",
            str(model.running),
            f"{waiting}, {model.waiting_to_cool} for heat" if model.waiting_to_cool else waiting,
            str(model.prompt_tokens),
            str(model.generated_tokens),
        )
    return table


def _speeds_table(models: list[control_pb2.ModelStatus]) -> Table:
    """What requests see and what the cache saves.

    TTFT: time to first token; TPOT: mean time of a token after it, in one answer; ITL: between two messages, each with
    the tokens of a step.
    """
    table = _table(("",), tuple(model.name for model in models))
    for name, show_one in (
        ("prompt tok/s", lambda model: f"{model.prompt_tokens_per_second:.1f}"),
        ("answer tok/s", lambda model: f"{model.generated_tokens_per_second:.1f}"),
        ("TTFT p50/p90/p99", lambda model: _times(model.time_to_first_token)),
        ("TPOT p50/p90/p99", lambda model: _times(model.time_per_output_token)),
        ("ITL p50/p90/p99", lambda model: _times(model.inter_token_latency)),
        ("queue p50/p90/p99", lambda model: _times(model.queue_time)),
        ("cached prompt tok", _cache_hits),
        ("pages cached", lambda model: str(model.pages_cached)),
        ("sessions", lambda model: f"{model.sessions} with {model.pages_pinned} pages"),
        ("suspended", _suspended),
        ("drafts accepted", _drafts),
    ):
        table.add_row(name, *(show_one(model) for model in models))
    return table


def _cache_hits(model: control_pb2.ModelStatus) -> str:
    seen = model.prompt_tokens + model.cached_tokens
    return f"{model.cached_tokens} ({model.cached_tokens / seen:.0%})" if seen else "0"


def _suspended(model: control_pb2.ModelStatus) -> str:
    if not model.host_pages:
        return "off"
    return f"{model.suspended} ({model.suspensions} so far)"


def _drafts(model: control_pb2.ModelStatus) -> str:
    if model.speculation in ("", "off"):
        return "off"
    share = f" ({model.accepted_tokens / model.drafted_tokens:.0%})" if model.drafted_tokens else ""
    return f"{model.accepted_tokens} of {model.drafted_tokens}{share}"


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _times(measured: control_pb2.Percentiles) -> str:
    """``12/15/40 ms``, or seconds where they are long."""
    values = (measured.p50, measured.p90, measured.p99)
    if not any(values):
        return "-"
    if values[0] < 1.0:
        return (
            "/".join(f"{value * 1e3:.3g}" if value < 1 else f"{value * 1e3:.0f}" for value in values) + " ms"
        )
    return "/".join(f"{value:.3g}" for value in values) + " s"


def _span(seconds: float) -> str:
    """``3 d 4 h``, ``5 min 6 s``, ``7 s``: the two largest units."""
    whole = int(seconds)
    parts = [
        (whole // 86400, "d"),
        (whole // 3600 % 24, "h"),
        (whole // 60 % 60, "min"),
        (whole % 60, "s"),
    ]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in parts[:2])
