"""Sparse attention over the KV pages on the CPU: the meaning that the GPU's kernels are held to, in plain torch.

InfLLM-v2 (arXiv 2509.24663): after the new tokens are stored, the compressed keys that they complete are written; each
query far enough from the start then scores the blocks, chooses some and attends to them alone. Scores and choices are
those of :mod:`plugins_trt.chunk_selection.reference`. It is right, not fast.

A node of a tree sees what it would see if its path had been decoded token by token: the keys of its ancestors, and the
compressed keys that they complete, which belong to the node until the path is accepted (:meth:`SparseAttention.keep`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.memory.buffers import PAGE_TOKENS, SPARSE_QUERIES
from plugins_trt.chunk_selection.reference import block_scores, choose, compressed_keys
from plugins_trt.contract import COARSE_KERNEL, COARSE_STRIDE, KERNEL, STRIDE
from plugins_trt.quantized.reference import dequantize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        paths: Of a tree, the nodes from the root to each node; None where the tokens follow one another.
    """

    def __init__(
        self,
        table: Int32Array,
        start: int,
        length: int,
        count: int,
        *,
        dense_below: int,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.start, self.length, self.count = start, length, count
        pages = -(-(length + count) // PAGE_TOKENS)
        self.table = torch.from_numpy(np.ascontiguousarray(table[:pages], np.int64))
        self.paths = None if paths is None else tuple(torch.tensor(path, dtype=torch.int64) for path in paths)
        if paths is None:
            self.positions = torch.arange(length, length + count)
        else:
            self.positions = length - 1 + torch.tensor([len(path) for path in paths])
        self.is_sparse: list[bool] = (self.positions + 1 >= dense_below).tolist()
        """Whether each new token attends sparsely; in a chain all do from the first on that does."""
        self.dense = self.is_sparse.index(True) if any(self.is_sparse) else count
        """Of a chain: new tokens, from the first, that attend densely."""
        self.completing = [
            (row, place) for row, place in enumerate(self.positions.tolist()) if place % STRIDE == STRIDE - 1
        ]
        """New tokens, and their positions, that may complete a compressed key."""
        self.node_keys: dict[tuple[int, int], torch.Tensor] = {}
        """Compressed keys that nodes complete in the layer at hand, ``[kv_heads, D]`` by (node, stride)."""
        self._alike: list[torch.Tensor] | None = None
        self._ancestors = torch.zeros(count, max(map(len, paths or [()])), dtype=torch.int64)
        for node, path in enumerate(self.paths or ()):
            self._ancestors[node, : len(path)] = path

    @property
    def has_dense(self) -> bool:
        """Whether a new token attends densely."""
        return not all(self.is_sparse)

    @property
    def has_sparse(self) -> bool:
        """Whether a new token attends sparsely."""
        return any(self.is_sparse)

    @property
    def alike(self) -> Sequence[torch.Tensor]:
        """Sparse nodes of a tree whose paths complete the same compressed keys, so that they see the same ones."""
        if self._alike is None:
            completed = {node for node, _ in self.node_keys}
            groups: dict[tuple[int, ...], list[int]] = {}
            for node, path in enumerate(self.paths or ()):
                if self.is_sparse[node]:
                    groups.setdefault(tuple(each for each in path.tolist() if each in completed), []).append(
                        node
                    )
            self._alike = [torch.tensor(nodes) for nodes in groups.values()]
        return self._alike

    def slots(self, positions: torch.Tensor, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """Where the tokens at ``positions`` lie that a chain, or the paths to nodes of a tree, have there.

        Args:
            positions: Any shape; ``[.., n, m]`` with nodes.
            nodes: ``[n]``; a position is none behind its node's.
        """
        if nodes is not None:
            depth = (positions - self.length).clamp_(0, self._ancestors.shape[1] - 1)
            ancestors = self.length + self._ancestors[nodes[:, None], depth]
            positions = torch.where(positions < self.length, positions, ancestors)
        return self.table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


class SparseAttention:
    """Compressed keys, block selection and the attention of the chosen blocks.

    Args:
        architecture: The model's sizes.
        buffers: The buffers, by name: ``kv`` ``[layers, 2 kv_heads, pages * 64, D]``, ``fine`` and ``coarse``
            ``[layers, pages, kv_heads, slots, D]``; ``kv_scales`` ``[layers, 2 kv_heads, pages * 64]`` where keys and
            values are quantized.
        rule: Which blocks a query attends to.
    """

    def __init__(
        self, architecture: Architecture, buffers: Mapping[str, torch.Tensor], rule: SelectionRule
    ) -> None:
        self._a = architecture
        self._kv = buffers["kv"]
        self._scales = buffers.get("kv_scales")
        self._fine, self._coarse = buffers["fine"], buffers["coarse"]
        self.rule = rule

    def begin(
        self, batch: StepBatch, trees: Mapping[int, Sequence[Sequence[int]]]
    ) -> tuple[SparseSequence, ...]:
        """Prepare a step.

        Args:
            batch: The step.
            trees: The paths to the nodes of each tree, by its sequence.
        """
        starts, lengths = batch.sequence_starts.tolist(), batch.lengths.tolist()
        self._sequences = tuple(
            SparseSequence(
                table,
                starts[s],
                lengths[s],
                starts[s + 1] - starts[s],
                dense_below=self.rule.dense_below,
                paths=trees.get(s),
            )
            for s, table in enumerate(batch.page_tables)
        )
        return self._sequences

    def compress(self, layer: int) -> None:
        """Write the compressed keys that the step's tokens complete; keys and values are stored already."""
        for sequence in self._sequences:
            sequence.node_keys.clear()
            for row, place in sequence.completing:
                self._compress(layer, sequence, row, place)

    def keep(self, index: int, accepted: int) -> None:
        """A path was accepted, and its keys lie in place: write the compressed keys that it completes.

        Args:
            index: The sequence of the step that was begun last.
            accepted: Nodes of the path.
        """
        sequence = self._sequences[index]
        for place in range(sequence.length, sequence.length + accepted):
            for layer in range(self._a.layers):
                self._compress(layer, sequence, None, place)

    def _compress(self, layer: int, sequence: SparseSequence, row: int | None, place: int) -> None:
        """The compressed keys that the token at ``place`` completes: into the pages, or to node ``row`` of a tree."""
        kinds = (
            (KERNEL, STRIDE, self._fine[layer]),
            (COARSE_KERNEL, COARSE_STRIDE, self._coarse[layer]),
        )
        node = row if sequence.paths is not None else None
        for kernel, stride, pool in kinds:
            if place % stride != stride - 1 or place < kernel - 1:
                continue
            # Rows and summands in one order for every cut of the prompt: one mean at a time.
            keys = self._keys(layer, sequence, place - kernel + 1, place + 1, node)  # [kv_heads, kernel, D]
            wide = keys.double() if keys.dtype == torch.float64 else keys.float()
            mean = (wide.sum(1) / kernel).to(pool.dtype)
            if node is None:
                pool[sequence.table[place // PAGE_TOKENS], :, place % PAGE_TOKENS // stride] = mean
            else:
                sequence.node_keys[node, stride] = mean

    def attend(self, layer: int, sequence: SparseSequence, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the sparse queries of one sequence.

        Args:
            layer: Its index.
            sequence: Whose queries they are.
            q: Rotated queries of all its new tokens, ``[count, heads, D]``.
            out: Where results go, ``[count, heads, D]``; rows of dense queries are left alone.
        """
        fine = compressed_keys(self._fine[layer], sequence.table)
        coarse = compressed_keys(self._coarse[layer], sequence.table)
        if sequence.paths is not None:
            for nodes in sequence.alike:
                # What the deepest completes is there for all of them, behind what the others see.
                path = max((sequence.paths[node] for node in nodes.tolist()), key=len)
                _lay_over(fine, sequence, path, KERNEL, STRIDE)
                _lay_over(coarse, sequence, path, COARSE_KERNEL, COARSE_STRIDE)
                for rows in nodes.split(SPARSE_QUERIES):
                    self._attend_rows(
                        layer, sequence, q, out, rows=rows, fine=fine, coarse=coarse, nodes=rows
                    )
            return
        for first in range(sequence.dense, sequence.count, SPARSE_QUERIES):
            rows = torch.arange(first, min(first + SPARSE_QUERIES, sequence.count))
            self._attend_rows(layer, sequence, q, out, rows=rows, fine=fine, coarse=coarse)

    def _attend_rows(
        self,
        layer: int,
        sequence: SparseSequence,
        q: torch.Tensor,
        out: torch.Tensor,
        *,
        rows: torch.Tensor,  # [n]
        fine: torch.Tensor,
        coarse: torch.Tensor,
        nodes: torch.Tensor | None = None,
    ) -> None:
        """Some queries of a chain, or nodes of a tree."""
        positions, queries = sequence.positions[rows], q[rows]
        scores = block_scores(queries, positions, fine, coarse, lse=self.rule.lse)
        chosen = choose(scores, positions, self.rule)  # [kv_heads, n, blocks]
        # A query's blocks are gathered, so as many heads are taken at a time as memory was planned for.
        count = len(positions)
        together = max(1, SPARSE_QUERIES // count)
        shape = (count, self._a.kv_heads, self._a.group, -1)
        results = out.new_empty(queries.shape)
        of_queries, of_results = (each.view(shape).transpose(0, 1) for each in (queries, results))
        for first in range(0, self._a.kv_heads, together):
            heads = slice(first, min(first + together, self._a.kv_heads))
            of_results[heads] = self._attend_blocks(
                layer,
                heads,
                sequence,
                of_queries[heads],
                positions=positions,
                chosen=chosen[heads],
                nodes=nodes,
            )
        out[rows] = results

    def _attend_blocks(
        self,
        layer: int,
        heads: slice,
        sequence: SparseSequence,
        q: torch.Tensor,  # [heads, n, G, D]
        *,
        positions: torch.Tensor,  # [n]
        chosen: torch.Tensor,  # [heads, n, blocks]
        nodes: torch.Tensor | None,  # [n]
    ) -> torch.Tensor:
        """``[heads, n, G, D]``: each query over its own blocks, gathered."""
        most = int(chosen.sum(2).max())
        # The chosen blocks first, in rising order; what fills up a shorter row is masked.
        order = torch.sort(chosen.int(), dim=2, descending=True, stable=True)
        blocks, valid = order.indices[..., :most], order.values[..., :most].bool()  # [heads, n, most]
        tokens = blocks[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)  # [heads, n, most, 64]
        limits = positions[:, None, None]
        visible = (valid[..., None] & (tokens <= limits)).flatten(2)  # [heads, n, most * 64]
        # What lies behind a query is masked.
        slots = sequence.slots(torch.minimum(tokens, limits).flatten(2), nodes)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        keys = self._rows(layer, heads, slots).to(wide)  # [heads, n, most * 64, D]
        scores = q.to(wide) @ keys.transpose(2, 3) / math.sqrt(self._a.head_dim)  # [heads, n, G, most * 64]
        weights = scores.masked_fill_(~visible[:, :, None], -math.inf).softmax(-1)
        behind = slice(self._a.kv_heads + heads.start, self._a.kv_heads + heads.stop)
        return weights @ self._rows(layer, behind, slots).to(wide)

    def _keys(
        self, layer: int, sequence: SparseSequence, start: int, end: int, node: int | None = None
    ) -> torch.Tensor:
        """Stored keys of positions ``start`` to ``end``, ``[kv_heads, n, D]``."""
        positions = torch.arange(start, end)
        slots = (
            sequence.slots(positions)
            if node is None
            else sequence.slots(positions[None], torch.tensor([node])).flatten()
        )
        keys = self._kv[layer, : self._a.kv_heads].index_select(1, slots)
        if self._scales is None:
            return keys
        return dequantize(keys, self._scales[layer, : self._a.kv_heads].index_select(1, slots))

    def _rows(self, layer: int, heads: slice, slots: torch.Tensor) -> torch.Tensor:
        """What is stored in ``slots [heads, n, m]`` of some heads of keys, or of values behind these, ``[.., D]``."""
        which = torch.arange(heads.start, heads.stop)[:, None, None]
        rows = self._kv[layer][which, slots]
        return rows if self._scales is None else dequantize(rows, self._scales[layer][which, slots])


def _lay_over(
    keys: torch.Tensor,  # [kv_heads, J, D]
    sequence: SparseSequence,
    path: torch.Tensor,
    kernel: int,
    stride: int,
) -> None:
    """Put the compressed keys that a path completes in the place of those that the pages hold there."""
    for depth, node in enumerate(path.tolist()):
        mean = sequence.node_keys.get((node, stride))
        if mean is not None:
            keys[:, (sequence.length + depth - kernel + 1) // stride] = mean
