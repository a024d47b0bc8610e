"""``edgectl sessions``: conversations whose pages the daemon keeps."""

import json
import sys
from typing import Annotated

import typer
from rich.table import Table

from edged.cli.connection import connect
from edged.cli.exit_codes import ExitCode
from edged.cli.message_json import as_object
from edged.cli.options import AddressOption, ModelOption
from edged.cli.terminal import show, visible

_ACTIONS = ("list", "drop")


def command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="list or drop.")] = "list",
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="drop: the session's name.", show_default=False)
    ] = None,
    *,
    address: AddressOption = None,
    model: ModelOption = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="list: print one JSON object.", show_default=False)
    ] = False,
) -> int:
    """List the sessions that keep pages, or let the pages of one go.

    A request names its session with --session; the next request of that name that begins with what was said before
    computes only what is new.
    """
    if action not in _ACTIONS:
        raise typer.BadParameter(f"{action!r} is not one of {', '.join(_ACTIONS)}", param_hint="'ACTION'")
    if (action == "drop") != (name is not None):
        missing = "drop needs the name of a session" if action == "drop" else "goes with drop"
        raise typer.BadParameter(missing, param_hint="'NAME'")
    with connect(address) as client:
        if name is not None:
            client.drop_session(name, model)
            return ExitCode.DONE
        sessions = client.sessions(model)
    if as_json:
        sys.stdout.write(json.dumps({"sessions": [as_object(each) for each in sessions]}, indent=2) + "\n")
        return ExitCode.DONE
    if not sessions:
        show("no sessions")
        return ExitCode.DONE
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("session")
    table.add_column("model")
    for heading in ("pages", "requests", "quiet for"):
        table.add_column(heading, justify="right")
    for each in sessions:
        table.add_row(
            visible(each.name), each.model, str(each.pages), str(each.requests), f"{each.idle_seconds:.0f} s"
        )
    show(table)
    return ExitCode.DONE
