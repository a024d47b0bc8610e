"""Sizes and durations with units, as people write them in a configuration."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_DURATIONS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
# The digits are bounded: no text can become an infinite float or an integer that takes minutes to read.
_PATTERN = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)[ \t]*([A-Za-z]+)")


def parse_size(text: str) -> int:
    """Bytes of ``12GiB``, ``512 MiB``, ``1.5GB``, rounded down.

    Raises:
        ValueError: No number, or a unit that is not one of B, KiB, MiB, GiB, kB, MB, GB. The message says what is
            allowed.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2] not in _SIZES:
        example = _suggestion(text, {"k": "KiB", "m": "MiB", "g": "GiB"}, "MiB", "512")
        raise ValueError(f"a size with a unit out of {', '.join(_SIZES)}, such as {example}")
    return int(Fraction(match[1]) * _SIZES[match[2]])


def parse_duration(text: str) -> float:
    """Seconds of ``250ms``, ``30s``, ``5min``.

    Raises:
        ValueError: No number, or a unit that is not one of ms, s, min, h. The message says what is allowed.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2] not in _DURATIONS:
        example = _suggestion(text, {"ms": "ms", "s": "s", "m": "min", "h": "h"}, "s", "30")
        raise ValueError(f"a duration with a unit out of {', '.join(_DURATIONS)}, such as {example}")
    return float(Fraction(match[1]) * _DURATIONS[match[2]])


def _suggestion(text: str, starts: dict[str, str], default: str, number: str) -> str:
    """What the writer probably meant: the number found, with the unit that the letters after it begin like."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)[ \t]*([A-Za-z]{0,12})", text.strip())
    if match is None:
        return number + default
    letters = match[2].lower()
    for start, unit in starts.items():
        if letters.startswith(start):
            return match[1] + unit
    return match[1] + default


def format_size(count: int) -> str:
    """Human form with a binary unit: ``1.50 GiB``; exact bytes below 1 KiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def exact_size(count: int) -> str:
    """The shortest text that :func:`parse_size` reads back as ``count``: ``512MiB``, ``1000B``."""
    for unit in ("GiB", "MiB", "KiB"):
        if count and count % _SIZES[unit] == 0:
            return f"{count // _SIZES[unit]}{unit}"
    return f"{count}B"


def exact_duration(seconds: float) -> str:
    """A text that :func:`parse_duration` reads back as ``seconds``, for whole milliseconds: ``30s``, ``250ms``."""
    milliseconds = round(seconds * 1000)
    for unit, length in (("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % length == 0:
            return f"{milliseconds // length}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"
