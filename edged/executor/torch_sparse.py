"""Sparse attention over the KV pages on the CPU: the meaning that the GPU's kernels are held to, in plain torch.

InfLLM-v2 (arXiv 2509.24663): after the new tokens are stored, the compressed keys that they complete are written; each
query far enough from the start then scores the blocks, chooses some and attends to them alone. Scores and choices are
those of :mod:`plugins_trt.chunk_selection.reference`. It is right, not fast.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.memory.buffers import PAGE_TOKENS, SPARSE_QUERIES
from plugins_trt.chunk_selection.reference import block_scores, choose, compressed_keys
from plugins_trt.contract import COARSE_KERNEL, COARSE_STRIDE, KERNEL, STRIDE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.executor.base import Int32Array, StepBatch
    from edged.models.architecture import Architecture
    from plugins_trt.contract import SelectionRule


class SparseSequence:
    """One sequence of a step: its pages, and which of its new tokens attend sparsely.

    Args:
        table: Its pages.
        start: Its first row in the step.
        length: Tokens stored before the step.
        count: New tokens.
        dense_below: A query at position i is dense while ``i + 1 < dense_below``.
    """

    def __init__(self, table: Int32Array, start: int, length: int, count: int, dense_below: int) -> None:
        self.start, self.length, self.count = start, length, count
        self.dense = min(count, max(0, dense_below - 1 - length))
        """New tokens, from the first, that attend densely."""
        pages = -(-(length + count) // PAGE_TOKENS)
        self.table = torch.from_numpy(np.ascontiguousarray(table[:pages], np.int64))
        self.positions = torch.arange(length, length + count)


class SparseAttention:
    """Compressed keys, block selection and the attention of the chosen blocks.

    Args:
        architecture: The model's sizes.
        buffers: The buffers, by name: ``kv`` ``[layers, 2 kv_heads, pages * 64, D]``, ``fine`` and ``coarse``
            ``[layers, pages, kv_heads, slots, D]``.
        rule: Which blocks a query attends to.
    """

    def __init__(
        self, architecture: Architecture, buffers: Mapping[str, torch.Tensor], rule: SelectionRule
    ) -> None:
        self._a = architecture
        self._kv = buffers["kv"]
        self._fine, self._coarse = buffers["fine"], buffers["coarse"]
        self.rule = rule

    def begin(self, batch: StepBatch) -> tuple[SparseSequence, ...]:
        """Prepare a step."""
        starts, lengths = batch.sequence_starts.tolist(), batch.lengths.tolist()
        self._sequences = tuple(
            SparseSequence(table, starts[s], lengths[s], starts[s + 1] - starts[s], self.rule.dense_below)
            for s, table in enumerate(batch.page_tables)
        )
        return self._sequences

    def compress(self, layer: int) -> None:
        """Write the compressed keys that the step's tokens complete; keys and values are stored already."""
        kinds = (
            (KERNEL, STRIDE, self._fine[layer]),
            (COARSE_KERNEL, COARSE_STRIDE, self._coarse[layer]),
        )
        for sequence in self._sequences:
            for kernel, stride, pool in kinds:
                last = sequence.positions
                last = last[
                    (last % stride == stride - 1) & (last >= kernel - 1)
                ]  # the tokens that complete one
                if not len(last):
                    continue
                # Rows and summands in one order for every cut of the prompt: one mean at a time.
                for place in last.tolist():
                    keys = self._keys(layer, sequence, place - kernel + 1, place + 1)  # [kv_heads, kernel, D]
                    wide = keys.double() if keys.dtype == torch.float64 else keys.float()
                    page = sequence.table[place // PAGE_TOKENS]
                    pool[page, :, place % PAGE_TOKENS // stride] = (wide.sum(1) / kernel).to(pool.dtype)

    def attend(self, layer: int, sequence: SparseSequence, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the sparse queries of one sequence.

        Args:
            layer: Its index.
            sequence: Whose queries they are.
            q: Rotated queries of all its new tokens, ``[count, heads, D]``.
            out: Where results go, ``[count, heads, D]``; rows of dense queries are left alone.
        """
        table = sequence.table
        fine = compressed_keys(self._fine[layer], table)
        coarse = compressed_keys(self._coarse[layer], table)
        for first in range(sequence.dense, sequence.count, SPARSE_QUERIES):
            rows = slice(first, min(first + SPARSE_QUERIES, sequence.count))
            positions = sequence.positions[rows]
            scores = block_scores(q[rows], positions, fine, coarse, lse=self.rule.lse)
            chosen = choose(scores, positions, self.rule)  # [kv_heads, n, blocks]
            for head in range(self._a.kv_heads):
                group = slice(head * self._a.group, (head + 1) * self._a.group)
                out[rows, group] = self._attend_blocks(
                    layer, head, table, q[rows, group], positions=positions, chosen=chosen[head]
                )

    def _attend_blocks(
        self,
        layer: int,
        head: int,
        table: torch.Tensor,
        q: torch.Tensor,  # [n, G, D]
        *,
        positions: torch.Tensor,  # [n]
        chosen: torch.Tensor,  # [n, blocks]
    ) -> torch.Tensor:
        """``[n, G, D]``: each query over its own blocks, gathered."""
        most = int(chosen.sum(1).max())
        # The chosen blocks first, in rising order; what fills up a shorter row is masked.
        order = torch.sort(chosen.int(), dim=1, descending=True, stable=True)
        blocks, valid = order.indices[:, :most], order.values[:, :most].bool()  # [n, most]
        tokens = blocks[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)  # [n, most, 64]
        visible = (valid[..., None] & (tokens <= positions[:, None, None])).flatten(1)  # [n, most * 64]
        slots = (table[blocks][..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten(1)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        keys = self._kv[layer, head][slots].to(wide)  # [n, most * 64, D]
        scores = q.to(wide) @ keys.transpose(1, 2) / math.sqrt(self._a.head_dim)  # [n, G, most * 64]
        weights = scores.masked_fill_(~visible[:, None], -math.inf).softmax(-1)
        values = self._kv[layer, self._a.kv_heads + head][slots].to(wide)
        # What lies behind a query in its own block may never have been written: 0 times NaN is NaN.
        return weights @ values.masked_fill_(~visible[..., None], 0.0)

    def _keys(self, layer: int, sequence: SparseSequence, start: int, end: int) -> torch.Tensor:
        """Stored keys of positions ``start`` to ``end``, ``[kv_heads, n, D]``."""
        positions = torch.arange(start, end)
        slots = sequence.table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        return self._kv[layer, : self._a.kv_heads].index_select(1, slots)
