"""A tree out of a draft model's distributions, as EAGLE-2 grows it (arXiv 2406.16858, section 4).

Level 1 is the root's k likeliest tokens. Of each later level the k nodes with the largest joint probability are expanded by
their k likeliest tokens, so the pool has k + k²(depth - 1) nodes. A step takes the best of them by joint probability, which
always brings their ancestors along: a node is never likelier than its parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from edged.speculation.tree import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import GrownTree

CLASSES = 8
"""Nodes are told apart by their own probability given their parent, in eighths."""
PRIOR_RATES = tuple((kind + 0.5) / CLASSES for kind in range(CLASSES))
"""A draft is believed at first."""


class Expander(Protocol):
    """A draft model at one place of one sequence."""

    def expand(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Run the model on nodes.

        Args:
            nodes: Their names, from 0 on, each new.
            tokens: Their tokens.
            parents: Names of their parents, which were run before; -1 is the root.
        """

    def likeliest(self, node: int, count: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens after a node that was run (-1: the root), and their probabilities, in falling order."""


def class_of(probability: float) -> int:
    """The class of a node by its probability given its parent."""
    return min(int(probability * CLASSES), CLASSES - 1)


def grow(expander: Expander, *, depth: int, width: int, rates: Sequence[float]) -> Proposal:
    """The pool.

    Args:
        expander: The draft model.
        depth: Levels, at least 1.
        width: k, at least 1.
        rates: Running acceptance of a node whose parent was accepted, by its class.
    """
    proposal = Proposal()
    joint: list[float] = []  # what the draft says; chances also know how often it was right

    def add_children(parent: int) -> list[int]:
        above = 1.0 if parent < 0 else joint[parent]
        added = []
        for token, probability in zip(*expander.likeliest(parent, width), strict=True):
            added.append(_add(proposal, token, parent, probability, rates))
            joint.append(above * probability)
        return added

    level = add_children(-1)
    for _ in range(depth - 1):
        frontier = sorted(sorted(level, key=lambda node: -joint[node])[:width])
        expander.expand(
            frontier,
            [proposal.tokens[node] for node in frontier],
            [proposal.parents[node] for node in frontier],
        )
        level = [child for node in frontier for child in add_children(node)]
    return proposal


def proposal_of(tree: GrownTree, *, depth: int, rates: Sequence[float]) -> Proposal:
    """The pool of a tree that was grown on a device, down to so many levels; see :func:`grow`."""
    proposal, width = Proposal(), tree.width
    count = width + width * width * (depth - 1)
    for token, parent, probability in list(zip(tree.tokens, tree.parents, tree.chances, strict=True))[:count]:
        _add(proposal, token, parent, probability, rates)
    return proposal


def _add(proposal: Proposal, token: int, parent: int, probability: float, rates: Sequence[float]) -> int:
    """Add a node whose probability given its parent is what the draft says; return its place."""
    kind = class_of(probability)
    trust = min(rates[kind] / PRIOR_RATES[kind], 1 / max(probability, 1e-9))
    chance = 1.0 if parent < 0 else proposal.chances[parent]
    # Rounding could make a child likelier than its parent by a bit, and a part of the tree would have it alone.
    return proposal.add(token, parent, min(chance, chance * probability * trust), kind)
