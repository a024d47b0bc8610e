"""Trees of draft tokens: what a draft proposes, and the part of it that a step verifies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from edged.executor.base import MAX_TREE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class Proposal:
    """Nodes below a root, parents before their children.

    Attributes:
        tokens: Token of each node.
        parents: Index of each node's parent in these lists; -1 is the root, the sequence's last token.
        chances: Estimated probability that each node is on the accepted path; never above its parent's.
        classes: What the draft knew of each node, for its running acceptance.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, chance: float, kind: int) -> int:
        """Add a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.classes.append(kind)
        return len(self.tokens) - 1

    def kept(self, keep: Callable[[Sequence[int]], int]) -> Proposal:
        """The nodes that remain where paths are cut.

        Args:
            keep: Given the tokens of a path below the root, says how many of them may stay.
        """
        inner = set(self.parents)
        stay: set[int] = set()
        for leaf in range(len(self)):
            if leaf in inner:
                continue
            path = self.path(leaf)
            stay.update(path[: keep([self.tokens[node] for node in path])])
        return self.part(sorted(stay))

    def part(self, nodes: Sequence[int]) -> Proposal:
        """Some of the nodes, in rising order, each with its parent."""
        place = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        return Proposal(
            [self.tokens[node] for node in nodes],
            [place[self.parents[node]] for node in nodes],
            [self.chances[node] for node in nodes],
            [self.classes[node] for node in nodes],
        )

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to ``node``."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


class DraftTree:
    """A tree as a step takes it: node 0 is the sequence's last token.

    Args:
        root: That token.
        proposal: The nodes below it; at most 63.
    """

    __slots__ = ("_children", "classes", "depths", "masks", "parents", "tokens")

    def __init__(self, root: int, proposal: Proposal) -> None:
        if len(proposal) >= MAX_TREE:
            raise ValueError(f"a tree has at most {MAX_TREE} nodes, not {len(proposal) + 1}")
        self.tokens = [root, *proposal.tokens]
        self.parents = [-1, *(parent + 1 for parent in proposal.parents)]
        self.classes = [-1, *proposal.classes]
        self.masks = [1]
        """Ancestors of each node and itself, one bit each."""
        self.depths = [0]
        self._children: dict[tuple[int, int], int] = {}
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            self.masks.append(self.masks[parent] | 1 << node)
            self.depths.append(self.depths[parent] + 1)
            self._children.setdefault((parent, self.tokens[node]), node)

    def __len__(self) -> int:
        return len(self.tokens)

    def follow(self, node: int, token: int) -> int | None:
        """The child of ``node`` that is ``token``."""
        return self._children.get((node, token))


class Draft(Protocol):
    """Guesses how one sequence goes on."""

    @property
    def slot(self) -> object | None:
        """What the executor shows each stored token to; None: the draft needs to see none."""

    def close(self) -> None:
        """The sequence has ended."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has gone on by these tokens."""

    def propose(self, depth: int, rates: Sequence[float]) -> Proposal | None:
        """Guess what follows; None where there is no guess.

        Args:
            depth: Most tokens of a path.
            rates: Running acceptance of a node whose parent was accepted, by its class.
        """
