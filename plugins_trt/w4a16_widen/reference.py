"""`w4a16_widen` in plain torch."""

from __future__ import annotations

import torch

from plugins_trt.w4a16_linear.layout import rows_of_tiles
from plugins_trt.w4a16_linear.reference import widen


def widen_rows(
    tiles: torch.Tensor,  # int32 [tiles, K / 64, 32, 4]
    groups: torch.Tensor,  # int32 [tiles, K / G, 8, 2]
    *,
    outputs: int,
    first: int,
    rows: int,
    gated: bool = False,
) -> torch.Tensor:
    """Some rows of the weight in the checkpoint's order, float32 `[rows, K]`."""
    order = torch.from_numpy(rows_of_tiles(outputs, gated=gated))  # [16 tiles]
    place = torch.empty(outputs, dtype=torch.int64)
    place[order[order >= 0]] = torch.nonzero(order >= 0)[:, 0]
    return widen(tiles, groups)[place[first : first + rows].to(tiles.device)]
