"""The product with ternary weights in plain torch, in fp32, from the layout that the kernels read."""

from __future__ import annotations

import torch

from plugins_trt.packed.reference import finished, places_of


def widen(tiles: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights of every row of the tiles, float32 `[16 tiles, 128 blocks]`.

    Args:
        tiles: int32 or uint32 `[tiles, blocks, 32, 4]` (see layout.py).
        scales: int32 or uint32 `[tiles, blocks, 8, scales of a block]`, or `[tiles, 1, 8, 1]`.
    """
    count, blocks = tiles.shape[:2]
    words = (
        tiles.view(torch.int32).to(torch.int64).view(count, blocks, 8, 4, 2, 2)
    )  # g, t, half of outputs, word
    places = torch.tensor(
        [[14 - 2 * pair + 16 * one for one in range(2)] for pair in range(8)], device=tiles.device
    )
    codes = (words[..., None, None] >> places) & 3  # tile, block, g, t, half, word, pair, one of it
    numbers = torch.where(codes % 2 == 1, 2 - codes, 0)  # 01: 1, 11: -1
    rows = numbers.permute(0, 4, 2, 1, 5, 6, 3, 7).reshape(16 * count, -1)
    bits = scales.view(torch.int32).to(torch.int64)
    halves = torch.stack([bits & 0xFFFF, bits >> 16 & 0xFFFF], 1).permute(
        0, 1, 3, 2, 4
    )  # tile, half, g, block, scale
    of_rows = halves.reshape(16 * count, -1).to(torch.int32).to(torch.uint16).view(torch.float16).float()
    return (rows.view(len(rows), of_rows.shape[1], -1).float() * of_rows.unsqueeze(-1)).flatten(1)


def widen_rows(
    tiles: torch.Tensor,
    scales: torch.Tensor,
    *,
    outputs: int,
    inputs: int,
    first: int,
    rows: int,
    gated: bool = False,
) -> torch.Tensor:
    """Some rows of the weight in the checkpoint's order, float32 `[rows, K]`."""
    place = places_of(outputs, gated=gated)
    return widen(tiles, scales)[place[first : first + rows].to(tiles.device), :inputs]


def ternary_linear(
    x: torch.Tensor,  # [M, K]
    tiles: torch.Tensor,
    scales: torch.Tensor,
    *,
    outputs: int,
    bias: torch.Tensor | None = None,  # [outputs], of gated weights [gate; up]
    residual: torch.Tensor | None = None,  # [M, outputs]
    gated: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias + residual`, or `silu(gate) * up` of gated weights: float32 `[M, outputs]`."""
    sums = x.float() @ widen(tiles, scales)[:, : x.shape[1]].t()  # [M, 16 tiles]
    return finished(sums, outputs, bias, residual, gated=gated)
