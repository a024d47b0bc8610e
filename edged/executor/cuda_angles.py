"""Cos and sin of every position on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edged.models.architecture import Architecture


def fill_angles(
    architecture: Architecture, context_length: int, cosine: torch.Tensor, sine: torch.Tensor
) -> None:
    """Fill the tables, fp32 ``[positions, D / 2]``: products in fp32, as the published code has them.

    Args:
        architecture: Whose rotary embedding it is.
        context_length: What long contexts are told by; the tables may reach further.
        cosine: Filled.
        sine: Filled.
    """
    rope = architecture.rope
    frequencies = rope.inverse_frequencies(architecture.head_dim, context_length)  # [D / 2]
    positions = torch.arange(len(cosine), dtype=torch.float32)[:, None]
    angles = positions * torch.from_numpy(frequencies)[None, :]  # [positions, D / 2], on the host
    cosine.copy_(angles.cos() * rope.attention_factor)
    sine.copy_(angles.sin() * rope.attention_factor)
