"""`rms_norm` in plain torch."""

from __future__ import annotations

import torch


def rms_norm(
    residual: torch.Tensor,  # [T, hidden]
    weight: torch.Tensor,  # [hidden]
    branch: torch.Tensor | None = None,  # [T, hidden]
    *,
    scale: float = 1.0,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual and its norm, both in the residual's dtype, computed in fp32."""
    if branch is not None:
        residual = (residual.float() + scale * branch.float()).to(residual.dtype)
    x = residual.float()
    out = weight.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return residual, out.to(residual.dtype)
