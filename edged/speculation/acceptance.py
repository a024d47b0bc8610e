"""How often draft tokens are accepted: of the model's requests lately, and of each sequence by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.speculation.tree import DraftTree

_PRIOR_WEIGHT = 16.0
"""Nodes that what is known beforehand counts as, for the model."""
_MODEL_WEIGHT = 4.0
"""Nodes that what is known of the model counts as, for a sequence."""
_MODEL_FADE, _SEQUENCE_FADE = 0.998, 0.95
_MOST = 0.98
"""No rate is above it: what never failed yet may fail."""


class Acceptance:
    """Running rates by class.

    Args:
        priors: What they are like before anything was seen.
        weight: Nodes that this counts as.
        fade: What is left of a class's past with each new node.
    """

    __slots__ = ("_accepted", "_fade", "_priors", "_tried", "_weight")

    def __init__(
        self, priors: Sequence[float], weight: float = _PRIOR_WEIGHT, fade: float = _MODEL_FADE
    ) -> None:
        self._priors, self._weight, self._fade = priors, weight, fade
        self._tried = [0.0] * len(priors)
        self._accepted = [0.0] * len(priors)

    def of_sequence(self) -> Acceptance:
        """Rates of a new sequence, which begin with these."""
        return Acceptance(self.rates(), _MODEL_WEIGHT, _SEQUENCE_FADE)

    def rates(self) -> list[float]:
        """The chance of a node whose parent was accepted, by class."""
        return [
            min(_MOST, (prior * self._weight + accepted) / (self._weight + tried))
            for prior, accepted, tried in zip(self._priors, self._accepted, self._tried, strict=True)
        ]

    def note(self, kind: int, *, accepted: bool) -> None:
        """A node of a class was verified."""
        self._tried[kind] = self._tried[kind] * self._fade + 1.0
        self._accepted[kind] = self._accepted[kind] * self._fade + accepted


def verified_nodes(tree: DraftTree, path: Sequence[int]) -> list[tuple[int, bool]]:
    """The class of each node that was put to the test, and whether it was accepted.

    A node whose parent was not accepted says nothing, nor does one beside an accepted sibling that was likelier.
    """
    accepted = set(path)
    answered: set[int] = set()
    found = []
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent in accepted and parent not in answered:
            found.append((tree.classes[node], node in accepted))
            if node in accepted:
                answered.add(parent)
    return found
