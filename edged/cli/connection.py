"""How commands reach the daemon, and how they wait for it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import typer

from edged.cli.options import checked_address
from edged.client import Client
from edged.errors import DeadlineError, EdgedError, InvalidArgumentError, UnavailableError
from edged.v1 import control_pb2

if TYPE_CHECKING:
    from edged.client.address import Address

_POLL_SECONDS = 0.1


def connect(address: str | None) -> Client:
    """A client of the daemon at ``address``; the default one for None.

    Raises:
        typer.BadParameter: The address is malformed.
    """
    if address is not None:
        checked_address(address)
    try:
        return Client(address)
    except InvalidArgumentError as error:
        if error.field != "address":
            raise
        raise typer.BadParameter(error.message, param_hint="'--address'") from None


def state_name(state: int) -> str:
    """``serving`` of ``STATE_SERVING``; ``unknown`` of a state that this edgectl does not know."""
    try:
        return control_pb2.State.Name(state).removeprefix("STATE_").lower()
    except ValueError:
        return "unknown"


def describe(status: control_pb2.GetStatusResponse) -> str:
    """One line on the daemon's state: what it loads and how far it is, or why it failed."""
    parts = [state_name(status.state)]
    parts += [
        f"{model.name}: {model.loading} {model.loading_fraction:.0%}"
        for model in status.models
        if model.loading
    ]
    if status.last_error and status.state != control_pb2.STATE_SERVING:
        parts.append(status.last_error)
    return "; ".join(parts)


def wait_until_serving(client: Client, seconds: float | None) -> None:
    """Wait until the daemon serves; at once back when ``seconds`` is None. A terminal is told what happens.

    Raises:
        DeadlineError: It does not serve after that time.
        UnavailableError: It will not serve: the engine cannot be started, or the daemon drains.
    """
    if seconds is None:
        return
    end = time.monotonic() + seconds
    live = _LiveLine(client.address)
    try:
        while True:
            state = "no answer"
            try:
                status = client.status(timeout=max(0.5, min(5.0, end - time.monotonic())))
            except EdgedError as error:
                state = error.message
            else:
                if status.state == control_pb2.STATE_SERVING:
                    return
                state = describe(status)
                if status.state == control_pb2.STATE_FAILED:
                    raise UnavailableError(f"edged at {client.address} cannot serve: {state}")
            if time.monotonic() >= end:
                raise DeadlineError(f"edged at {client.address} does not serve after {seconds:g} s: {state}")
            live.show(state)
            time.sleep(_POLL_SECONDS)
    finally:
        live.clear()


class _LiveLine:
    """One line on a terminal that is written over; nothing elsewhere."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._active = sys.stderr.isatty()
        self._shown = ""

    def show(self, state: str) -> None:
        line = f"waiting for edged at {self._address}: {state}"[:100]
        if self._active and line != self._shown:
            self._shown = line
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
