"""Where the daemon is: the addresses that people write, and what to say when nobody answers there."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import quote

from edged.config import DEFAULT_SOCKET, default_socket
from edged.errors import InvalidArgumentError, UnreachableError

_CONNECT_SECONDS = 2.0
_PORT_DIGITS = 5


def default_address() -> str:
    """``EDGED_ADDRESS``, else the default unix socket: the one that exists, else where a daemon of this user puts it.

    The daemon takes the first folder that *it* may write to. A client of another user may not write there, so it looks
    for the socket itself.
    """
    named = os.environ.get("EDGED_ADDRESS")
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [DEFAULT_SOCKET, Path(runtime) / "edged.sock"] if runtime else [DEFAULT_SOCKET]
    for candidate in candidates:
        if candidate.is_socket():
            return f"unix:{candidate}"
    return f"unix:{default_socket()}"


class Address:
    """``unix:PATH``, a path (with a slash in it), or ``HOST:PORT``.

    Args:
        text: What the user wrote.

    Raises:
        InvalidArgumentError: It is none of them.
    """

    def __init__(self, text: str) -> None:
        self.path: Path | None = None
        self.host, self.port = "", 0
        scheme, _, rest = text.partition("://")
        if rest and scheme != "unix" and scheme.isalnum():
            speaks = " (edged speaks gRPC, not HTTP)" if scheme.startswith("http") else ""
            raise InvalidArgumentError(
                f"the address {text!r} begins with {scheme}://{speaks}; write HOST:PORT, such as "
                f"{rest.split('/')[0] or '127.0.0.1:50051'}, or unix:PATH",
                field="address",
            )
        path = text.removeprefix("unix:")
        if path and (path != text or "/" in text):
            self.path = Path(path.replace("///", "/", 1)).absolute()
            return
        host, _, port = text.rpartition(":")
        # (int() itself refuses thousands of digits.)
        if not host or not port.isdecimal() or len(port) > _PORT_DIGITS or not 0 < int(port) < 65536:
            raise InvalidArgumentError(
                f"the address {text!r} is neither unix:PATH nor HOST:PORT, such as unix:/run/edged/edged.sock or "
                "127.0.0.1:50051",
                field="address",
            )
        self.host, self.port = host.strip("[]"), int(port)

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether what is sent there stays on this machine."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def target(self) -> str:
        """The name that gRPC resolves; it decodes percent signs in a path."""
        return str(self) if self.path is None else f"unix:{quote(str(self.path))}"

    def unreachable(self) -> UnreachableError | None:
        """Why nobody answers here, found by a plain connection; None when somebody does."""
        try:
            if self.path is None:
                socket.create_connection((self.host, self.port), timeout=_CONNECT_SECONDS).close()
            else:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    probe.settimeout(_CONNECT_SECONDS)
                    probe.connect(str(self.path))
        except FileNotFoundError:
            reason = (
                "there is no such socket; start the daemon with: edged --config FILE, or name its address"
            )
        except PermissionError:
            reason = "this user may not use the socket; join the group that owns it"
        except ConnectionRefusedError:
            reason = "no daemon listens there; start it with: edged --config FILE"
        except OSError as error:
            reason = f"{error.strerror or error}; check the address"
        else:
            return None
        return UnreachableError(f"cannot reach edged at {self}: {reason}", field="address")
