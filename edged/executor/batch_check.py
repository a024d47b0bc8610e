"""Refuses a step that would read or write outside an executor's buffers; such a step is a fault of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.errors import InternalError
from edged.executor.base import MAX_TREE, PAGE_TOKENS

if TYPE_CHECKING:
    from edged.executor.base import ExecutorLimits, StepBatch


def check_batch(batch: StepBatch, limits: ExecutorLimits) -> None:
    """Hold a step against what the executor can take.

    Raises:
        InternalError: Too many tokens or sequences, boundaries that do not fit them, or a table that is too short.
    """
    tokens, sequences = len(batch.token_ids), len(batch.lengths)
    if not 1 <= tokens <= limits.max_step_tokens:
        raise InternalError(f"a step takes 1 to {limits.max_step_tokens} tokens, this one has {tokens}")
    if not 1 <= sequences <= limits.max_sequences:
        raise InternalError(f"a step takes 1 to {limits.max_sequences} sequences, this one has {sequences}")
    starts = batch.sequence_starts
    new = np.diff(starts)
    if len(starts) != sequences + 1 or starts[0] != 0 or starts[-1] != tokens or (new < 1).any():
        raise InternalError(
            f"sequence_starts {starts.tolist()} do not cut {tokens} tokens into {sequences} sequences"
        )
    pages = -(-(batch.lengths + new) // PAGE_TOKENS)
    for index, table in enumerate(batch.page_tables):
        if len(table) < pages[index]:
            raise InternalError(f"sequence {index} needs {pages[index]} pages, its table has {len(table)}")
    if batch.tree_masks is not None:
        _check_trees(batch, tokens, limits.tree_tokens)


def _check_trees(batch: StepBatch, tokens: int, most: int) -> None:
    """Hold every tree to what the contract says of one."""
    masks = batch.tree_masks
    assert masks is not None, "asked of a step with trees"  # noqa: S101
    if len(masks) != tokens:
        raise InternalError(f"tree_masks has {len(masks)} words for {tokens} tokens")
    if tokens > most:
        raise InternalError(f"a step with trees takes at most {most} tokens, this one has {tokens}")
    needed = set(batch.logit_rows.tolist())
    starts, lengths, words = batch.sequence_starts.tolist(), batch.lengths.tolist(), masks.tolist()
    for sequence, length in enumerate(lengths):
        start, end = starts[sequence], starts[sequence + 1]
        tree = words[start:end]
        if not any(tree):
            continue
        if len(tree) > MAX_TREE or tree[0] != 1:
            raise InternalError(f"sequence {sequence} has no tree of at most {MAX_TREE} nodes below one root")
        for node, mask in enumerate(tree):
            above = mask ^ 1 << node
            if mask >> node != 1 or (node and tree[above.bit_length() - 1] != above):
                raise InternalError(f"node {node} of sequence {sequence} has the mask {mask:#x}")
            if batch.positions[start + node] != length + mask.bit_count() - 1:
                raise InternalError(f"node {node} of sequence {sequence} is not at its depth")
            if start + node not in needed:
                raise InternalError(f"node {node} of sequence {sequence} is no needed row")


def check_sampling(batch: StepBatch) -> None:
    """Refuse a step that does not say how each needed row is drawn.

    Raises:
        InternalError: Their numbers differ.
    """
    if len(batch.sampling) != len(batch.logit_rows):
        raise InternalError(
            f"{len(batch.logit_rows)} rows need a token, {len(batch.sampling)} say how to draw it"
        )
