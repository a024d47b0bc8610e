"""`skinny_linear` in plain torch, in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
