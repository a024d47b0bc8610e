"""Where the daemon listens: a unix socket, and TCP on loopback.

gRPC lets several processes share one TCP port, so that a second daemon would silently take a part of the first one's
clients. A test bind refuses that with the reason.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from edged.errors import ListenError
from edged.server.unix_listener import UnixListener

if TYPE_CHECKING:
    import grpc

    from edged.config import ListenConfig


class TcpListener:
    """HOST:PORT on loopback; the configuration's rules refuse every other host.

    Args:
        tcp: The value of ``listen.tcp``; port 0 takes a free one.
    """

    def __init__(self, tcp: str) -> None:
        host, _, port = tcp.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)

    @property
    def address(self) -> str:
        """What a client connects to; after ``bind`` with the port that was taken."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def check(self) -> None:
        """Refuse a port that is taken or forbidden.

        Raises:
            ListenError: It is.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ListenError(
                f"listen.tcp: {self.host} is no address of this machine ({error}); write 127.0.0.1:{self.port}",
                field="listen.tcp",
            ) from error
        for family, kind, protocol, _name, place in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                try:
                    probe.bind(place)
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                        continue  # localhost names ::1 also where IPv6 is off
                    raise self._refused(os.strerror(error.errno or 0).lower()) from error

    def bind(self, server: grpc.aio.Server) -> None:
        """Add the port to ``server``.

        Raises:
            ListenError: It cannot be bound.
        """
        self.check()
        try:
            self.port = server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise self._refused(str(error)) from error

    def _refused(self, reason: str) -> ListenError:
        return ListenError(
            f"listen.tcp: {self.address} cannot be bound: {reason}; stop what uses it or choose another port",
            field="listen.tcp",
        )


class Listeners:
    """All places that a configuration names."""

    def __init__(self, config: ListenConfig) -> None:
        self.unix = UnixListener(config.unix)
        self.tcp = TcpListener(config.tcp) if config.tcp else None

    @property
    def addresses(self) -> tuple[str, ...]:
        """What clients connect to."""
        return (self.unix.address, self.tcp.address) if self.tcp else (self.unix.address,)

    def claim(self) -> None:
        """Refuse what cannot work before anything is loaded, and hold the socket's path.

        Raises:
            ListenError: A place is in use, missing, forbidden or too long.
        """
        self.unix.claim()
        if self.tcp:
            try:
                self.tcp.check()
            except ListenError:
                self.unix.close()
                raise

    def bind(self, server: grpc.aio.Server) -> None:
        """Add every place to ``server``.

        Raises:
            ListenError: One cannot be bound.
        """
        self.unix.bind(server)
        if self.tcp:
            self.tcp.bind(server)

    def close(self) -> None:
        """Remove the socket and give up its path."""
        self.unix.close()
