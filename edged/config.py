"""The configuration: what may stand in the YAML file, as frozen dataclasses.

Every field's metadata holds its documentation and its limits; :mod:`edged.config_reader` reads a file against them and
refuses what does not fit with the key's path, the value and what is allowed. What several keys must hold together
stands in :mod:`edged.config_rules`. The README's reference is made from the same metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edged.config_attention import AttentionConfig, RopeScalingConfig
from edged.config_keys import SIZE_LIMIT
from edged.config_keys import key as _key
from edged.config_listen import (
    DEFAULT_SOCKET,
    SCOPES,
    UNIX_PATH_LIMIT,
    ListenConfig,
    SocketConfig,
    TlsConfig,
    default_socket,
)
from edged.config_model import ModelConfig
from edged.config_operation import (
    LogConfig,
    MetricsConfig,
    ThermalConfig,
    TracesConfig,
    WatchdogConfig,
)
from edged.config_speculation import SpeculationConfig

__all__ = [
    "DEFAULT_SOCKET",
    "SCOPES",
    "UNIX_PATH_LIMIT",
    "AttentionConfig",
    "ListenConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "RopeScalingConfig",
    "SocketConfig",
    "SpeculationConfig",
    "ThermalConfig",
    "TlsConfig",
    "TracesConfig",
    "WatchdogConfig",
    "default_socket",
]

TOKENIZING_BYTES = 512
"""Memory that a tokenizer takes for a byte of text at most (measured with the `tokenizers` library on text of which each
byte is a token: 490; English takes 180)."""
TOKEN_TEXT_BYTES = 8
"""Bytes of text that the default of limits.prompt_size allows for each token of the context (English has about 4)."""
DAEMON_BYTES = 112 * 2**20
"""Memory of a daemon that tokenizes nothing: 75 MiB were measured with one model, the rest is for messages."""
CHECKS = 2
"""Constraints that are checked beside each other."""
CHECK_BYTES = 32 * 2**20
"""Memory that the check of a constraint may take: a usual one takes 5 MiB."""
CHECK_TEXT_BYTES = 64
"""What it may take beside that for each byte of the constraint."""
CHECKER_BYTES = 24 * 2**20
"""Memory of the process that checks are forked from (20 MiB were measured)."""


@dataclass(frozen=True)
class MemoryConfig:
    """The static budget."""

    budget: int | None = field(
        default=None,
        metadata=_key(
            "Everything the daemon and the engine may hold",
            unit="size",
            low=1,
            high=SIZE_LIMIT,
            default="80 % of the memory that is available at start",
        ),
    )
    host: int | None = field(
        default=None,
        metadata=_key(
            "Share of the budget kept for the daemon process",
            default=f"{DAEMON_BYTES >> 20} MiB and {TOKENIZING_BYTES} times limits.prompt_size",
            unit="size",
            low=1,
        ),
    )


@dataclass(frozen=True)
class QueueConfig:
    """How requests wait."""

    capacity: int = field(
        default=64, metadata=_key("Most requests that wait; one more is refused", low=0, high=65536)
    )
    aging: float = field(
        default=10.0,
        metadata=_key(
            "Time of waiting that weighs as much as one step of priority",
            unit="duration",
            low=0.001,
            high=86400,
        ),
    )
    stream_buffer: int = field(
        default=256,
        metadata=_key(
            "Messages kept for a client that reads slowly; its stream ends when they are full",
            low=8,
            high=1_048_576,
        ),
    )


@dataclass(frozen=True)
class LimitsConfig:
    """What one request may carry."""

    message_size: int | None = field(
        default=None,
        metadata=_key(
            "Largest request message",
            default="twice limits.prompt_size, at least 2 MiB",
            unit="size",
            low=1024,
            high=2**30,
        ),
    )
    prompt_size: int | None = field(
        default=None,
        metadata=_key(
            f"Largest text of a prompt, in UTF-8 bytes; tokenizing it takes up to {TOKENIZING_BYTES} times as much for a "
            "moment, out of memory.host",
            default=f"{TOKEN_TEXT_BYTES} bytes for each token of the longest context, at least 64 KiB",
            unit="size",
            low=1024,
            high=2**30,
        ),
    )
    stop_strings: int = field(default=16, metadata=_key("Most stop strings of a request", low=0, high=1024))
    stop_bytes: int = field(
        default=1024, metadata=_key("Longest stop string, in UTF-8 bytes", unit="size", low=1, high=65536)
    )
    stop_token_ids: int = field(
        default=64, metadata=_key("Most stop token ids of a request", low=0, high=4096)
    )
    constraint_size: int = field(
        default=131072,
        metadata=_key(
            "Largest constraint (schema, expression, grammar), in UTF-8 bytes",
            unit="size",
            low=1,
            high=2**20,
            default="`128KiB`",
        ),
    )
    requests_per_client: int = field(
        default=0,
        metadata=_key(
            "Most requests of one client at once, waiting or running; a client is who it proves to be, or else its "
            "connection's address; 0: any number",
            low=0,
            high=65536,
        ),
    )
    concurrent_streams: int = field(
        default=128, metadata=_key("Most calls open at once on one connection", low=1, high=65536)
    )
    connections: int = field(
        default=1024,
        metadata=_key("Most connections open at once at one place of listen", low=1, high=65536),
    )
    header_size: int = field(
        default=16384,
        metadata=_key("Largest headers of one call", unit="size", low=4096, high=2**20),
    )

    def check_memory(self, size: int) -> int:
        """Bytes that the check of a constraint may take.

        Args:
            size: Of its text, in bytes.
        """
        return CHECK_BYTES + CHECK_TEXT_BYTES * min(size, self.constraint_size)


@dataclass(frozen=True)
class Config:
    """The whole file."""

    models: tuple[ModelConfig, ...] = field(metadata=_key("The models to serve", low=1, high=64))
    listen: ListenConfig = field(default_factory=ListenConfig, metadata=_key("Where the daemon listens"))
    memory: MemoryConfig = field(default_factory=MemoryConfig, metadata=_key("The static budget"))
    queue: QueueConfig = field(default_factory=QueueConfig, metadata=_key("How requests wait"))
    limits: LimitsConfig = field(default_factory=LimitsConfig, metadata=_key("What one request may carry"))
    watchdog: WatchdogConfig = field(
        default_factory=WatchdogConfig, metadata=_key("When a hung engine is ended and started again")
    )
    metrics: MetricsConfig = field(default_factory=MetricsConfig, metadata=_key("Prometheus metrics"))
    traces: TracesConfig = field(default_factory=TracesConfig, metadata=_key("OpenTelemetry traces"))
    thermal: ThermalConfig = field(
        default_factory=ThermalConfig, metadata=_key("What a hot Jetson does to admission")
    )
    log: LogConfig = field(default_factory=LogConfig, metadata=_key("What is logged and how"))
    drain_timeout: float = field(
        default=30.0,
        metadata=_key(
            "Time that running requests have to finish after SIGTERM", unit="duration", low=0, high=86400
        ),
    )
    default_model: str = field(
        default="",
        metadata=_key("Name of the model of a request that names none", default="the first of models"),
    )

    @property
    def prompt_size(self) -> int:
        """Bytes that a prompt's text may have."""
        if self.limits.prompt_size is not None:
            return self.limits.prompt_size
        return max([2**16, *(TOKEN_TEXT_BYTES * model.context_length for model in self.models)])

    @property
    def message_size(self) -> int:
        """Bytes that a request message may have."""
        return self.limits.message_size or max(2**21, 2 * self.prompt_size)

    @property
    def step_timeout(self) -> float:
        """Seconds that a step may take."""
        if self.watchdog.step_timeout is not None:
            return self.watchdog.step_timeout
        # A chunk of 512 tokens of an 8B model takes two cores more than a minute.
        return 300.0 if any(model.device == "cpu" for model in self.models) else 30.0

    @property
    def least_host(self) -> int:
        """Bytes that the daemon process takes at most."""
        return DAEMON_BYTES + TOKENIZING_BYTES * self.prompt_size

    @property
    def checks(self) -> int:
        """Bytes that the processes take at most that check constraints."""
        return CHECKER_BYTES + CHECKS * self.limits.check_memory(self.limits.constraint_size)

    @property
    def host(self) -> int:
        """Bytes of the budget that are kept for the daemon process."""
        return self.least_host if self.memory.host is None else self.memory.host
