"""The product with 4-bit weights in plain torch, in fp32, from the layout that the kernels read."""

from __future__ import annotations

import torch

from plugins_trt.packed.reference import finished


def widen(tiles: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The weights of every row of the tiles, float32 `[16 tiles, K]`.

    Args:
        tiles: int32 or uint32 `[tiles, K / 64, 32, 4]` (see layout.py).
        groups: int32 or uint32 `[tiles, K / G, 8, 2]`.
    """
    count, steps = tiles.shape[:2]
    words = tiles.view(torch.int32).to(torch.int64).view(count, steps, 8, 4, 2, 2)  # g, t, half, word
    places = torch.tensor([[4 * pair, 4 * pair + 16] for pair in range(4)], device=tiles.device)
    numbers = (words[..., None, None] >> places) & 15  # tile, step, g, t, half, word, pair, one of it
    rows = numbers.permute(0, 4, 2, 1, 5, 6, 3, 7).reshape(16 * count, 64 * steps)
    meta = (
        groups.view(torch.int32).to(torch.int64).permute(0, 3, 2, 1).reshape(16 * count, -1)
    )  # [rows, K / G]
    scales = (meta & 0xFFFF).to(torch.int32).to(torch.uint16).view(torch.float16).float()
    zeros = (meta >> 16) & 0xFFFF
    grouped = rows.view(len(rows), meta.shape[1], -1)
    return ((grouped - zeros.unsqueeze(-1)).float() * scales.unsqueeze(-1)).flatten(1)


def w4a16_linear(
    x: torch.Tensor,  # [M, K]
    tiles: torch.Tensor,
    groups: torch.Tensor,
    *,
    outputs: int,
    bias: torch.Tensor | None = None,  # [outputs], of gated weights [gate; up]
    residual: torch.Tensor | None = None,  # [M, outputs]
    gated: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias + residual`, or `silu(gate) * up` of gated weights: float32 `[M, outputs]`."""
    sums = x.float() @ widen(tiles, groups).t()  # [M, 16 tiles]
    return finished(sums, outputs, bias, residual, gated=gated)
