"""``edgectl unload``: give the memory of a model back."""

from typing import Annotated

import typer

from edged.cli.connection import connect
from edged.cli.options import AddressOption, duration
from edged.cli.terminal import show


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model, as the configuration names it.")],
    *,
    address: AddressOption = None,
    cancel: Annotated[
        bool,
        typer.Option(
            "--cancel", help="End its requests at once instead of waiting for them.", show_default=False
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            parser=duration,
            help="Wait no longer than this, such as 30s; a model that still has requests then serves on.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Refuse new requests for a model, wait for those that run, and give its memory back.

    If the wait is given up (Ctrl-C, --timeout), the model serves on.
    """
    with connect(address) as client:
        client.unload_model(name, cancel_requests=cancel, timeout=timeout)
    show(f"{name} is unloaded")
