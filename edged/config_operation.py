"""The configuration's part on how the service is run: watchdog, metrics, traces, heat, log."""

from __future__ import annotations

from dataclasses import dataclass, field

from edged.config_keys import key as _key


@dataclass(frozen=True)
class WatchdogConfig:
    """When an engine that lives and does nothing is ended and started again."""

    step_timeout: float | None = field(
        default=None,
        metadata=_key(
            "Longest time that an engine with requests may take for one step; an idle one has this long too, at most "
            "20s, for a sign of life",
            unit="duration",
            low=1,
            high=86400,
            default="`30s`, or `5min` where a model runs on the CPU",
        ),
    )
    stall_timeout: float = field(
        default=10.0,
        metadata=_key(
            "Longest silence of an engine whose process evidently stands still: it is stopped, or all its threads sleep "
            "though it is idle or its models run on the CPU; the shorter one of this and step_timeout counts",
            unit="duration",
            low=1,
            high=86400,
        ),
    )
    load_timeout: float = field(
        default=600.0,
        metadata=_key("Longest time of loading without progress", unit="duration", low=1, high=86400),
    )


@dataclass(frozen=True)
class MetricsConfig:
    """Where Prometheus finds the metrics."""

    listen: str = field(
        default="",
        metadata=_key(
            "HOST:PORT on loopback, such as 127.0.0.1:9464, or unix:PATH; whoever may connect may read",
            default="no metrics",
        ),
    )


@dataclass(frozen=True)
class TracesConfig:
    """Where OpenTelemetry traces go."""

    endpoint: str = field(
        default="",
        metadata=_key(
            "OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces; needs pip install edged[otel]",
            pattern=r"https?://[!-~]{1,500}",
            default="no traces",
        ),
    )


@dataclass(frozen=True)
class ThermalConfig:
    """What a hot board does to admission. Nothing where the board does not say its temperatures."""

    margin: int = field(
        default=3,
        metadata=_key(
            "Fewer requests run at once while a zone is less than this below its throttling point (°C)",
            low=0,
            high=60,
        ),
    )
    max_requests: int = field(
        default=0,
        metadata=_key("How many then; the others wait. 0: as many as ever", low=0, high=256),
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
