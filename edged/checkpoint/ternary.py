"""Ternary linears: weights {-1, 0, +1} times a scale for each group of inputs, as BitCPM4 has them.

For N outputs and K inputs in groups of G, in a file and in memory alike:

- ``qweight``, int32 ``[N, K/16]``: sixteen consecutive inputs of one output a word, the first in its lowest two bits;
  0, 1 and 2 stand for -1, 0 and +1, and 3 for nothing;
- ``scales``, float16 ``[N, K/G]``.

With groups of 128 that is 2.13 bits a weight. There are no zero points and no order of inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edged.checkpoint.packed import (
    INTEGERS,
    Expected,
    PackedModule,
    PackedTile,
    UInt8,
    UInt32,
    read_scales,
    read_slabs,
)
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.checkpoint.packed import Float16, Shape
    from edged.checkpoint.safetensors_files import WeightFiles

WORD = 16
"""Ternary weights of a 32-bit word."""
_LOW_BITS = np.uint32(0x55555555)


def expected(module: str, shape: Shape) -> dict[str, Expected]:
    """The tensors of a module, by name."""
    return {
        f"{module}.qweight": Expected((shape.outputs, shape.inputs // WORD), INTEGERS),
        f"{module}.scales": Expected((shape.outputs, shape.groups), ("F16",)),
    }


def read(files: WeightFiles, module: str) -> PackedModule:
    """Read a module, which has the tensors of :func:`expected`.

    Raises:
        CheckpointError: Scales that are no numbers, or weights that are none of the three.
    """
    return PackedModule(
        None, read_scales(files, f"{module}.scales"), None, _tiles(files, f"{module}.qweight")
    )


def pack_ternary_words(codes: UInt8) -> UInt32:
    """Codes 0, 1, 2 into words: ``[.., K]`` to ``[.., K/16]``."""
    quarters = codes.reshape(*codes.shape[:-1], -1, 4)
    octets = quarters[..., 0] | quarters[..., 1] << 2 | quarters[..., 2] << 4 | quarters[..., 3] << 6
    return np.ascontiguousarray(octets).view(np.uint32)


def unpack_ternary_words(words: npt.NDArray[Any]) -> UInt8:
    """The sixteen codes of each word: ``[.., W]`` to ``[.., 16 W]``."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    codes = np.empty((*octets.shape, 4), np.uint8)
    for place in range(4):
        codes[..., place] = octets >> (2 * place) & 3
    return codes.reshape(*octets.shape[:-1], -1)


def not_ternary(weight: npt.NDArray[np.float32], group: int) -> npt.NDArray[np.bool_]:
    """Which groups of a weight ``[N, K]`` are not {-1, 0, +1} times one number that float16 has: ``[N, K/G]``."""
    sizes = np.abs(weight).reshape(weight.shape[0], -1, group)
    scales = sizes.max(axis=2, keepdims=True)
    with np.errstate(over="ignore"):
        held = scales.astype(np.float16).astype(np.float32) == scales
    wrong: npt.NDArray[np.bool_] = ~((sizes == scales) | (sizes == 0)).all(axis=2) | ~held[..., 0]
    return wrong


def ternary_form(weight: npt.NDArray[np.float32], group: int) -> tuple[UInt32, Float16]:
    """Words ``[N, K/16]`` and scales ``[N, K/G]`` of a weight of which :func:`not_ternary` finds no group."""
    codes = (np.sign(weight) + 1).astype(np.uint8)
    scales = np.abs(weight).reshape(weight.shape[0], -1, group).max(axis=2)
    return pack_ternary_words(codes), scales.astype(np.float16)


def _tiles(files: WeightFiles, name: str) -> Iterator[PackedTile]:
    for start, slab in read_slabs(files, name):
        if (slab & slab >> np.uint32(1) & _LOW_BITS).any():
            raise CheckpointError(
                f"{files.info(name).file}: tensor {name!r} holds weights that are not -1, 0 or +1; the file is damaged"
            )
        yield PackedTile(start, 0, slab)
