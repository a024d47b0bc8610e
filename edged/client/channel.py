"""How the clients connect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edged.client.credentials import TokenChannel

if TYPE_CHECKING:
    from edged.client.address import Address
    from edged.client.credentials import Credentials

OPTIONS: tuple[tuple[str, int], ...] = (
    # Several tries within the second or two that a daemon takes to start again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # What a connection may take, whatever its name says: with TLS over a slow network, or to a machine that is busy.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A new client asks the daemon, not the memory of an earlier client's failures.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment must not see what stays on this machine.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
)


def open_channel(grpc: Any, address: Address, credentials: Credentials) -> Any:  # noqa: ANN401 - gRPC's channel
    """Connect, in clear text or with TLS, with or without a token.

    Args:
        grpc: ``grpc`` for threads or ``grpc.aio`` for asyncio.
        address: Of the daemon.
        credentials: What the client shows and demands.

    Raises:
        InvalidArgumentError: A file cannot be read, or a token would go through the network in clear text.
    """
    credentials.check_token(address)
    options = (*OPTIONS, *credentials.options())
    if credentials.uses_tls(address):
        channel = grpc.secure_channel(address.target, credentials.channel_credentials(), options)
    else:
        channel = grpc.insecure_channel(address.target, OPTIONS)
    return TokenChannel(channel, credentials.metadata) if credentials.has_token else channel
