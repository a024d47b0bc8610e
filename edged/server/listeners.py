"""Where the daemon listens, and who may do what there: unix sockets, and TCP, on loopback or with TLS.

gRPC lets several processes share one TCP port, so that a second daemon would silently take a part of the first one's
clients. A test bind refuses that with the reason.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.config import SCOPES
from edged.config_rules import is_loopback
from edged.errors import ListenError
from edged.server.certificates import Certificates
from edged.server.tokens import TokenFile
from edged.server.unix_listener import UnixListener

if TYPE_CHECKING:
    import grpc

    from edged.config import ListenConfig


class TcpListener:
    """HOST:PORT; the configuration's rules refuse hosts beyond loopback without TLS and authentication.

    Args:
        tcp: The value of ``listen.tcp``; port 0 takes a free one.
        certificates: For TLS; None listens in clear text.
    """

    def __init__(self, tcp: str, certificates: Certificates | None = None) -> None:
        host, _, port = tcp.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self._certificates = certificates

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
            if self._certificates is None:
                self.port = server.add_insecure_port(self.address)
            else:
                self.port = server.add_secure_port(self.address, self._certificates.credentials())
        except RuntimeError as error:
            raise self._refused(str(error)) from error

    def _refused(self, reason: str) -> ListenError:
        return ListenError(
            f"listen.tcp: {self.address} cannot be bound: {reason}; stop what uses it or choose another port",
            field="listen.tcp",
        )


@dataclass(frozen=True)
class Place:
    """One place to listen at, and who may do what there.

    Attributes:
        listener: Binds it.
        scopes: What callers may do.
        tokens: Known tokens; None where none is asked for.
    """

    listener: UnixListener | TcpListener
    scopes: tuple[str, ...]
    tokens: TokenFile | None = None


class Listeners:
    """All places that a configuration names.

    Args:
        config: The configuration's ``listen``.
    """

    def __init__(self, config: ListenConfig) -> None:
        self.unix = UnixListener(config.unix)
        """The first socket, which edgectl looks for."""
        self.tokens = TokenFile(config.tokens) if config.tcp and config.tokens else None
        self.certificates = Certificates(config.tls) if config.tcp and config.tls.certificate else None
        self.tcp = TcpListener(config.tcp, self.certificates) if config.tcp else None
        self._sockets = [
            UnixListener(
                socket.path,
                owner=socket.owner,
                group=socket.group,
                mode=int(socket.mode, 8),
                field=f"listen.sockets[{index}].path",
            )
            for index, socket in enumerate(config.sockets)
        ]
        self.places = [
            Place(self.unix, SCOPES),
            *(Place(ours, each.scopes) for ours, each in zip(self._sockets, config.sockets, strict=True)),
        ]
        """Every place, each to get a server of its own."""
        if self.tcp:
            open_to_all = is_loopback(self.tcp.host) or self.tokens is not None
            scopes = config.tcp_scopes or (SCOPES if open_to_all else ("infer", "status"))
            self.places.append(Place(self.tcp, scopes, self.tokens))

    @property
    def addresses(self) -> tuple[str, ...]:
        """What clients connect to."""
        return tuple(place.listener.address for place in self.places)

    def check(self) -> None:
        """Refuse what can never work, claiming nothing.

        Raises:
            ListenError: A path, a certificate or a token file is at fault.
        """
        for unix in (self.unix, *self._sockets):
            unix.check()
        self._check_credentials()

    def look(self) -> str:
        """Read the tokens again now, if their file has changed; what is wrong with it, or nothing."""
        if self.tokens is None:
            return ""
        self.tokens.look()
        return self.tokens.fault

    def claim(self) -> None:
        """Refuse what cannot work before anything is loaded, and hold the sockets' paths.

        Raises:
            ListenError: A place is in use, missing, forbidden or too long; a certificate or a token file is at fault.
        """
        self._check_credentials()
        try:
            for unix in (self.unix, *self._sockets):
                unix.claim()
            if self.tcp:
                self.tcp.check()
        except ListenError:
            self.close()
            raise

    def _check_credentials(self) -> None:
        if self.certificates is not None:
            self.certificates.check()
        if self.tokens is not None:
            self.tokens.check()

    def close(self) -> None:
        """Remove the sockets and give up their paths."""
        for unix in (self.unix, *self._sockets):
            unix.close()
