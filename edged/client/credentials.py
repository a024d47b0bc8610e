"""How a client proves who it is and knows the daemon: TLS and a token."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.client.address import Address

TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True)
class Credentials:
    """What a client shows and demands. Without any of it, a connection is in clear text and carries no token.

    Attributes:
        tls: Use TLS also without the files below, with the authorities that come with gRPC.
        ca: Authorities (PEM) of which the daemon must show a certificate.
        certificate: The client's own certificate chain (PEM), for mTLS.
        key: Its private key (PEM).
        server_name: Name to be found in the daemon's certificate, where it is not the address's.
        token: A bearer token.
        token_file: File of one, read at each call so that it can be exchanged.
    """

    tls: bool = False
    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str = ""
    token: str = ""
    token_file: str | Path | None = None

    @classmethod
    def from_environment(cls) -> Credentials:
        """Those that the environment names.

        ``EDGED_TLS`` (1), ``EDGED_TLS_CA``, ``EDGED_TLS_CERTIFICATE``, ``EDGED_TLS_KEY``, ``EDGED_TLS_SERVER_NAME``,
        ``EDGED_TOKEN_FILE``.
        """

        def path(name: str) -> Path | None:
            value = os.environ.get(name)
            return Path(value) if value else None

        return cls(
            tls=os.environ.get("EDGED_TLS", "").lower() in TRUE,
            ca=path("EDGED_TLS_CA"),
            certificate=path("EDGED_TLS_CERTIFICATE"),
            key=path("EDGED_TLS_KEY"),
            server_name=os.environ.get("EDGED_TLS_SERVER_NAME", ""),
            token_file=path("EDGED_TOKEN_FILE"),
        )

    def uses_tls(self, address: Address) -> bool:
        """Whether the connection to ``address`` is encrypted; a unix socket's never is."""
        return address.path is None and (self.tls or self.ca is not None or self.certificate is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For gRPC.

        Raises:
            InvalidArgumentError: A file cannot be read, or one of certificate and key is missing.
        """
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError(
                "a client's certificate and its key go together: --tls-certificate and --tls-key", field="key"
            )
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca, "ca"),
            private_key=_read(self.key, "key"),
            certificate_chain=_read(self.certificate, "certificate"),
        )

    def options(self) -> tuple[tuple[str, str], ...]:
        """Channel options."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()

    def check_token(self, address: Address) -> None:
        """Refuse to send a token through the network in clear text.

        Raises:
            InvalidArgumentError: It would be.
        """
        if self.has_token and not self.uses_tls(address) and not address.is_local:
            raise InvalidArgumentError(
                f"the token would go to {address} in clear text: use TLS (--tls-ca FILE, or --tls)",
                field="token",
            )

    @property
    def has_token(self) -> bool:
        """Whether calls carry a token."""
        return bool(self.token) or self.token_file is not None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers of a call.

        Raises:
            InvalidArgumentError: The token file cannot be read, or holds no token or more than one.
        """
        token = self.token or (_read(self.token_file, "token_file") or b"").decode("utf-8", "replace").strip()
        if not token or not token.isprintable() or not token.isascii() or " " in token:
            raise InvalidArgumentError(
                f"{self.token_file or 'the token'} is to hold one token and nothing else", field="token_file"
            )
        return (("authorization", f"Bearer {token}"),)


def _read(path: str | Path | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}", field=field) from error


class TokenChannel:
    """A channel whose calls carry a token. It has what the generated stubs ask of one.

    Args:
        channel: GRPC's channel, for threads or for asyncio.
        metadata: Makes the headers of a call.
    """

    def __init__(self, channel: Any, metadata: Callable[[], tuple[tuple[str, str], ...]]) -> None:  # noqa: ANN401
        self._channel = channel
        self._metadata = metadata
        self.close = channel.close

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - gRPC's multi-callable
        """GRPC: a method with one answer."""
        return self._with_token(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """GRPC: a method with a stream of answers."""
        return self._with_token(self._channel.unary_stream(*arguments, **options))

    def _with_token(self, call: Any) -> Any:  # noqa: ANN401
        return lambda request, **options: call(request, metadata=self._metadata(), **options)
