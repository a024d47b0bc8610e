"""`silu_mul` in plain torch."""

from __future__ import annotations

import torch


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # [T, size] each
    """silu(gate) * up in fp32, rounded once."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
