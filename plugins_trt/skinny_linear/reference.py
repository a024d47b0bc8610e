"""`skinny_linear` in plain torch, in fp32."""

from __future__ import annotations

import torch


def skinny_linear(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[M, N] in `dtype` (the one of x when None), rounded once."""
    out = x.float() @ weight.float().t()
    if bias is not None:
        out = out + bias.float()
    return (scale * out).to(x.dtype if dtype is None else dtype)


def skinny_gated(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [2 N, K]
    bias: torch.Tensor | None = None,  # [2 N]
) -> torch.Tensor:
    """[M, N] in the dtype of x, rounded once."""
    gate, up = skinny_linear(x, weight, bias, dtype=torch.float32).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
