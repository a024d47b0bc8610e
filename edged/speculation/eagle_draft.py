"""Drafts of an EAGLE model that runs beside the target, in its executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.executor.base import GrownTree
from edged.speculation.expansion import grow, proposal_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import DraftModel, Int32Array
    from edged.speculation.tree import Proposal


class EagleDraft:
    """The draft of one sequence.

    Args:
        prompt: Its first tokens.
        model: Runs the draft.
        width: Likeliest tokens that are looked at below a node, and nodes of a level that are expanded.
    """

    __slots__ = ("_model", "_tokens", "_width", "slot")

    def __init__(self, prompt: Int32Array, model: DraftModel, width: int) -> None:
        self._model = model
        self._width = width
        self._tokens: list[int] = prompt.tolist()
        self.slot = model.open()
        """Where the executor puts what the draft must know of each stored token; None: it has no room."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has gone on by these tokens."""
        self._tokens += tokens

    def propose(self, depth: int, rates: Sequence[float]) -> Proposal | None:
        """Grow a tree; see :class:`edged.speculation.tree.Draft`."""
        tree = None if self.slot is None else self._model.start(self.slot, self._tokens)
        if isinstance(tree, GrownTree):
            return proposal_of(tree, depth=depth, rates=rates)
        return None if tree is None else grow(tree, depth=depth, width=self._width, rates=rates)

    def close(self) -> None:
        """The sequence has ended."""
        if self.slot is not None:
            self._model.close(self.slot)
            self.slot = None
