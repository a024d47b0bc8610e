"""A step's data on its way to the device: written into one host buffer, brought over by one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.executor.base import MAX_TREE
from edged.memory.cuda_buffers import StepLayout
from edged.memory.specs import PAGE_TOKENS
from plugins_trt.sample.philox import uniform, uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import Int32Array, SamplingRow, StepBatch
    from edged.executor.cuda_device import Words
    from edged.memory.buffers import ModelPlan

_PADDING = -1
_CHAIN = np.array([(2 << node) - 1 for node in range(MAX_TREE)], np.uint64)
"""Masks of tokens that follow one another."""
_MANY = 16
"""Rows from which on numpy makes their random numbers faster than Python."""


class Staging:
    """Writes steps.

    Args:
        plan: The model's plan.
        words: Host memory of :attr:`StepLayout.words` words, which the device's copies read directly.
    """

    def __init__(self, plan: ModelPlan, words: Words) -> None:
        at = StepLayout.of(plan)
        sequences, pages = plan.max_sequences, plan.pages_per_sequence
        self.words = words
        self._token_ids = words[at.token_ids : at.positions]
        self._positions = words[at.positions : at.starts]
        self._starts = words[at.starts : at.starts + sequences + 1]
        self._lengths = words[at.lengths : at.lengths + sequences]
        self._needed = words[at.needed : at.temperatures]
        self._temperatures = words[at.temperatures : at.top_ks].view(np.float32)
        self._top_ks = words[at.top_ks : at.top_ps]
        self._top_ps = words[at.top_ps : at.numbers].view(np.float64)
        self._numbers = words[at.numbers : at.masks].view(np.float64)
        self._masks = words[at.masks : at.given].view(np.uint64)
        self._given = words[at.given : at.tables]
        self._tables = words[at.tables : at.tables + sequences * pages].reshape(sequences, pages)

    def write(self, batch: StepBatch, tokens: int) -> None:
        """Tokens, boundaries and pages of a step, padded to a bucket of ``tokens``."""
        count, sequences = len(batch.token_ids), len(batch.lengths)
        self._token_ids[:count] = batch.token_ids
        self._token_ids[count:tokens] = _PADDING
        self._positions[:count] = batch.positions
        self._positions[count:tokens] = 0
        self._starts[: sequences + 1] = batch.sequence_starts
        self._starts[sequences + 1 :] = count
        self._lengths[:sequences] = batch.lengths
        self._lengths[sequences:] = 0
        starts, lengths = batch.sequence_starts.tolist(), batch.lengths.tolist()
        for index, table in enumerate(batch.page_tables):
            new = starts[index + 1] - starts[index]
            used = -(-(lengths[index] + new) // PAGE_TOKENS)
            self._tables[index, :used] = table[:used]

    def write_trees(self, batch: StepBatch, tokens: int, *, verify: bool) -> list[int]:
        """Who sees whom in a step of trees, and which of them the device verifies.

        A sequence without a tree is a chain, of which everything stays. Where the host draws a row, it also chooses the
        path.

        Args:
            batch: The step; :meth:`write` has taken it.
            tokens: Its bucket.
            verify: Whether anything is accepted of trees.

        Returns:
            The sequences whose paths are left for the host to choose.
        """
        assert batch.tree_masks is not None, "asked of a step with trees"  # noqa: S101
        count, sequences = len(batch.token_ids), len(batch.lengths)
        self._masks[:count] = batch.tree_masks
        self._masks[count:tokens] = 0
        self._given[:] = 0
        starts, masks = batch.sequence_starts.tolist(), self._masks
        held = [not verify] * count
        if verify:
            for row, how in zip(batch.logit_rows.tolist(), batch.sampling, strict=True):
                held[row] = not how.simple
        left = []
        for index in range(sequences):
            start, end = starts[index], starts[index + 1]
            if not masks[start]:
                masks[start:end] = _CHAIN[: end - start]
                self._given[index] = end - start
            elif any(held[start:end]):
                self._given[index] = -1
                left.append(index)
        return left if verify else []

    def write_needed(self, rows: Int32Array) -> None:
        """The rows whose logits are gathered; the others of the bucket give zeros."""
        self._needed[: len(rows)] = rows
        self._needed[len(rows) :] = _PADDING

    def write_sampling(self, places: Int32Array, sampling: Sequence[SamplingRow]) -> bool:
        """How rows of logits are drawn.

        Args:
            places: Their rows of logits.
            sampling: How each is drawn.

        Returns:
            Whether any simple row has to be drawn rather than to take the largest logit.
        """
        warm = [
            (place, row)
            for place, row in zip(places.tolist(), sampling, strict=True)
            if row.temperature > 0.0
        ]
        self._temperatures[:] = 0.0
        if not warm:
            return False
        for place, row in warm:
            self._temperatures[place] = row.temperature
            self._top_ks[place] = min(row.top_k, 2**31 - 1)
            self._top_ps[place] = row.top_p
        if len(warm) < _MANY:
            for place, row in warm:
                self._numbers[place] = uniform(row.seed, row.position)
        else:
            seeds, positions = [row.seed for _, row in warm], [row.position for _, row in warm]
            self._numbers[[place for place, _ in warm]] = uniforms(seeds, positions)
        return any(row.simple for _, row in warm)
