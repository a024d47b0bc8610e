"""``edgectl load``: load a model of the configuration into the running daemon."""

from typing import Annotated

import typer

from edged.cli.connection import connect
from edged.cli.options import AddressOption, duration
from edged.cli.terminal import show


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model, as the configuration names it.")],
    *,
    address: AddressOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            parser=duration,
            help="Wait no longer than this, such as 30s; a load that has begun goes on.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Load a model and wait until it serves.

    Where an evictable model does not fit beside the others, idle evictable ones are unloaded for it, the least recently
    used first. edgectl status shows what is loaded.
    """
    with connect(address) as client:
        result = client.load_model(name, timeout=timeout)
    gone = f"; unloaded for it: {', '.join(result.unloaded)}" if result.unloaded else ""
    show(f"{name} serves after {result.seconds:.1f} s{gone}")
