"""``edgectl status --watch``: the status again and again, on a screen of its own where there is a terminal."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live

from edged.cli.exit_codes import ExitCode
from edged.cli.message_json import as_object
from edged.cli.status_tables import status_parts
from edged.cli.terminal import console, show
from edged.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.client import Client
    from edged.v1 import control_pb2

_RETRY_SECONDS = 1.0


def watch(client: Client, interval: float, *, as_json: bool) -> int:
    """Show the status until Ctrl-C; a daemon that is gone or not there yet is waited for.

    Args:
        client: Connected to the daemon.
        interval: Seconds between two looks; changes of state are shown at once.
        as_json: One line of JSON for each status, instead of tables.

    Raises:
        EdgedError: The daemon refused the call.
    """
    if as_json:
        return _follow(client, interval, lambda status: _print_json(status, str(client.address)), _print_gone)
    out = console()
    if not out.is_terminal:
        return _follow(
            client,
            interval,
            lambda status: show(*status_parts(status, str(client.address), with_ledger=False), ""),
            lambda why: show(why, ""),
        )
    with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        return _follow(
            client,
            interval,
            lambda status: live.update(Group(*status_parts(status, str(client.address))), refresh=True),
            lambda why: live.update(f"{why}\nwaiting for it; Ctrl-C ends this", refresh=True),
        )


def _follow(
    client: Client,
    interval: float,
    on_status: Callable[[control_pb2.GetStatusResponse], None],
    on_gone: Callable[[str], None],
) -> int:
    try:
        while True:
            try:
                with closing(client.watch_status(interval)) as statuses:
                    for status in statuses:
                        on_status(status)
            except UnavailableError as error:
                on_gone(error.message)
            time.sleep(_RETRY_SECONDS)
    except KeyboardInterrupt:
        return ExitCode.DONE


def _print_json(status: control_pb2.GetStatusResponse, address: str) -> None:
    sys.stdout.write(json.dumps({**as_object(status), "address": address}, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _print_gone(why: str) -> None:
    sys.stdout.write(json.dumps({"state": "unreachable", "error": why}, ensure_ascii=False) + "\n")
    sys.stdout.flush()
