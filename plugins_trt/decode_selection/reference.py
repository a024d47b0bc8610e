"""Decode block selection in plain torch, in fp32, one query at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from plugins_trt.append.reference import path_slots
from plugins_trt.contract import BLOCK, COARSE_KERNEL, COARSE_STRIDE, KERNEL, STRIDE

if TYPE_CHECKING:
    from plugins_trt.append.reference import Pages
    from plugins_trt.contract import SelectionRule


def compressed_keys(
    pages: Pages,
    table: torch.Tensor,  # [max_pages]
    *,
    length: int,
    position: int,
    mask: int | None,
    start: int,
    node_keys: torch.Tensor | None,  # [T, Hkv, D]
    kernel: int,
    stride: int,
) -> torch.Tensor:
    """The compressed keys that the query at `position` sees, [count, Hkv, D], as they are stored."""
    count = max(0, (position + 1 - kernel) // stride + 1)
    stored = count if mask is None else max(0, min(count, (length - kernel) // stride + 1))
    pool = pages.fine if stride == STRIDE else pages.coarse
    last = torch.arange(stored, device=table.device) * stride + kernel - 1  # the token that completes each
    keys = pool[table[last // BLOCK].long(), :, last % BLOCK // stride]
    if stored < count and mask is not None and node_keys is not None:
        slots = path_slots(length, position, mask, table.device)
        nodes = [start + int(slots[j * stride + kernel - 1]) - length for j in range(stored, count)]
        keys = torch.cat([keys, node_keys[nodes]])
    return keys


def block_scores(
    pages: Pages,
    q: torch.Tensor,  # [H, D], one query
    table: torch.Tensor,  # [max_pages]
    *,
    length: int,
    position: int,
    rule: SelectionRule,
    mask: int | None = None,
    start: int = 0,
    node_fine: torch.Tensor | None = None,
    node_coarse: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The score of every block up to the query's own, [Hkv, blocks], before any block is forced."""
    heads, dim = q.shape
    own = position // BLOCK
    fine, coarse = (
        compressed_keys(
            pages,
            table,
            length=length,
            position=position,
            mask=mask,
            start=start,
            node_keys=nodes,
            kernel=kernel,
            stride=stride,
        ).float()
        for kernel, stride, nodes in (
            (KERNEL, STRIDE, node_fine),
            (COARSE_KERNEL, COARSE_STRIDE, node_coarse),
        )
    )
    kv_heads = pages.keys.shape[1]
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    grouped = q.float().view(kv_heads, heads // kv_heads, dim) * factor
    scores = torch.zeros(kv_heads, own + 1, device=q.device)
    statistics = fine if rule.lse == "exact" else coarse
    if len(statistics) == 0 or len(fine) == 0:
        return scores
    lse = torch.einsum("kgd,jkd->kgj", grouped, statistics).logsumexp(-1, keepdim=True)
    weights = (torch.einsum("kgd,jkd->kgj", grouped, fine) - lse).exp().sum(1)  # [Hkv, count]
    # Key j is slot j + 1; block b takes slots 4b .. 4b + 4.
    slots = torch.zeros(kv_heads, 4 * (own + 1) + 1, device=q.device)
    slots[:, 1 : 1 + weights.shape[1]] = weights
    scores[:] = slots.unfold(1, 5, 4).max(-1).values
    return scores


def choose(scores: torch.Tensor, rule: SelectionRule) -> torch.Tensor:
    """The attended blocks of a query, bool [Hkv, blocks]; `scores` ends with its own block."""
    blocks = scores.shape[1]
    ranks = scores.clone().double()
    ranks[:, : rule.init_blocks] = math.inf
    ranks[:, max(0, blocks - rule.local) :] = math.inf
    order = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : rule.total]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, value=True)
