"""Lists of tensor names in messages: all of them, the layers of one pattern together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_PATTERNS = 64
"""Patterns that a message shows; a model has some ten a layer, a damaged file may have anything."""
_NUMBER = re.compile(r"\.(\d{1,9})\.")


def listed(names: Iterable[str]) -> str:
    """Names as one text: ``model.layers.{0-11,13}.mlp.up_proj.weight, model.norm.weight``."""
    numbers: dict[str, list[int]] = {}
    plain: dict[str, str] = {}
    for name in names:
        found = _NUMBER.search(name)
        pattern = name if found is None else f"{name[: found.start(1)]}\0{name[found.end(1) :]}"
        plain.setdefault(pattern, name)
        numbers.setdefault(pattern, []).append(-1 if found is None else int(found[1]))
    shown = [
        plain[pattern] if len(each) == 1 else pattern.replace("\0", "{" + _ranges(each) + "}")
        for pattern, each in numbers.items()
    ]
    more = len(shown) - MOST_PATTERNS
    return ", ".join(shown[:MOST_PATTERNS]) + (f" and {more} more" if more > 0 else "")


def _ranges(numbers: list[int]) -> str:
    """``0-3,7`` of 0, 1, 2, 3, 7."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
