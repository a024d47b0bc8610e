"""``edgectl token``: makes a bearer token and the line of the daemon's token file that lets it in."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.exit_codes import ExitCode
from edged.config import SCOPES
from edged.server.tokens import make_token, token_line
from edged.whole_file import write_whole


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Who is to use it: letters, digits and . _ @ -", show_default=False
        ),
    ],
    *,
    scopes: Annotated[
        str,
        typer.Option("--scopes", metavar="LIST", help=f"What it allows, of {', '.join(SCOPES)}."),
    ] = "infer,status",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the token there (mode 0600), for --token-file; on standard error otherwise.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Make a token: its line for listen.tokens on standard output, the token itself in a file or on standard error.

    As in: edgectl token robot -o robot.token >> /etc/edged/tokens
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", name):
        raise typer.BadParameter(f"{name!r} has other characters, or too many", param_hint="'NAME'")
    wanted = tuple(scope.strip() for scope in scopes.split(","))
    for scope in wanted:
        if scope not in SCOPES:
            raise typer.BadParameter(f"{scope!r} is not one of {', '.join(SCOPES)}", param_hint="'--scopes'")
    token = make_token()
    if output is None:
        sys.stderr.write(f"the token, which is kept nowhere: {token}\n")
    else:
        write_whole(output.expanduser(), token + "\n", 0o600)
    sys.stdout.write(token_line(name, wanted, token) + "\n")
    return ExitCode.DONE
