"""Prompt lookup: what followed the last tokens where they stood before, in the prompt or in the answer.

The draft of "Prompt Lookup Decoding" (A. Saxena, 2023) and of LLMA (arXiv 2304.04487): no model, and on text that
quotes, edits or repeats itself most of it is right. The index is of all triples of tokens. The prompt's are sorted once,
those of the answer go into a dictionary as its tokens come, so a step costs a look-up and not a search of the text.

Where the last tokens stood several times, the places with the longest common text before them come first, and the later
of two equals; what follows in the others becomes branches. A place near the end is continued by what it says itself, so
that text which repeats in short periods is drafted to any depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.speculation.tree import Proposal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edged.executor.base import Int32Array

LEAST_MATCH = 3
"""Tokens that must have stood there before."""
LONGEST_MATCH = 32
"""Common text is measured up to this many tokens."""
PLACES = 4
"""Earlier places that are looked at."""
_BOUNDS = (4, 5, 7, 10, 15, 24)
_BITS = 21
_MASK = (1 << _BITS) - 1

CLASS_OF = tuple(sum(length >= bound for bound in _BOUNDS) for length in range(LONGEST_MATCH + 65))
"""The class of a node by the tokens that match before it: its own path counts as matched, because it is looked at only
if it was accepted."""
PRIOR_RATES = (0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
"""Acceptance by class before anything was seen."""


class PromptLookup:
    """The index of one sequence.

    Args:
        prompt: Its first tokens.
    """

    __slots__ = ("_last", "_order", "_previous", "_sorted", "_tokens")

    slot = None
    """It needs to see no hidden states."""

    def __init__(self, prompt: Int32Array) -> None:
        self._tokens: list[int] = prompt.tolist()
        # The triple that ends the prompt is not among them: nothing follows it yet.
        wide = prompt[:-1].astype(np.int64) & _MASK
        keys = wide[:-2] << 2 * _BITS | wide[1:-1] << _BITS | wide[2:]
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        self._last: dict[int, int] = {}  # triple -> where its last token stood last, in the answer
        self._previous: dict[int, int] = {}  # such a place -> the one before it

    def close(self) -> None:
        """Nothing is held elsewhere."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has gone on by these tokens."""
        known = self._tokens
        for token in tokens:
            place = len(known) - 1
            if place >= LEAST_MATCH - 1:
                key = self._key()
                before = self._last.get(key)
                if before is not None:
                    self._previous[place] = before
                self._last[key] = place
            known.append(token)

    def propose(self, depth: int, rates: Sequence[float]) -> Proposal | None:
        """What followed the last tokens earlier; see :class:`edged.speculation.tree.Draft`."""
        known = self._tokens
        if len(known) <= LEAST_MATCH:
            return None
        places = [(self._common(place), place) for place in self._places()]
        if not places:
            return None
        places.sort(reverse=True)
        proposal = Proposal()
        children: dict[tuple[int, int], int] = {}
        missed = {-1: 1.0}  # what is left of a node's chance after its known children
        for common, place in places:
            parent, chance = -1, 1.0
            for step, token in enumerate(self._following(place, depth)):
                node = children.get((parent, token))
                if node is None:
                    kind = CLASS_OF[common + step]
                    rate = rates[kind]
                    chance = chance * missed[parent] * rate
                    missed[parent] *= 1 - rate
                    node = children[parent, token] = proposal.add(token, parent, chance, kind)
                    missed[node] = 1.0
                else:
                    chance = proposal.chances[node]
                parent = node
        return proposal

    def _key(self) -> int:
        first, second, third = self._tokens[-LEAST_MATCH:]
        return (first & _MASK) << 2 * _BITS | (second & _MASK) << _BITS | third & _MASK

    def _places(self) -> Iterator[int]:
        """Where the last token stood after the two before it, the latest places first."""
        key, left = self._key(), PLACES
        place = self._last.get(key)
        while place is not None and left:
            yield place
            left -= 1
            place = self._previous.get(place)
        if not left or not len(self._sorted):
            return
        end = int(np.searchsorted(self._sorted, key, side="right"))
        while end and left and self._sorted[end - 1] == key:
            end -= 1
            left -= 1
            yield int(self._order[end]) + LEAST_MATCH - 1

    def _common(self, place: int) -> int:
        """Tokens up to ``place`` that are those up to the end."""
        known = self._tokens
        last, common = len(known) - 1, LEAST_MATCH
        most = min(LONGEST_MATCH, place + 1)
        while common < most and known[place - common] == known[last - common]:
            common += 1
        return common

    def _following(self, place: int, depth: int) -> list[int]:
        """What followed ``place``, over the end of the text into itself."""
        known = self._tokens
        following = known[place + 1 : place + 1 + depth]
        period = len(known) - 1 - place
        while len(following) < depth:
            following.append(following[len(following) - period])
        return following
