"""``edgectl status``: what the daemon is, does and holds; usable as a health check."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from edged.cli.connection import connect, describe, state_name, wait_until_serving
from edged.cli.exit_codes import ExitCode
from edged.cli.ledger_table import ledger_table
from edged.cli.message_json import as_object
from edged.cli.options import AddressOption, WaitOption, duration
from edged.cli.terminal import say_error, show, visible
from edged.errors import DeadlineError, EdgedError, UnavailableError, UnreachableError
from edged.v1 import control_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {
    "serving": "bold green",
    "loading": "yellow",
    "draining": "yellow",
    "restarting": "bold red",
    "failed": "bold red",
}


def command(
    *,
    address: AddressOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
    ] = False,
    wait: WaitOption = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            parser=duration,
            help="Call a daemon that does not answer for this long unreachable.",
            show_default="5s",
        ),
    ] = 5.0,
) -> int:
    """Show the state of the daemon, its models and its memory.

    The exit status makes it a health check: 0 serving, 1 not serving, 2 unreachable.
    """
    with connect(address) as client:
        try:
            try:
                wait_until_serving(client, wait)
            except (DeadlineError, UnavailableError) as error:
                # What is known after the wait is shown all the same.
                say_error(error.message)
            status = client.status(timeout=timeout)
        except EdgedError as error:
            # Whatever does not answer GetStatus in time is no daemon that can be used.
            message = error.message
            if not isinstance(error, UnreachableError):
                message = f"no status from edged at {client.address}: {message}"
            if as_json:
                _print_json({"state": "unreachable", "address": str(client.address), "error": message})
            say_error(message)
            return ExitCode.UNREACHABLE
        if as_json:
            _print_json({**as_object(status), "address": str(client.address)})
        else:
            _print_tables(status, str(client.address))
    return ExitCode.DONE if status.state == control_pb2.STATE_SERVING else ExitCode.NO


def _print_json(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def _print_tables(status: control_pb2.GetStatusResponse, address: str) -> None:
    state = state_name(status.state)
    engine = f"engine {status.engine_pid}" if status.engine_pid else "no engine"
    restarts = f", {status.engine_restarts} engine restarts" if status.engine_restarts else ""
    failed = f", {status.requests_failed} failed" if status.requests_failed else ""
    parts: list[RenderableType] = [
        Text.assemble(
            f"edged {status.version}  ",
            (visible(describe(status)), _STYLES.get(state, "")),
            f"  up {_span(status.uptime_seconds)}",
        ),
        f"address    {', '.join(status.addresses) or address}",
        f"processes  daemon {status.daemon_pid}, {engine}{restarts}",
        f"requests   {status.requests_finished} finished{failed}",
    ]
    if status.last_error and state == "serving":
        parts.append(Text(f"last engine error: {visible(status.last_error)}", style="yellow"))
    if status.models:
        parts += ["", _models_table(status)]
    if status.ledger.rows:
        ledger = status.ledger
        parts += ["", ledger_table(ledger.rows, total=ledger.total_bytes, budget=ledger.budget_bytes)]
    show(*parts)


def _models_table(status: control_pb2.GetStatusResponse) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("model", "state", "executor", "device", "dtype"):
        table.add_column(heading)
    for heading in ("context", "sequences", "pages free", "running", "waiting", "prompt tok", "answer tok"):
        table.add_column(heading, justify="right")
    for model in status.models:
        state = state_name(model.state)
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
            str(model.waiting),
            str(model.prompt_tokens),
            str(model.generated_tokens),
        )
    return table


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
