"""Sizes and durations with units, as people write them in a configuration."""

from __future__ import annotations

import re

_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_DURATIONS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")


def parse_size(text: str) -> int:
    """Bytes of ``12GiB``, ``512 MiB``, ``1.5GB``.

    Raises:
        ValueError: No number, or a unit that is not one of B, KiB, MiB, GiB, kB, MB, GB.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2] not in _SIZES:
        raise ValueError(f"a size with a unit out of {', '.join(_SIZES)}, such as 512MiB")
    return int(float(match[1]) * _SIZES[match[2]])


def parse_duration(text: str) -> float:
    """Seconds of ``250ms``, ``30s``, ``5min``.

    Raises:
        ValueError: No number, or a unit that is not one of ms, s, min, h.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2] not in _DURATIONS:
        raise ValueError(f"a duration with a unit out of {', '.join(_DURATIONS)}, such as 30s")
    return float(match[1]) * _DURATIONS[match[2]]


def format_size(count: int) -> str:
    """Human form with a binary unit: ``1.50 GiB``; exact bytes below 1 KiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
