"""The configuration's part on where the daemon listens, and who may do what there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from edged.config_keys import key as _key

DEFAULT_SOCKET = Path("/run/edged/edged.sock")
UNIX_PATH_LIMIT = 107
"""Bytes that fit in ``sockaddr_un.sun_path`` with its closing zero (Linux)."""


SCOPES = ("infer", "control", "status")
"""What a caller may do: generate and tokenize; load, unload, drain; read the state."""


def default_socket() -> Path:
    """The unix socket that daemon and edgectl share when none is named.

    ``/run/edged/edged.sock`` where that folder is writable, else ``$XDG_RUNTIME_DIR/edged.sock``, else
    ``/tmp/edged-<uid>/edged.sock``.
    """
    if os.access(DEFAULT_SOCKET.parent, os.W_OK):
        return DEFAULT_SOCKET
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "edged.sock"
    return Path(f"/tmp/edged-{os.getuid()}/edged.sock")  # noqa: S108 - a folder of mode 0700 that the daemon makes


@dataclass(frozen=True)
class SocketConfig:
    """One more unix socket; the file system decides who may open it."""

    path: Path = field(metadata=_key(f"Its path, at most {UNIX_PATH_LIMIT} bytes"))
    owner: str = field(
        default="",
        metadata=_key("User that owns it, by name or number", default="the daemon's user"),
    )
    group: str = field(
        default="",
        metadata=_key(
            "Group that owns it, by name or number; the daemon must be a member of it",
            default="the daemon's group",
        ),
    )
    mode: str = field(
        default="0660",
        metadata=_key('Rights on it, as octal digits in quotes: "0660"', pattern="0?[0-7]{3}"),
    )
    scopes: tuple[str, ...] = field(
        default=SCOPES,
        metadata=_key("What its callers may do, a list", choices=SCOPES, low=1, high=3, default="all of it"),
    )


@dataclass(frozen=True)
class TlsConfig:
    """TLS of ``listen.tcp``. The files are read again when they change; a pair that does not fit is not taken."""

    certificate: Path | None = field(
        default=None, metadata=_key("Certificate chain (PEM), the daemon's own first", default="no TLS")
    )
    key: Path | None = field(
        default=None, metadata=_key("Its private key (PEM, not encrypted)", default="none")
    )
    client_ca: Path | None = field(
        default=None,
        metadata=_key(
            "Authorities (PEM) of which clients must show a certificate (mTLS)",
            default="clients show none",
        ),
    )


@dataclass(frozen=True)
class ListenConfig:
    """Where the daemon listens, and who may do what there."""

    unix: Path | None = field(
        default=None,
        metadata=_key(
            f"Unix socket path, at most {UNIX_PATH_LIMIT} bytes",
            default="the socket edgectl looks for: `/run/edged/edged.sock` where that folder is writable, else "
            "`$XDG_RUNTIME_DIR/edged.sock`, else `/tmp/edged-UID/edged.sock`",
        ),
    )
    tcp: str | None = field(
        default=None,
        metadata=_key(
            "HOST:PORT, such as 127.0.0.1:50051; port 0 takes a free one; beyond loopback it needs tls.certificate, and "
            "tokens or tls.client_ca",
            default="no TCP",
        ),
    )
    sockets: tuple[SocketConfig, ...] = field(
        default=(),
        metadata=_key("More unix sockets, each with its own rights", low=0, high=32, default="none"),
    )
    tls: TlsConfig = field(default_factory=TlsConfig, metadata=_key("TLS of tcp"))
    tokens: Path | None = field(
        default=None,
        metadata=_key(
            "File of the bearer tokens that callers over tcp must show (edgectl token makes them); read again when it "
            "changes",
            default="none are asked for",
        ),
    )
    tcp_scopes: tuple[str, ...] = field(
        default=(),
        metadata=_key(
            "What callers over tcp may do, a list; a token's own scopes narrow it",
            choices=SCOPES,
            low=1,
            high=3,
            default="all of it on loopback and with tokens, else infer and status",
        ),
    )
    i_accept_off_host_access_without_tls_and_authentication: bool = field(
        default=False,
        metadata=_key("Lets tcp listen beyond loopback in clear text for everybody"),
    )
