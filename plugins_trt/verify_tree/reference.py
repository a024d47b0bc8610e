"""`verify_tree` in plain torch, one tree at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def parent_of(mask: int) -> int:
    """The parent of the node whose mask this is; -1 for a root.

    The highest bit is the node's own, and parents come before their children, so the next one is its parent's.
    """
    own = 1 << (mask.bit_length() - 1)
    return (mask ^ own).bit_length() - 1


def verify_tree(
    token_ids: torch.Tensor,  # int [n]
    targets: torch.Tensor,  # int [n]
    masks: list[int],
) -> list[int]:
    """The accepted nodes of one tree, root first.

    Args:
        token_ids: Tokens of the nodes.
        targets: What the target draws after each.
        masks: Ancestors of each node and itself, one bit each.
    """
    tokens, drawn = token_ids.tolist(), targets.tolist()
    path = [0]
    for node in range(1, len(masks)):
        # A child of the path's end: no earlier sibling was taken, or the end would be deeper.
        if parent_of(masks[node]) == path[-1] and tokens[node] == drawn[path[-1]]:
            path.append(node)
    return path
