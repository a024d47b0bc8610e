"""Messages to systemd (sd_notify(3)) over its datagram socket; nothing happens where no systemd asked for them."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

_STATUS_LIMIT = 500
_FEEDS = 4
"""Signs of life that are passed on within one watchdog interval; the rest would tell systemd nothing new."""


class Notifier:
    """Tells the service manager how the daemon is.

    Args:
        address: Value of ``NOTIFY_SOCKET``: a path, or an abstract name after ``@``. Empty: every call does nothing.
    """

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._interval = 0.0
        self._fed = 0.0

    @property
    def active(self) -> bool:
        """Whether a service manager listens."""
        return bool(self._address)

    @classmethod
    def from_environment(cls) -> Notifier:
        """The notifier that systemd asked for, and no longer asked for in child processes."""
        os.environ.pop("WATCHDOG_USEC", None)
        os.environ.pop("WATCHDOG_PID", None)
        return cls(os.environ.pop("NOTIFY_SOCKET", ""))

    def expect(self, seconds: float) -> None:
        """From now on a sign of life is due within ``seconds``; systemd ends the daemon when none comes."""
        if self._address and seconds != self._interval:
            self._interval, self._fed = seconds, time.monotonic()
            self._send(f"WATCHDOG_USEC={round(seconds * 1e6)}", "WATCHDOG=1")

    def alive(self) -> None:
        """The engine has made progress; what would come too soon after the last one is left out."""
        now = time.monotonic()
        if self._interval and now - self._fed >= self._interval / (2 * _FEEDS):
            self._fed = now
            self._send("WATCHDOG=1")

    def reloading(self, status: str) -> None:
        """The configuration is being read again; :meth:`ready` ends it (Type=notify-reload asks for the time)."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", _status(status))

    def ready(self, status: str) -> None:
        """Start-up is complete."""
        self._send("READY=1", _status(status))

    def status(self, status: str) -> None:
        """One line for ``systemctl status``."""
        self._send(_status(status))

    def stopping(self, status: str) -> None:
        """The daemon has begun to end."""
        self._send("STOPPING=1", _status(status))

    def extend_timeout(self, seconds: float) -> None:
        """Starting or stopping goes on; wait at least this long for the next word."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        # A manager that is gone is no reason to stop serving.
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
        ):
            channel.settimeout(1.0)
            channel.connect(self._address)
            channel.sendall("\n".join(lines).encode())


class CrashRecord:
    """Remembers a crash loop of the engine from one run of the daemon to the next.

    The first loop ends the daemon with a status that systemd starts again; a second one within the hour ends it with
    one that systemd does not. A count of starts (StartLimitBurst) could not tell a loop from an operator's restarts.

    Args:
        folder: Where the record lies; empty: there is no memory.
    """

    SECONDS = 3600.0

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / "crash-loop" if folder else None

    @classmethod
    def from_environment(cls) -> CrashRecord:
        """The record in systemd's cache directory of the service."""
        return cls(os.environ.get("CACHE_DIRECTORY", "").split(":")[0])

    def note(self) -> bool:
        """Note a crash loop; return whether it is the second one within the hour."""
        if self._path is None:
            return False
        again = False
        with suppress(OSError):
            again = 0 <= time.time() - self._path.stat().st_mtime < self.SECONDS
        with suppress(OSError):
            self._path.write_text("the engine ended in a crash loop\n", "utf-8")
        return again

    def clear(self) -> None:
        """The engine has served for a while: the next loop is the first one."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def _status(text: str) -> str:
    """STATUS line of ``text``, which may have several lines."""
    return f"STATUS={' '.join(text.split())[:_STATUS_LIMIT]}"
