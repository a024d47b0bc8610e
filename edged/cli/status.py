"""``edgectl status``: what the daemon is, does and holds; usable as a health check."""

import json
import sys
from typing import Annotated

import typer

from edged.cli.connection import connect, wait_until_serving
from edged.cli.exit_codes import ExitCode
from edged.cli.message_json import as_object
from edged.cli.options import AddressOption, WaitOption, duration
from edged.cli.status_tables import status_parts
from edged.cli.terminal import say_error, show
from edged.client.readiness import TURNED_AWAY
from edged.errors import DeadlineError, EdgedError, UnavailableError, UnreachableError
from edged.v1 import control_pb2


def command(
    *,
    address: AddressOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
    ] = False,
    wait: WaitOption = None,
    watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on showing it until Ctrl-C.", show_default=False)
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="DURATION",
            parser=duration,
            help="With --watch: time between two looks.",
            show_default="1s",
        ),
    ] = 1.0,
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

    The exit status makes it a health check: 0 serving, 1 not serving, 2 unreachable, 3 the daemon refuses this token
    or certificate. With --watch it is a live screen.
    """
    with connect(address) as client:
        if watching:
            from edged.cli.watching import watch  # noqa: PLC0415 - a health check has no use for it

            return watch(client, interval, as_json=as_json)
        try:
            try:
                wait_until_serving(client, wait)
            except (DeadlineError, UnavailableError) as error:
                # What is known after the wait is shown all the same.
                say_error(error.message)
            status = client.status(timeout=timeout)
        except EdgedError as error:
            # Whatever does not answer GetStatus in time is no daemon that can be used; one that turns this caller away
            # may well serve others.
            refused = error.code in TURNED_AWAY
            message = error.message
            if not isinstance(error, UnreachableError):
                message = f"no status from edged at {client.address}: {message}"
            if as_json:
                state = "refused" if refused else "unreachable"
                _print_json({"state": state, "address": str(client.address), "error": message})
            say_error(message)
            return ExitCode.REFUSED if refused else ExitCode.UNREACHABLE
        if as_json:
            _print_json({**as_object(status), "address": str(client.address)})
        else:
            show(*status_parts(status, str(client.address)))
    return ExitCode.DONE if status.state == control_pb2.STATE_SERVING else ExitCode.NO


def _print_json(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
