"""Decode attention in plain torch, in fp32, one query at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from plugins_trt.append.reference import path_slots
from plugins_trt.contract import BLOCK

if TYPE_CHECKING:
    from plugins_trt.append.reference import Pages


def attend(
    pages: Pages,
    q: torch.Tensor,  # [H, D], one query
    table: torch.Tensor,  # [max_pages]
    *,
    length: int,
    position: int,
    mask: int | None = None,
    chosen: torch.Tensor | None = None,  # bool [Hkv, blocks], None: dense
    scale: float | None = None,
) -> torch.Tensor:
    """The query's output, float32 [H, D]."""
    heads, dim = q.shape
    kv_heads = pages.keys.shape[1]
    slots = path_slots(length, position, mask, q.device)  # of positions 0 .. position
    keys, values = (pages.read(kind, table, slots) for kind in ("keys", "values"))  # [n, Hkv, D]
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    scores = torch.einsum("kgd,nkd->kgn", q.float().view(kv_heads, heads // kv_heads, dim) * factor, keys)
    if chosen is not None:
        blocks = torch.arange(position + 1, device=q.device) // BLOCK
        scores = scores.masked_fill(~chosen[:, blocks].unsqueeze(1), -math.inf)
    return torch.einsum("kgn,nkd->kgd", scores.softmax(-1), values).reshape(heads, dim)
