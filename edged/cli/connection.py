"""How commands reach the daemon, and how they wait for it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TypeVar

import typer

from edged.cli.options import checked_address
from edged.client import Client
from edged.client.readiness import POLL_SECONDS, Readiness
from edged.errors import EdgedError, InvalidArgumentError, UnavailableError
from edged.v1 import control_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.client.address import Address
    from edged.client.attempts import Attempts
    from edged.client.generation import Generation

Taken = TypeVar("Taken")


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


def wait_until_serving(client: Client, seconds: float | None) -> None:
    """Wait until the daemon serves; at once back when ``seconds`` is None. A terminal is told what happens.

    Raises:
        DeadlineError: It does not serve after that time.
        UnavailableError: It will not serve: its engine cannot be started.
        UnauthenticatedError, PermissionDeniedError: It is there and turns this caller away.
    """
    if seconds is None:
        return
    readiness = Readiness(client.address, seconds, time.monotonic())
    live = _LiveLine(client.address)
    try:
        while True:
            left = readiness.left(time.monotonic())
            try:
                # Short tries, so that the line on the terminal keeps up.
                status = client.status(timeout=max(0.5, min(5.0, left)))
            except EdgedError as error:
                readiness.failed(error)
            else:
                if readiness.serves(status):
                    return
                if status.state == control_pb2.STATE_FAILED:
                    raise UnavailableError(f"edged at {client.address} cannot serve: {readiness.state}")
            live.show(readiness.state)
            time.sleep(min(POLL_SECONDS, left))
    finally:
        live.clear()


def take_patiently(
    client: Client,
    start: Callable[[], Generation],
    take: Callable[[Generation], Taken],
    attempts: Attempts,
    wait: float | None,
) -> Taken:
    """What ``take`` makes of a generation; one of which nothing had come when its engine or daemon ended is sent again.

    Args:
        client: Of the daemon.
        start: Sends the request.
        take: Takes every event.
        attempts: Whether and when it may be sent again.
        wait: Seconds to wait before for a daemon that serves.

    Raises:
        EdgedError: The daemon refused or ended the request.
    """
    while True:
        generation = start()
        try:
            return take(generation)
        except UnavailableError as error:
            if generation.delivered:
                raise
            time.sleep(attempts.pause(error))
        wait_until_serving(client, wait)


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
