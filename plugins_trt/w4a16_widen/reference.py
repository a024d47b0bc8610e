"""`w4a16_widen` in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins_trt.packed.reference import places_of
from plugins_trt.w4a16_linear.reference import widen

if TYPE_CHECKING:
    import torch


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
    place = places_of(outputs, gated=gated)
    return widen(tiles, groups)[place[first : first + rows].to(tiles.device)]
