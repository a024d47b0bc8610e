"""Trees of draft tokens on the CPU: which nodes see which, and the accepted ones moved to their places."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.executor.base import PAGE_TOKENS
from plugins_trt.verify_tree.reference import parent_of, verify_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import Int32Array, StepBatch

    Paths = Sequence[Sequence[int]]


def branching_trees(batch: StepBatch) -> dict[int, list[list[int]]]:
    """The paths from the root to each node of the step's trees, by the sequence; a tree without branches is none."""
    if batch.tree_masks is None:
        return {}
    masks, starts = batch.tree_masks.tolist(), batch.sequence_starts.tolist()
    found = {}
    for index, (start, end) in enumerate(pairwise(starts)):
        tree = masks[start:end]
        if tree[0] and any(mask != (2 << node) - 1 for node, mask in enumerate(tree)):
            found[index] = [[node for node in range(mask.bit_length()) if mask >> node & 1] for mask in tree]
    return found


def tree_mask(paths: Paths, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of a tree's nodes over each other, ``[1, 1, T, T]``: 0 or minus infinity."""
    mask = torch.full((len(paths), len(paths)), -torch.inf, dtype=dtype)
    for node, path in enumerate(paths):
        mask[node, list(path)] = 0.0
    return mask[None, None]


def parent_rows(batch: StepBatch) -> dict[int, int]:
    """The needed row of the parent of each node but the roots, by the node's own needed row."""
    if batch.tree_masks is None:
        return {}
    row_of = {token: row for row, token in enumerate(batch.logit_rows.tolist())}
    masks, found = batch.tree_masks.tolist(), {}
    for start, end in pairwise(batch.sequence_starts.tolist()):
        for token in range(start + 1, end if masks[start] else start):
            found[row_of[token]] = row_of[start + parent_of(masks[token])]
    return found


def accepted_paths(batch: StepBatch, drawn: Int32Array) -> dict[int, list[int]]:
    """The accepted nodes of each tree of a step, by the sequence.

    Args:
        batch: The step.
        drawn: Token of each needed row, int32 [R]; every node of a tree is one.
    """
    if batch.tree_masks is None:
        return {}
    starts = batch.sequence_starts.tolist()
    targets = np.full(len(batch.token_ids), -1, np.int32)
    targets[batch.logit_rows] = drawn
    tokens, after = torch.from_numpy(batch.token_ids), torch.from_numpy(targets)
    return {
        index: verify_tree(tokens[start:end], after[start:end], batch.tree_masks[start:end].tolist())
        for index, (start, end) in enumerate(pairwise(starts))
        if batch.tree_masks[start]
    }


def move_nodes(pools: Sequence[torch.Tensor], table: Int32Array, length: int, path: Sequence[int]) -> None:
    """Move accepted nodes to the slots behind a sequence's earlier tokens, in every layer.

    Args:
        pools: What is stored of tokens, ``[layers, 2 kv_heads, pages * 64, ..]`` each.
        table: Pages of the sequence.
        length: Tokens it had stored.
        path: Accepted nodes, root first.
    """
    moved = [(node, depth) for depth, node in enumerate(path) if node != depth]
    if moved:
        places = length + np.array(moved, np.int64)  # [n, 2]
        slots = table[places // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + places % PAGE_TOKENS
        source, target = torch.from_numpy(slots).unbind(1)
        for pool in pools:
            pool[:, :, target] = pool[:, :, source]
