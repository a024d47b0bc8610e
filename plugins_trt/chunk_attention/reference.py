"""Chunk attention in plain torch and float32, the meaning that the kernels are held to."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from plugins_trt.contract import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

_SCORES = 1 << 28  # elements of one slice of scores


def attend(
    q: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    chosen: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of some queries of one sequence.

    Args:
        q: `[n, H, D]`.
        positions: int `[n]`.
        keys: `[kv_heads, L, D]`, of tokens 0 .. L - 1.
        values: `[kv_heads, L, D]`.
        chosen: bool `[kv_heads, n, blocks]`, the blocks each query attends to; None attends to all.
        scale: of the products; 1 / sqrt(D) when None.

    Returns:
        float32 `[n, H, D]`.
    """
    kv_heads, length, dim = keys.shape
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    group = q.shape[1] // kv_heads
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    token = torch.arange(length, device=q.device)
    step = max(1, _SCORES // (q.shape[1] * length))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        heads = q[rows].float().reshape(-1, kv_heads, group, dim).permute(1, 2, 0, 3)  # [G, h, n, D]
        scores = heads @ keys.float().unsqueeze(1).transpose(-1, -2) * scale  # [G, h, n, L]
        visible = (token[None, :] <= positions[rows, None])[None]  # [1, n, L]
        if chosen is not None:
            visible = visible & chosen[:, rows].repeat_interleave(BLOCK, dim=-1)[..., :length]
        weights = scores.masked_fill(~visible.unsqueeze(1), -math.inf).softmax(-1)
        out[rows] = (weights @ values.float().unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def chunk_attention(
    q: Tensor,
    positions: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    sequence_starts: Tensor,
    page_tables: Tensor,
    chosen: Tensor | None = None,
    dense_below: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of a ragged batch over pages: dense queries over everything before, sparse ones over their blocks.

    Args:
        q: `[T, H, D]`.
        positions: int `[T]`.
        keys: `[pages, kv_heads, 64, D]`, one layer's pool.
        values: likewise.
        sequence_starts: int `[S + 1]`.
        page_tables: int `[S, max_pages]`.
        chosen: bool `[kv_heads, T, max_pages]`; None makes every query dense.
        dense_below: a query at position i is dense while i + 1 < dense_below; None: always.
        scale: of the products; 1 / sqrt(D) when None.

    Returns:
        float32 `[T, H, D]`; zeros for padding.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = sequence_starts.tolist()
    for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            continue
        rows = slice(start, end)
        length = int(positions[rows].max()) + 1
        table = page_tables[sequence, : -(-length // BLOCK)].long()
        k = keys[table].transpose(0, 1).flatten(1, 2)[:, :length]  # [G, L, D]
        v = values[table].transpose(0, 1).flatten(1, 2)[:, :length]
        mask = None
        if chosen is not None and dense_below is not None:
            dense = (positions[rows] + 1 < dense_below)[None, :, None]
            mask = chosen[:, rows, : len(table)] | dense
        out[rows] = attend(q[rows], positions[rows], k, v, chosen=mask, scale=scale)
    return out
