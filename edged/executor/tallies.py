"""What a sequence's tokens say about its next one: how often each was there, and which would complete a bad sequence."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


class Tally:
    """How often each token is among the last ones.

    Args:
        window: Tokens that count; 0: all.
        tokens: The first ones, in order.
    """

    def __init__(self, window: int, tokens: npt.NDArray[np.int64]) -> None:
        self._window = window
        counted = tokens[-window:]  # all of them for 0
        self._last = deque(counted.tolist() if window else ())
        ids, counts = np.unique(counted, return_counts=True)
        self._place = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids = np.concatenate([ids, np.empty(64, np.int64)])
        self._counts = np.concatenate([counts, np.empty(64, np.int64)])

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens, each once, in no order."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each of them is there."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """Take the next token; the one that leaves the window does not count any more."""
        place = self._place.get(token_id)
        if place is None:
            place = len(self._place)
            self._place[token_id] = place
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._ids[place], self._counts[place] = token_id, 0
        self._counts[place] += 1
        if self._window:
            self._last.append(token_id)
            if len(self._last) > self._window:
                self._remove(self._last.popleft())

    def _remove(self, token_id: int) -> None:
        place = self._place[token_id]
        self._counts[place] -= 1
        if self._counts[place] == 0:  # the last one takes its place
            last = len(self._place) - 1
            moved = int(self._ids[last])
            self._ids[place], self._counts[place] = moved, self._counts[last]
            self._place[moved] = place
            del self._place[token_id]


class BadSequences:
    """Which tokens would complete a bad sequence.

    Args:
        sequences: Token ids; none of them empty.
        tokens: The tokens so far, in order.
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]], tokens: npt.NDArray[np.int64]) -> None:
        self._always = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._after: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for sequence in sequences:
            if len(sequence) > 1:
                self._after.setdefault(sequence[-2], []).append(sequence)
        longest = max(map(len, sequences)) - 1
        self._last: deque[int] = deque(tokens[max(0, len(tokens) - longest) :].tolist(), maxlen=longest)

    def add(self, token_id: int) -> None:
        """Take the next token."""
        self._last.append(token_id)

    def forbidden(self) -> npt.NDArray[np.int64]:
        """The tokens that may not come next."""
        found = list(self._always)
        if self._last:
            last = tuple(self._last)
            found += [
                sequence[-1]
                for sequence in self._after.get(last[-1], ())
                if last[-(len(sequence) - 1) :] == sequence[:-1]
            ]
        return np.array(found, np.int64)
