"""How a field of the configuration's dataclasses says what it means and may hold."""

from __future__ import annotations

from typing import Any

SIZE_LIMIT = 2**50
"""Largest size that is believed: 1 PiB, far above any machine and far below what 64 bits hold."""


def key(
    doc: str,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    multiple: int = 1,
    pattern: str = "",
    default: str = "",
) -> dict[str, Any]:
    """Metadata of one key.

    Args:
        doc: What it means, as the reference prints it.
        unit: ``size`` or ``duration`` when the value is written with a unit.
        choices: Every value that is allowed.
        low: Smallest value, inclusive; for a list, its fewest entries.
        high: Largest value, inclusive; for a list, its most entries.
        multiple: The value is a multiple of this.
        pattern: Regular expression that the whole text matches.
        default: What the reference says instead of the field's default.
    """
    return {
        "doc": doc,
        "unit": unit,
        "choices": choices,
        "low": low,
        "high": high,
        "multiple": multiple,
        "pattern": pattern,
        "default": default,
    }
