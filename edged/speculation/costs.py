"""What a step costs by its tokens, as measured: while the model loads, and with every step that runs."""

from __future__ import annotations

import bisect

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes of steps that are told apart; a step counts as the next of them."""
_FADE = 0.8
_OUTLIER = 3.0
"""A step that takes so many times what was expected counts only so much: the machine did something else meanwhile."""
_FORGET = 0.999
"""For each step without drafts: what was dear once, in a longer context or on a busier machine, is tried again."""


def size_of(tokens: int) -> int:
    """The size that a step of so many tokens counts as."""
    return SIZES[min(bisect.bisect_left(SIZES, tokens), len(SIZES) - 1)]


class StepCosts:
    """Seconds of steps of streams alone, and what drafts add to them, as a factor.

    A step's time grows with the context; what drafts add to it does so in proportion. So the time of a step without
    drafts is one figure, measured lately, and that of a step with drafts a factor of it.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # streams, as a size -> seconds
        self._factors: dict[
            tuple[int, int], float
        ] = {}  # (streams as a size, tokens as a size) -> over plain
        self._loaded: dict[
            int, float
        ] = {}  # tokens as a size -> over a step of one token, from when it was loaded

    def note_loaded(self, seconds: dict[int, float]) -> None:
        """Take what was measured before the first request: seconds by tokens of a step, one token among them."""
        self._loaded = {size_of(tokens): each / seconds[1] for tokens, each in seconds.items()}

    def plain(self, streams: int) -> float | None:
        """Seconds of a step of ``streams`` tokens; None before one ran."""
        return self._plain.get(size_of(streams))

    def factor(self, streams: int, tokens: int) -> float:
        """What a step of ``tokens`` takes where ``streams`` of them are no drafts, over one of ``streams``."""
        known = self._factors.get((size_of(streams), size_of(tokens)))
        if known is not None:
            return known
        return max(1.0, self._at_load(tokens) / self._at_load(streams))

    def note_plain(self, streams: int, seconds: float) -> None:
        """A step without drafts ran."""
        size = size_of(streams)
        known = self._plain.get(size)
        self._plain[size] = seconds if known is None else _running(known, seconds)
        for key, factor in self._factors.items():
            if key[0] == size and factor > 1.0:
                self._factors[key] = 1.0 + (factor - 1.0) * _FORGET

    def note_verified(self, streams: int, tokens: int, seconds: float) -> None:
        """A step with drafts ran."""
        plain = self.plain(streams)
        if plain is None:
            return
        key = size_of(streams), size_of(tokens)
        self._factors[key] = max(1.0, _running(self.factor(streams, tokens), seconds / plain))

    def _at_load(self, tokens: int) -> float:
        """Over a step of one token; between and beyond what was measured along straight lines."""
        known = self._loaded
        if not known:
            return float(tokens)  # nothing was measured: as if each token cost a step
        size = size_of(tokens)
        if size in known:
            return known[size]
        sizes = sorted(known)
        place = bisect.bisect_left(sizes, size)
        if place == len(sizes):
            return known[sizes[-1]] * size / sizes[-1]
        low, high = sizes[place - 1], sizes[place]  # 1 is among them
        return known[low] + (known[high] - known[low]) * (size - low) / (high - low)


def _running(known: float, new: float) -> float:
    return known * _FADE + min(new, _OUTLIER * known) * (1 - _FADE)
