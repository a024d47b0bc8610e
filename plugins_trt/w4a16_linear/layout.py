"""How the kernels want 4-bit weights to lie, and the turning of the one form of the checkpoints into it.

Weights come as N outputs of K inputs in groups of G: eight consecutive inputs of an output a 32-bit word, the first in
its lowest four bits; scales float16 ``[N, K/G]``; zero points 0 to 15, ``[N, K/G]``. The weight is
``scale * (q - zero)``. The kernels read

- ``tiles``, uint32 ``[ceil(N / 16), K / 64, 32, 4]``: 512 bytes hold 16 outputs x 64 inputs, 16 bytes a lane of a warp.
  Lane ``4 g + t`` has words 0 and 1 of output ``g`` and 2 and 3 of output ``g + 8``; of each output, the first word has
  the inputs ``8 j + 2 t`` and ``8 j + 2 t + 1`` of the first 32, ``j`` from 0 to 3, and the second word those of the
  other 32: what a lane multiplies in products of 16 x 8 x 16 whose inputs lie in their order. The even ones lie in the
  lower half of the word and the odd ones in the higher, so that ``(word >> 4 j) & 0x000f000f`` is the pair ``j``, as a
  register of a tensor-core operand has it;
- ``groups``, uint32 ``[ceil(N / 16), K / G, 8, 2]``: of outputs ``g`` and ``g + 8``, which a lane needs together, the scale's
  bits in the lower half and the zero point in the higher.

Gated weights ``[gate; up]`` are laid so that a tile has 8 outputs of gate and the same 8 of up: a thread holds both.
Outputs that fill the last tile up have scale 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plugins_trt.contract import LaunchError
from plugins_trt.packed.tiles import TILE, check_outputs, rows_of_tiles

STEP = 64
"""Inputs of a tile; the inputs are a multiple of it."""

GROUPS = (64, 128)
"""Inputs that share a scale."""

_SLAB = 64  # tiles that are turned over at a time

UInt32 = npt.NDArray[np.uint32]


def check_sizes(outputs: int, inputs: int, group: int, *, gated: bool = False) -> None:
    """Refuses sizes the kernels do not take.

    Raises:
        LaunchError: naming `group`, `inputs` or `outputs`.
    """
    if group not in GROUPS:
        raise LaunchError(f"group: {group}, must be one of {GROUPS}")
    if inputs < group or inputs % group:
        raise LaunchError(f"inputs: {inputs}, must be a multiple of the group {group}")
    check_outputs(outputs, gated=gated)


def pack_tiles(packed: UInt32, *, gated: bool = False) -> UInt32:
    """``tiles`` of the weights ``[N, K/8]``."""
    outputs, words = packed.shape
    rows = rows_of_tiles(outputs, gated=gated)
    tiles = np.empty((len(rows) // TILE, words * 8 // STEP, 32, 4), np.uint32)
    for start in range(0, len(tiles), _SLAB):
        part = rows[start * TILE : (start + _SLAB) * TILE]
        slab = np.where(part[:, None] >= 0, packed[np.maximum(part, 0)], np.uint32(0))
        turned = _pairs_of_lanes(slab)  # [16 n, K/64, 2, 4]
        split = turned.reshape(-1, 2, 8, words * 8 // STEP, 2, 4)  # tile, half, g, step of inputs, word, t
        lanes = split.transpose(0, 3, 2, 5, 1, 4)  # tile, step, g, t, half, word
        tiles[start : start + _SLAB] = lanes.reshape(-1, words * 8 // STEP, 32, 4)
    return tiles


def pack_groups(scales: npt.NDArray[Any], zeros: npt.NDArray[Any], *, gated: bool = False) -> UInt32:
    """``groups`` of the scales, float16 ``[N, K/G]``, and zero points ``[N, K/G]``."""
    rows = rows_of_tiles(scales.shape[0], gated=gated)
    words = np.ascontiguousarray(scales, np.float16).view(np.uint16).astype(np.uint32)
    words |= zeros.astype(np.uint32) << np.uint32(16)
    laid = np.where(rows[:, None] >= 0, words[np.maximum(rows, 0)], np.uint32(0))  # [16 tiles, K/G]
    return np.ascontiguousarray(laid.reshape(-1, 2, 8, words.shape[1]).transpose(0, 3, 2, 1))


def _pairs_of_lanes(words: UInt32) -> UInt32:
    """Of each four words with their 32 numbers in order, four with the pairs of a lane each: ``[.., K/64, 2, 4]``."""
    four = words.reshape(len(words), -1, 2, 4)  # [.., step, word of a lane, eight numbers]
    result = np.zeros_like(four)
    for lane in range(4):
        for pair in range(4):
            numbers = four[..., pair] >> np.uint32(8 * lane)  # 2 t and 2 t + 1 of eight
            result[..., lane] |= (numbers & np.uint32(15)) << np.uint32(4 * pair)
            result[..., lane] |= (numbers >> np.uint32(4) & np.uint32(15)) << np.uint32(4 * pair + 16)
    return result
