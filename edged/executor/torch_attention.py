"""Attention over the KV pages on the CPU: append the new tokens, then attend, one sequence at a time.

Pages of a head lie one after the other, ``[layer, k heads then v heads, page * 64 + token, D]``, so that a sequence
whose pages are consecutive is one view and nothing is copied. A sequence in scattered pages is looked at in pieces:
short runs are gathered into a scratch tile, and partial results are merged by their log-sum-exp (the online softmax of
FlashAttention, arXiv 2205.14135, section 3.1). What a query sees does not depend on how the prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.executor.torch_history import History
from edged.executor.torch_sparse import SparseAttention
from edged.executor.torch_tiles import LEAST_KEYS, LEAST_QUERIES, TileAttention, causal_mask, merge
from edged.executor.torch_tree import branching_trees, move_nodes, tree_mask
from edged.memory.buffers import PAGE_TOKENS
from plugins_trt.quantized.reference import dequantize, format_of, quantize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edged.executor.base import Int32Array, StepBatch
    from edged.executor.torch_history import Piece
    from edged.executor.torch_sparse import SparseSequence
    from edged.models.architecture import Architecture
    from plugins_trt.contract import SelectionRule

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - sdpa itself hides the log-sum-exp


CAUSAL_ROWS = 128
"""New tokens of a sequence that are attended causally in one call. torch's kernel computes all scores of 512 keys and forgets
those that a query must not see: of a chunk of 512 tokens, half. Blocks see the ones before them as they see the history."""

TILED_ROWS = 256
"""The same where tiles are attended, with those before them at once: a mask costs less there than another call."""


@dataclass(frozen=True)
class NewBlock:
    """Some new tokens of a sequence, and those before them. Shapes: ``[kv_heads, G, n, D]``."""

    rows: slice
    q: torch.Tensor
    out: torch.Tensor
    k: torch.Tensor  # up to the block's end
    v: torch.Tensor
    mask: torch.Tensor | None = None  # [G n, n], where tiles are attended

    @property
    def own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the block itself."""
        return self.k[:, :, self.rows.start :], self.v[:, :, self.rows.start :]

    @property
    def earlier(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the step's earlier tokens."""
        return self.k[:, :, : self.rows.start], self.v[:, :, : self.rows.start]


@dataclass(frozen=True)
class AttendedSequence:
    """One sequence of the step. Shapes: one new token ``[1, kv_heads, G, D]``, else ``[kv_heads, G, T, D]``.

    All queries see the whole history, so the heads of a group may be the rows of one product there, of which torch's
    kernel makes larger ones: ``history_q`` is then ``[1, kv_heads, G T, D]``.
    """

    q: torch.Tensor
    out: torch.Tensor
    history_q: torch.Tensor
    history: tuple[Piece, ...]
    shape: tuple[int, int]  # leading dimensions of k and v views
    stride: tuple[int, int]
    blocks: tuple[NewBlock, ...] = ()  # none when the new token is part of the history
    mask: torch.Tensor | None = None  # [1, 1, T, T], added to the scores of the nodes of a tree


@dataclass(frozen=True)
class SparseQueries:
    """Sparse queries of one sequence of the step."""

    sequence: SparseSequence
    q: torch.Tensor  # [T, heads, D], of all its new tokens
    out: torch.Tensor  # [T, heads, D]


class CpuAttention:
    """Rotates, appends and attends.

    Args:
        architecture: The model's sizes.
        buffers: The flat buffers, by name.
        inverse_frequencies: fp32 ``[D / 2]``.
        rule: Which blocks a query attends to; None attends to everything.
    """

    def __init__(
        self,
        architecture: Architecture,
        buffers: Mapping[str, torch.Tensor],
        inverse_frequencies: torch.Tensor,
        rule: SelectionRule | None = None,
    ) -> None:
        a = architecture
        self._sparse = None if rule is None else SparseAttention(architecture, buffers, rule)
        self._a = a
        self._buffers = buffers
        self._kv = buffers["kv"]  # [layers, 2 kv_heads, pages * 64, D]
        self._layers = tuple(self._kv)
        self._history = History(architecture, buffers)
        self._inverse_frequencies = inverse_frequencies
        self._eps = torch.tensor(a.norm_eps, dtype=buffers["rotated"].dtype, device=self._kv.device)
        source = (
            buffers["rotated"] if self._history.widens else buffers.get("stored_heads", buffers["rotated"])
        )
        self._tiles = TileAttention.where_faster(_flash, a.kv_heads, a.head_dim, source.dtype)
        self._scales = buffers.get("kv_scales")  # [layers, 2 kv_heads, pages * 64]

    def begin(self, batch: StepBatch, qkv: torch.Tensor, attended: torch.Tensor) -> None:
        """Prepare a step: rotations, places of the new tokens, pieces of the histories.

        Args:
            batch: The step.
            qkv: ``[T, (heads + 2 kv_heads) D]``.
            attended: ``[T, heads D]``, where results go.
        """
        a = self._a
        tokens = len(batch.token_ids)
        half = a.head_dim // 2
        rotating = a.heads + a.kv_heads
        all_heads = rotating + a.kv_heads
        size = all_heads * tokens * a.head_dim

        self._angles(batch, tokens)
        self._rotated = self._buffers["rotated"][:size].view(all_heads, tokens, a.head_dim)
        stored = self._buffers.get("stored_heads")
        self._stored = self._rotated if stored is None else stored[:size].view_as(self._rotated)
        token, feature = qkv.stride()
        heads = qkv.as_strided(
            self._rotated.shape, (a.head_dim * feature, token, feature), qkv.storage_offset()
        )  # [heads, T, D]
        self._rotating, self._values = heads[:rotating], heads[rotating:]
        self._first, self._second = self._rotating[..., :half], self._rotating[..., half:]
        out = self._rotated[:rotating]
        self._first_out, self._second_out = out[..., :half], out[..., half:]
        self._values_out = self._rotated[rotating:]
        self._norm_scale = self._buffers["norm_scale"][: rotating * tokens].view(rotating, tokens, 1)
        self._new = self._stored[a.heads :]  # [2 kv_heads, T, D]
        self._source = self._rotated if self._history.widens else self._stored

        self._plan_append(batch)
        self.trees = branching_trees(batch)
        dense = list(range(len(batch.lengths)))
        self._sparse_queries: tuple[SparseQueries, ...] = ()
        if self._sparse is not None:
            sequences = self._sparse.begin(batch, self.trees)
            dense = [index for index in dense if sequences[index].has_dense]
            self._sparse_queries = tuple(
                self._queries(sequence, attended) for sequence in sequences if sequence.has_sparse
            )
        # Where a sequence has queries of both kinds, the sparse ones' results replace the dense ones'.
        self._sequences = tuple(self._sequence(batch, index, attended, tokens) for index in dense)

    def run(self, layer: int, qk_norm: torch.Tensor | None) -> None:
        """One layer: norm, rotate, append, attend.

        Args:
            layer: Its index.
            qk_norm: Norm weights of the query and key heads ``[heads + kv_heads, 1, D]``, where the model has them.
        """
        if qk_norm is not None:
            self._norm_heads(qk_norm)
        cos, sin = self._cos, self._sin
        torch.mul(self._first, cos, out=self._first_out)
        self._first_out.addcmul_(self._second, sin, value=-1)
        torch.mul(self._second, cos, out=self._second_out)
        self._second_out.addcmul_(self._first, sin)
        self._values_out.copy_(self._values)
        if self._scales is not None:
            exact = self._rotated[self._a.heads :]
            new, scales = quantize(exact, format_of(self._kv.dtype))
            exact.copy_(dequantize(new, scales))  # every later token sees the stored, rounded values
            self._append(self._layers[layer], new)
            self._append(self._scales[layer], scales)
        else:
            if self._stored is not self._rotated:
                self._stored.copy_(self._rotated)
                if self._history.widens:
                    self._rotated.copy_(self._stored)  # for the same reason
            self._append(self._layers[layer], self._new)
        for sequence in self._sequences:
            self._attend(sequence, layer)
        if self._sparse is not None:
            self._sparse.compress(layer)
            for queries in self._sparse_queries:
                self._sparse.attend(layer, queries.sequence, queries.q, queries.out)

    def keep(self, batch: StepBatch, paths: Mapping[int, Sequence[int]]) -> None:
        """Move the accepted nodes of trees to the slots behind their sequences' earlier tokens, in every layer.

        Args:
            batch: The step that was begun last, and ran.
            paths: Accepted nodes, root first, by the sequence.
        """
        for index, path in paths.items():
            if index not in self.trees:
                continue  # a chain: an accepted part of it lies where it belongs, its compressed keys, too
            pools = [self._buffers[name] for name in ("kv", "kv_scales") if name in self._buffers]
            move_nodes(pools, batch.page_tables[index], int(batch.lengths[index]), path)
            if self._sparse is not None:
                self._sparse.keep(index, len(path))

    def _append(self, pool: torch.Tensor, new: torch.Tensor) -> None:
        """Store the new tokens' ``[2 kv_heads, T, ..]`` in one layer's ``[2 kv_heads, slots, ..]``."""
        if self._slots is not None:
            pool.index_copy_(1, self._slots, new)
            return
        for rows, slots in self._runs:
            pool[:, slots].copy_(new[:, rows])

    def _angles(self, batch: StepBatch, tokens: int) -> None:
        """Cos and sin of the new positions, in fp32 as the published code has them, ``[T, D / 2]``."""
        half = self._a.head_dim // 2
        positions = self._buffers["positions"][:tokens]
        positions.copy_(torch.from_numpy(batch.positions))
        angles, cos, sin = (
            self._buffers[name][: tokens * half].view(tokens, half) for name in ("angles", "cos", "sin")
        )
        torch.mul(positions.view(tokens, 1), self._inverse_frequencies, out=angles)
        torch.cos(angles, out=cos)
        torch.sin(angles, out=sin)
        factor = self._a.rope.attention_factor
        if factor != 1.0:
            cos.mul_(factor)
            sin.mul_(factor)
        self._cos, self._sin = cos, sin

    def _norm_heads(self, weight: torch.Tensor) -> None:
        """RMS norm of each query and key head, in place."""
        scale = self._norm_scale  # [heads + kv_heads, T, 1]
        torch.linalg.vector_norm(self._rotating, dim=2, keepdim=True, out=scale)
        torch.addcmul(self._eps, scale, scale, value=1.0 / self._a.head_dim, out=scale)
        self._rotating.mul_(scale.rsqrt_()).mul_(weight)

    def _plan_append(self, batch: StepBatch) -> None:
        """Where the new tokens go: runs of slots when they are few, else one slot a token."""
        runs: list[tuple[slice, slice]] = []
        slots: list[Int32Array] = []
        for index, length in enumerate(batch.lengths.tolist()):
            start, end = int(batch.sequence_starts[index]), int(batch.sequence_starts[index + 1])
            where = np.arange(length, length + end - start, dtype=np.int32)
            places = batch.page_tables[index][where // PAGE_TOKENS] * PAGE_TOKENS + where % PAGE_TOKENS
            slots.append(places)
            breaks = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), end - start]
            runs.extend(
                (slice(start + a, start + b), slice(int(places[a]), int(places[a]) + b - a))
                for a, b in pairwise(breaks)
            )
        self._runs = runs
        self._slots: torch.Tensor | None = None
        if len(runs) > 2:  # two slice copies cost what one indexed copy does
            self._slots = self._buffers["slots"][: len(batch.token_ids)]
            self._slots.copy_(torch.from_numpy(np.concatenate(slots)))

    def _queries(self, sequence: SparseSequence, attended: torch.Tensor) -> SparseQueries:
        a = self._a
        rows = slice(sequence.start, sequence.start + sequence.count)
        token, feature = attended.stride()
        out = attended.as_strided(
            (attended.shape[0], a.heads, a.head_dim),
            (token, feature * a.head_dim, feature),
            attended.storage_offset(),
        )
        return SparseQueries(sequence, self._source[: a.heads, rows].transpose(0, 1), out[rows])

    def _sequence(
        self, batch: StepBatch, index: int, attended: torch.Tensor, tokens: int
    ) -> AttendedSequence:
        a = self._a
        start, end = int(batch.sequence_starts[index]), int(batch.sequence_starts[index + 1])
        count, past = end - start, int(batch.lengths[index])
        token, feature = attended.stride()
        depth = feature * a.head_dim
        q_stride = tokens * a.head_dim
        q_offset = self._source.storage_offset() + start * a.head_dim
        out_offset = attended.storage_offset() + start * token
        if count == 1:
            # The queries of a group are the rows of one small product; the new token is already in its page.
            shape, stride = (1, a.kv_heads), (0, self._history.head_stride)
            sizes = (1, a.kv_heads, a.group, a.head_dim)
            q = self._source.as_strided(sizes, (0, a.group * q_stride, q_stride, 1), q_offset)
            out = attended.as_strided(sizes, (0, a.group * depth, depth, feature), out_offset)
            history = self._history.cut(batch.page_tables[index], past + 1, shape, stride)
            return AttendedSequence(q, out, q, history, shape, stride)
        sizes = (a.kv_heads, a.group, count, a.head_dim)
        q = self._source.as_strided(sizes, (a.group * q_stride, q_stride, a.head_dim, 1), q_offset)
        out = attended.as_strided(sizes, (a.group * depth, depth, token, feature), out_offset)
        k_offset = q_offset + a.heads * q_stride
        new_stride = (q_stride, 0, a.head_dim, 1)
        new_k = self._source.as_strided(sizes, new_stride, k_offset)
        new_v = self._source.as_strided(sizes, new_stride, k_offset + a.kv_heads * q_stride)
        if count == tokens:  # alone in the step: the rows of a group's heads follow each other
            history_q = q.view(1, a.kv_heads, a.group * count, a.head_dim)
            shape, stride = (1, a.kv_heads), (0, self._history.head_stride)
        else:
            history_q = q
            shape, stride = (a.kv_heads, a.group), (self._history.head_stride, 0)
        history = self._history.cut(batch.page_tables[index], past, shape, stride)
        paths = self.trees.get(index)
        mask = None if paths is None else tree_mask(paths, self._source.dtype)
        blocks = self._blocks(q, out, new_k, new_v, has_tree=mask is not None)
        return AttendedSequence(q, out, history_q, history, shape, stride, blocks, mask)

    def _attend(self, sequence: AttendedSequence, layer: int) -> None:
        """All queries of one sequence over its history and its new tokens."""
        out = lse = None
        for piece in sequence.history:
            k, v = self._history.load(piece, sequence.shape, sequence.stride, layer)
            part, part_lse = self._over(sequence.history_q, k, v)
            out, lse = (part, part_lse) if out is None or lse is None else merge(out, lse, part, part_lse)
        if not sequence.blocks:
            assert out is not None, "the only new token is in the history"  # noqa: S101
            sequence.out.copy_(out)
            return
        if out is not None and lse is not None and sequence.history_q is not sequence.q:
            sizes = sequence.q.shape
            out, lse = out[0].view(sizes), lse[0].view(sizes[:-1])
        for block in sequence.blocks:
            part, part_lse = self._over_new(block, sequence.mask)
            if out is not None and lse is not None:
                part, _ = merge(out[:, :, block.rows], lse[:, :, block.rows], part, part_lse)
            block.out.copy_(part)

    def _over_new(self, block: NewBlock, tree: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries of a block over the step's tokens up to its end."""
        if self._tiles is not None and block.mask is not None:
            return self._tiles(block.q, block.k, block.v, block.mask)
        part, lse = _flash(block.q, *block.own, is_causal=tree is None, attn_mask=tree)
        if block.rows.start == 0:
            return part, lse
        earlier, earlier_lse = _flash(block.q, *block.earlier)
        return merge(earlier, earlier_lse, part, lse)

    def _over(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[B, N, T, D]`` over keys that all of them see."""
        rows = q.shape[2] * (q.shape[1] if k.stride(1) == 0 else 1)
        if self._tiles is not None and rows >= LEAST_QUERIES and k.shape[2] >= LEAST_KEYS:
            return self._tiles(q, k, v)
        out, lse = _flash(q, k, v)
        return out, lse

    def _blocks(
        self, q: torch.Tensor, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, has_tree: bool
    ) -> tuple[NewBlock, ...]:
        """The new tokens ``[kv_heads, G, T, D]`` of a sequence; those of a tree are one block."""
        count = q.shape[2]
        tiled = self._tiles is not None and not has_tree and self._a.group * count >= LEAST_QUERIES
        size = count if has_tree else TILED_ROWS if tiled else CAUSAL_ROWS
        blocks = []
        masks: dict[int, torch.Tensor] = {}
        for start in range(0, count, size):
            end = min(start + size, count)
            rows = slice(start, end)
            if tiled and end - start not in masks:
                masks[end - start] = causal_mask(end - start, self._a.group)
            mask = masks.get(end - start)
            blocks.append(NewBlock(rows, q[:, :, rows], out[:, :, rows], k[:, :, :end], v[:, :, :end], mask))
        return tuple(blocks)
