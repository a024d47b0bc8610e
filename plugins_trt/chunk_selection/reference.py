"""Block selection in plain torch and float32, the meaning that the kernels are held to."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from plugins_trt.contract import BLOCK, COARSE_KERNEL, COARSE_STRIDE, KERNEL, STRIDE, SelectionRule

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 64  # queries compared at a time


def compressed_keys(pool: Tensor, table: Tensor) -> Tensor:
    """The compressed keys of a sequence in order, the one of index -1 dropped.

    Args:
        pool: `[pages, kv_heads, slots, D]`, of one layer.
        table: int, the sequence's pages.

    Returns:
        float32 `[kv_heads, len(table) * slots - 1, D]`.
    """
    pages = pool[table.long()].float()  # [P, G, slots, D]
    return pages.transpose(0, 1).flatten(1, 2)[:, 1:]


def block_scores(
    q: Tensor, positions: Tensor, fine: Tensor, coarse: Tensor, *, lse: str, scale: float | None = None
) -> Tensor:
    """Scores of the blocks of one sequence (InfLLM-v2, arXiv 2509.24663).

    Args:
        q: `[n, H, D]` queries.
        positions: int `[n]`.
        fine: `[kv_heads, J, D]`, fine compressed keys 0, 1, ...
        coarse: `[kv_heads, C, D]`, coarse ones.
        lse: "approximate" takes the softmax's maximum and sum from the coarse keys, "exact" from the fine.
        scale: of the products; 1 / sqrt(D) when None.

    Returns:
        float32 `[kv_heads, n, ceil((J + 1) / 4)]`: of each block the largest, over the compressed keys 4b - 1 to
        4b + 3, of the sum over the heads of the softmaxed products.
    """
    kv_heads, keys, dim = fine.shape
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    blocks = -(-(keys + 1) // 4)
    group = q.shape[1] // kv_heads
    result = q.new_zeros((kv_heads, q.shape[0], blocks), dtype=torch.float32)
    ends = torch.arange(keys, device=q.device) * STRIDE + KERNEL - 1
    coarse_ends = torch.arange(coarse.shape[1], device=q.device) * COARSE_STRIDE + COARSE_KERNEL - 1
    for start in range(0, q.shape[0], _ROWS):
        rows = (
            q[start : start + _ROWS].float().reshape(-1, kv_heads, group, dim).permute(1, 2, 0, 3)
        )  # [G, h, n, D]
        at = positions[start : start + _ROWS]
        products = rows @ fine.float().unsqueeze(1).transpose(-1, -2) * scale  # [G, h, n, J]
        visible = ends[None, :] <= at[:, None]  # [n, J]
        if lse == "exact":
            total = products.masked_fill(~visible, -math.inf).logsumexp(-1, keepdim=True)
        else:
            coarse_products = rows @ coarse.float().unsqueeze(1).transpose(-1, -2) * scale
            seen = coarse_ends[None, :] <= at[:, None]
            total = coarse_products.masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True)
        # A head whose softmax runs over nothing gives nothing.
        total = total.masked_fill(total == -math.inf, math.inf)
        scores = (products - total).exp().masked_fill(~visible, 0.0).sum(1)  # [G, n, J]
        padded = torch.nn.functional.pad(scores, (1, blocks * 4 + 1 - keys - 1))  # key -1, then 0, 1, ...
        result[:, start : start + _ROWS] = padded.unfold(-1, 5, 4).amax(-1)
    return result


def choose(scores: Tensor, positions: Tensor, rule: SelectionRule) -> Tensor:
    """The chosen blocks.

    Args:
        scores: float32 `[kv_heads, n, blocks]`.
        positions: int `[n]`.
        rule: first, local and best blocks.

    Returns:
        bool `[kv_heads, n, blocks]`; nothing for a query that is dense.
    """
    blocks = scores.shape[-1]
    index = torch.arange(blocks, device=scores.device)
    own = (positions // BLOCK)[:, None]  # [n, 1]
    forced = (index < rule.init_blocks) | ((index > own - rule.local) & (index <= own))
    ranked = scores.masked_fill(forced, math.inf).masked_fill(index > own, -math.inf)
    # A stable sort keeps the smaller index first among equals; forced blocks are put before infinite scores.
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    first = torch.sort(forced.expand_as(scores).gather(-1, order).int(), dim=-1, descending=True, stable=True)
    order = order.gather(-1, first.indices)
    rank = torch.empty_like(order).scatter_(-1, order, index.expand_as(order).contiguous())
    sparse = (positions + 1 >= rule.dense_below)[:, None]
    return (rank < rule.total) & (index <= own) & sparse


def chunk_selection(
    q: Tensor,
    positions: Tensor,
    *,
    fine: Tensor,
    coarse: Tensor,
    sequence_starts: Tensor,
    page_tables: Tensor,
    rule: SelectionRule,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Selection over a ragged batch.

    Args:
        q: `[T, H, D]`.
        positions: int `[T]`.
        fine: `[pages, kv_heads, 4, D]`, one layer's pool.
        coarse: `[pages, kv_heads, 1, D]`.
        sequence_starts: int `[S + 1]`.
        page_tables: int `[S, max_pages]`.
        rule: the selection's scalars.
        scale: of the products; 1 / sqrt(D) when None.

    Returns:
        Chosen blocks, bool, and scores, float32, both `[kv_heads, T, max_pages]`.
    """
    shape = (fine.shape[1], q.shape[0], page_tables.shape[1])
    chosen = torch.zeros(shape, dtype=torch.bool, device=q.device)
    scores = torch.zeros(shape, dtype=torch.float32, device=q.device)
    starts = sequence_starts.tolist()
    for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            continue
        pages = int(positions[start:end].max()) // BLOCK + 1
        table = page_tables[sequence, :pages]
        rows = slice(start, end)
        scores[:, rows, :pages] = block_scores(
            q[rows],
            positions[rows],
            compressed_keys(fine, table),
            compressed_keys(coarse, table),
            lse=rule.lse,
            scale=scale,
        )
        chosen[:, rows, :pages] = choose(scores[:, rows, :pages], positions[rows], rule)
    return chosen, scores


def pack_bitmap(chosen: Tensor) -> Tensor:
    """The bitmap form of `[..., blocks]` booleans: int32 `[..., ceil(blocks / 32)]`."""
    blocks = chosen.shape[-1]
    padded = torch.nn.functional.pad(chosen, (0, -blocks % 32))
    padded = padded.reshape(*padded.shape[:-1], -1, 32)
    weights = torch.ones((), dtype=torch.int64, device=chosen.device) << torch.arange(
        32, device=chosen.device
    )
    packed = (padded * weights).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack_bitmap(words: Tensor, blocks: int) -> Tensor:
    """The booleans `[..., blocks]` of a bitmap of 32-bit words."""
    bits = torch.arange(32, device=words.device)
    return ((words.to(torch.int64).unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :blocks].bool()
