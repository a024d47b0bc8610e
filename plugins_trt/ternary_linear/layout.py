"""How the kernels want ternary weights to lie, and the turning of the one form of the checkpoints into it.

Weights come as N outputs of K inputs in groups of G: sixteen consecutive inputs of an output a 32-bit word, the first in
its lowest two bits, where 0, 1 and 2 stand for -1, 0 and +1; scales float16 ``[N, K/G]``. The kernels read

- ``tiles``, uint32 ``[ceil(N / 16), blocks, 32, 4]``, an even number of blocks of 128 inputs: 512 bytes hold 16 outputs x 128 inputs, 16 bytes a lane of a
  warp. Lane ``4 g + t`` has words 0 and 1 of output ``g`` and 2 and 3 of output ``g + 8``; of each output, the first word
  has the inputs ``8 j + 2 t`` and ``8 j + 2 t + 1`` of the first 64, ``j`` from 0 to 7, and the second those of the other
  64: what a lane multiplies in products of 16 x 8 x 16 whose inputs lie in their order. A weight's two bits are its sign
  and whether it is not 0: the highest bits of a 16-bit float. Of the sixteen, the even ones lie in the lower half of the
  word and the odd ones in the higher, the first highest, so that ``(word << 2 j) & 0xc000c000`` is the pair ``j`` of 0, +2
  and -2, as a register of a tensor-core operand has it;
- ``scales``, uint32 ``[ceil(N / 16), blocks, 8, 128 / G]``, or with one scale a row ``[ceil(N / 16), 1, 8, 1]``: of
  outputs ``g`` and ``g + 8``, which a lane needs together, the bits of float16 numbers in the lower and the higher half.

Groups of more than 128 inputs, but not all, have their scale once for each 128. Gated weights ``[gate; up]`` are laid so
that a tile has 8 outputs of gate and the same 8 of up: a thread holds both. Outputs and inputs that fill up are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plugins_trt.contract import LaunchError, ceil_div
from plugins_trt.packed.tiles import TILE, check_outputs, rows_of_tiles, tiles_of

BLOCK = 128
"""Inputs of a tile that lie together."""

GROUPS = (32, 64, 128)
"""Inputs that share a scale: one of these, a multiple of the last, or all."""

_SLAB = 64  # tiles that are turned over at a time
_ZEROS = 0x5555  # eight weights of 0, as the checkpoints have them

UInt32 = npt.NDArray[np.uint32]


def check_sizes(outputs: int, inputs: int, group: int, *, gated: bool = False) -> None:
    """Refuses sizes the kernels do not take.

    Raises:
        LaunchError: naming `group`, `inputs` or `outputs`.
    """
    if inputs < GROUPS[0] or inputs % GROUPS[0]:
        raise LaunchError(f"inputs: {inputs}, must be a multiple of {GROUPS[0]}")
    if group != inputs and group not in GROUPS and (group < BLOCK or group % BLOCK):
        raise LaunchError(
            f"group: {group}, must be one of {GROUPS}, a multiple of {BLOCK} or all {inputs} inputs"
        )
    if inputs % group:
        raise LaunchError(f"inputs: {inputs}, must be a multiple of the group {group}")
    check_outputs(outputs, gated=gated)


def blocks_of(inputs: int) -> int:
    """Blocks that the inputs take: an even number, as a warp takes two at a time."""
    return 2 * ceil_div(inputs, 2 * BLOCK)


def scales_shape(outputs: int, inputs: int, group: int) -> tuple[int, int, int, int]:
    """Shape of ``scales``."""
    if group == inputs:
        return (tiles_of(outputs), 1, 8, 1)
    return (tiles_of(outputs), blocks_of(inputs), 8, max(BLOCK // group, 1))


def pack_tiles(packed: npt.NDArray[Any], *, gated: bool = False) -> UInt32:
    """``tiles`` of the weights, 32-bit ``[N, K/16]``; K is a multiple of 32."""
    outputs = len(packed)
    eights = np.ascontiguousarray(packed).view(np.uint16)  # [N, K/8]: eight weights each
    blocks = blocks_of(8 * eights.shape[1])
    rows = rows_of_tiles(outputs, gated=gated)
    tiles = np.empty((len(rows) // TILE, blocks, 32, 4), np.uint32)
    first, second = _pairs_of_eights()
    for start in range(0, len(tiles), _SLAB):
        part = rows[start * TILE : (start + _SLAB) * TILE]
        slab = np.full((len(part), blocks * (BLOCK // 8)), _ZEROS, np.uint16)
        slab[:, : eights.shape[1]] = np.where(part[:, None] >= 0, eights[np.maximum(part, 0)], _ZEROS)
        eight = slab.reshape(-1, 8)  # of a word each
        lanes = np.zeros((len(eight), 2), np.uint64)  # two each
        for pair in range(8):
            lanes[:, 0] |= first[eight[:, pair]] >> np.uint64(2 * pair)
            lanes[:, 1] |= second[eight[:, pair]] >> np.uint64(2 * pair)
        # tile, half of the outputs, g, block, word of the output, t
        words = lanes.astype("<u8").view("<u4").reshape(-1, 2, 8, blocks, 2, 4)
        tiles[start : start + _SLAB] = words.transpose(0, 3, 2, 5, 1, 4).reshape(-1, blocks, 32, 4)
    return tiles


def pack_scales(scales: npt.NDArray[Any], inputs: int, *, gated: bool = False) -> UInt32:
    """``scales`` of the scales, float16 ``[N, K/G]``."""
    outputs, count = scales.shape
    shape = scales_shape(outputs, inputs, inputs // count)
    words = np.ascontiguousarray(scales, np.float16).view(np.uint16)
    if count > 1:
        words = np.repeat(words, max(inputs // count // BLOCK, 1), axis=1)
        words = np.pad(words, ((0, 0), (0, shape[1] * shape[3] - words.shape[1])))
    rows = rows_of_tiles(outputs, gated=gated)
    laid = np.where(
        rows[:, None] >= 0, words[np.maximum(rows, 0)], np.uint16(0)
    )  # [16 tiles, scales of a row]
    split = laid.reshape(shape[0], 2, 8, shape[1], shape[3]).astype(np.uint32)
    return np.ascontiguousarray((split[:, 0] | split[:, 1] << np.uint32(16)).transpose(0, 2, 1, 3))


def _pairs_of_eights() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Of each eight weights as the checkpoints have them, the pairs of lanes 0 and 1, and of 2 and 3, as a word's first.

    The word of the second lane lies in the higher half.
    """
    eights = np.arange(1 << 16, dtype=np.uint64)
    words = np.zeros((2, len(eights)), np.uint64)
    for number in range(8):
        code = (eights >> np.uint64(2 * number) & np.uint64(3)) + np.uint64(3) & np.uint64(3)
        words[number // 4] |= code << np.uint64(14 + 16 * (number % 2) + 32 * (number // 2 % 2))
    return words[0], words[1]
