"""The configuration's part on how the service is run: watchdog, log."""

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
            "10s, for a sign of life",
            unit="duration",
            low=1,
            high=86400,
            default="`30s`, or `5min` where a model runs on the CPU",
        ),
    )
    load_timeout: float = field(
        default=600.0,
        metadata=_key("Longest time of loading without progress", unit="duration", low=1, high=86400),
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
