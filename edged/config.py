"""The configuration: what may stand in the YAML file, as frozen dataclasses.

Every field's metadata holds its documentation and its limits; :mod:`edged.config_reader` reads a file against them and
refuses what does not fit with the key's path, the value and what is allowed. The README's reference is made from the
same metadata.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_SOCKET = Path("/run/edged/edged.sock")
UNIX_PATH_LIMIT = 107
"""Bytes that fit in ``sockaddr_un.sun_path`` with its closing zero (Linux)."""


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


def _key(
    doc: str,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> dict[str, Any]:
    """Metadata of one key: its documentation, ``size`` or ``duration`` unit, choices, inclusive limits."""
    return {"doc": doc, "unit": unit, "choices": choices, "low": low, "high": high}


@dataclass(frozen=True)
class ListenConfig:
    """Where the daemon listens."""

    unix: Path | None = field(
        default=None, metadata=_key("Unix socket path; the default is the one edgectl looks for")
    )
    tcp: str | None = field(
        default=None, metadata=_key("HOST:PORT on loopback, such as 127.0.0.1:50051; none by default")
    )


@dataclass(frozen=True)
class MemoryConfig:
    """The static budget."""

    budget: int | None = field(
        default=None,
        metadata=_key(
            "Everything the daemon and the engine may hold; the default is 80 % of the memory that is "
            "available at start",
            unit="size",
            low=1,
        ),
    )
    host: int = field(
        default=192 * 2**20,
        metadata=_key(
            "Share of the budget kept for the daemon process and the engine's own libraries",
            unit="size",
            low=1,
        ),
    )


@dataclass(frozen=True)
class AttentionConfig:
    """How a model attends; ``auto`` follows the model's own ``sparse_config``."""

    mode: str = field(default="auto", metadata=_key("Which attention", choices=("auto", "dense", "sparse")))
    dense_below: int = field(
        default=8192, metadata=_key("A query at a position below this attends densely (tokens)", low=0)
    )
    top_k: int = field(default=64, metadata=_key("Blocks of 64 tokens chosen by score", low=1, high=1024))
    window: int = field(default=2048, metadata=_key("Local window in tokens, a multiple of 64", low=64))
    init_blocks: int = field(default=1, metadata=_key("First blocks that are always attended", low=0))
    lse: str = field(
        default="approximate",
        metadata=_key("Softmax statistics of the block scores", choices=("approximate", "exact")),
    )


@dataclass(frozen=True)
class ModelConfig:
    """One model."""

    name: str = field(metadata=_key("Name that requests use"))
    path: Path = field(metadata=_key("Model folder (config.json, safetensors, tokenizer.json)"))
    executor: str = field(
        default="auto", metadata=_key("What runs the steps", choices=("auto", "torch", "tensorrt"))
    )
    device: str = field(default="cpu", metadata=_key("Where it runs", choices=("cpu", "cuda")))
    dtype: str = field(
        default="float32",
        metadata=_key("Type of weights and KV", choices=("float32", "bfloat16", "float16")),
    )
    context_length: int = field(
        default=4096, metadata=_key("Most tokens of prompt and answer together", low=64, high=4_194_304)
    )
    max_sequences: int = field(default=1, metadata=_key("Most requests that share steps", low=1, high=256))
    prefill_chunk: int = field(default=512, metadata=_key("Most prompt tokens in one step", low=1, high=8192))
    threads: int = field(
        default=0, metadata=_key("CPU threads of the step; 0 takes every core", low=0, high=1024)
    )
    attention: AttentionConfig = field(
        default_factory=AttentionConfig, metadata=_key("Dense or block-sparse attention")
    )


@dataclass(frozen=True)
class QueueConfig:
    """How requests wait."""

    capacity: int = field(
        default=64, metadata=_key("Most requests that wait; one more is refused", low=0, high=65536)
    )
    stream_buffer: int = field(
        default=256,
        metadata=_key(
            "Messages kept for a client that reads slowly; its stream ends when they are full", low=8
        ),
    )


@dataclass(frozen=True)
class LimitsConfig:
    """What one request may carry."""

    message_size: int = field(
        default=8 * 2**20, metadata=_key("Largest request message", unit="size", low=1024, high=2**30)
    )
    stop_strings: int = field(default=16, metadata=_key("Most stop strings of a request", low=0, high=1024))
    stop_bytes: int = field(
        default=1024, metadata=_key("Longest stop string, in UTF-8 bytes", unit="size", low=1, high=65536)
    )
    stop_token_ids: int = field(
        default=64, metadata=_key("Most stop token ids of a request", low=0, high=4096)
    )
    concurrent_streams: int = field(
        default=128, metadata=_key("Most calls open at once on one connection", low=1, high=65536)
    )


@dataclass(frozen=True)
class LogConfig:
    """What is logged and how."""

    level: str = field(
        default="info", metadata=_key("Least important level", choices=("debug", "info", "warning", "error"))
    )
    format: str = field(
        default="auto",
        metadata=_key(
            "JSON lines or coloured text; auto: text on a terminal, JSON elsewhere",
            choices=("auto", "json", "text"),
        ),
    )


@dataclass(frozen=True)
class Config:
    """The whole file."""

    models: tuple[ModelConfig, ...] = field(metadata=_key("The models to serve; at least one"))
    listen: ListenConfig = field(default_factory=ListenConfig, metadata=_key("Where the daemon listens"))
    memory: MemoryConfig = field(default_factory=MemoryConfig, metadata=_key("The static budget"))
    queue: QueueConfig = field(default_factory=QueueConfig, metadata=_key("How requests wait"))
    limits: LimitsConfig = field(default_factory=LimitsConfig, metadata=_key("What one request may carry"))
    log: LogConfig = field(default_factory=LogConfig, metadata=_key("What is logged and how"))
    drain_timeout: float = field(
        default=30.0,
        metadata=_key("Time that running requests have to finish after SIGTERM", unit="duration", low=0),
    )
    default_model: str = field(
        default="", metadata=_key("Model of a request that names none; the first one by default")
    )
