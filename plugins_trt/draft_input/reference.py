"""`draft_input` in plain torch, in fp32 but for the rounding of what is stored."""

from __future__ import annotations

import torch

from plugins_trt.contract import BLOCK


def draft_rows(
    embedding: torch.Tensor,  # [V, H]
    token_ids: torch.Tensor,  # int [R]
    hidden: torch.Tensor,  # [any, H]
    hidden_rows: torch.Tensor,  # int [R]
    *,
    embedding_norm: torch.Tensor | None = None,  # [H]
    hidden_norm: torch.Tensor | None = None,
    scale: float = 1.0,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """The rows `[R, 2 H]`."""

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()

    is_padding = token_ids < 0
    embedded = embedding[token_ids.clamp(min=0).long()].float() * scale
    states = hidden[hidden_rows.long().masked_fill(is_padding, 0)].float()
    rows = torch.cat([normed(embedded, embedding_norm), normed(states, hidden_norm)], 1)
    return rows.masked_fill(is_padding[:, None], 0.0).to(embedding.dtype)


def window(positions: torch.Tensor, kv_heads: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks `[R, Hkv, total]` and counts `[R, Hkv]` of queries at `positions`."""
    own = positions.long() // BLOCK
    first = (own - (total - 1)).clamp(min=0)
    counts = own - first + 1
    places = torch.arange(total, device=positions.device)
    blocks = torch.where(places < counts[:, None], first[:, None] + places, -1)
    return (
        blocks[:, None].repeat(1, kv_heads, 1).int(),
        counts[:, None].repeat(1, kv_heads).int(),
    )
