"""How the clients connect."""

from __future__ import annotations

OPTIONS: tuple[tuple[str, int], ...] = (
    # Several tries within the second or two that a daemon takes to start again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A new client asks the daemon, not the memory of an earlier client's failures.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment must not see what stays on this machine.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
)
