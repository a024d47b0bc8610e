"""`embedding` in plain torch."""

from __future__ import annotations

import torch


def embedding(ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Scaled rows of `table`, [T, hidden]; zeros for ids outside it."""
    inside = (ids >= 0) & (ids < len(table))
    rows = table[torch.where(inside, ids, 0).long()].float() * scale
    return (rows * inside[:, None]).to(table.dtype)
