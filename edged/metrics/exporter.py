"""Serves the metrics over HTTP, on loopback or a unix socket, to Prometheus and to nobody else."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder

from edged.errors import ListenError
from edged.log import get_logger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

FIELD = "metrics.listen"
_HEAD_LIMIT = 16 * 1024
_SECONDS = 5.0
_CONNECTIONS = 16
_BACKLOG = 16
_MODE = 0o660

log = get_logger("metrics")


class Exporter:
    """An HTTP server with one page, ``/metrics``, in the event loop.

    Requests are short, connections few and closed after one answer: a scraper needs no more.

    Args:
        listen: ``HOST:PORT`` or ``unix:PATH``.
        registry: What is served.
    """

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        self._listen = listen
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._path = Path(listen.removeprefix("unix:")) if listen.startswith("unix:") else None
        self._open = 0
        self.address = listen
        """Where it is served; with the port that was taken."""

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenError: The place cannot be bound.
        """
        try:
            if self._path is not None:
                _remove_socket(self._path)
                before = os.umask(0o777 & ~_MODE)
                try:
                    self._server = await asyncio.start_unix_server(
                        self._answer, self._path, limit=_HEAD_LIMIT, backlog=_BACKLOG
                    )
                finally:
                    os.umask(before)
            else:
                host, _, port = self._listen.rpartition(":")
                self._server = await asyncio.start_server(
                    self._answer, host.strip("[]"), int(port), limit=_HEAD_LIMIT, backlog=_BACKLOG
                )
                self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        except OSError as error:
            raise ListenError(
                f"{FIELD}: {self._listen} cannot be bound ({error.strerror or error}); choose another place",
                field=FIELD,
            ) from error

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None
            if self._path is not None:
                with suppress(OSError):
                    self._path.unlink()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        if self._open >= _CONNECTIONS:
            writer.close()
            return
        self._open += 1
        try:
            with suppress(
                asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError
            ):
                await asyncio.wait_for(self._serve(reader, writer), _SECONDS)
        except Exception:
            log.exception("a scrape failed")
        finally:
            self._open -= 1
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, rest = head[0].partition(" ")
        path = rest.split(" ")[0].split("?")[0]
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:])
        }
        if method not in ("GET", "HEAD"):
            await _send(writer, "405 Method Not Allowed", "text/plain", b"only GET\n")
        elif path not in ("/metrics", "/"):
            await _send(writer, "404 Not Found", "text/plain", b"the page is /metrics\n")
        else:
            encode, kind = choose_encoder(headers.get("accept", ""))
            body = encode(self._registry)
            await _send(writer, "200 OK", kind, body if method == "GET" else b"")


def _remove_socket(path: Path) -> None:
    """Remove the socket that a daemon which is gone has left.

    Raises:
        ListenError: Something else lies there.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ListenError(
                f"{FIELD}: {path} exists and is no socket; remove it or choose another path", field=FIELD
            )
        path.unlink()


async def _send(writer: asyncio.StreamWriter, status: str, kind: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode("latin-1") + body)
    await writer.drain()
