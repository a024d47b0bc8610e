"""Tiles of packed weights: 16 outputs that lie together; of gated weights eight of gate and, behind them, their eight of up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plugins_trt.contract import LaunchError, ceil_div

if TYPE_CHECKING:
    import numpy.typing as npt

TILE = 16
"""Outputs of a tile."""


def check_outputs(outputs: int, *, gated: bool) -> None:
    """Refuses outputs that tiles do not take.

    Raises:
        LaunchError: naming `outputs`.
    """
    if outputs < 1 or (gated and outputs % TILE):
        raise LaunchError(
            f"outputs: {outputs}, must be {'a multiple of 16 (gate and up)' if gated else 'positive'}"
        )


def tiles_of(outputs: int) -> int:
    """Tiles that the outputs take."""
    return ceil_div(outputs, TILE)


def rows_of_tiles(outputs: int, *, gated: bool = False) -> npt.NDArray[np.int64]:
    """The output that each row of the tiles holds, ``[16 tiles]``; -1 for rows that fill up."""
    if gated:
        half = np.arange(outputs // 2).reshape(-1, 1, 8)
        return np.concatenate([half, half + outputs // 2], 1).reshape(-1)
    rows = np.arange(TILE * tiles_of(outputs))
    return np.where(rows < outputs, rows, -1)
