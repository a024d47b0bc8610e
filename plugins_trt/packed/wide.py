"""What the kernels of packed/wide.cuh get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import round_up
from plugins_trt.registry import KernelsError
from plugins_trt.tensor_map import MAP_BYTES, tensor_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.contract import DeviceArray
    from plugins_trt.packed.cut import Wide

MAPS_FORMAT = 3 * f"{MAP_BYTES}s"
"""Of the maps of x, the tiles and the scales, before the operator's own struct."""

_ALIGNMENT = 64  # of the struct of both
_ROW_BLOCK = 64  # inputs of a box of x


def arguments_format(linear: str, linear_bytes: int) -> str:
    """The letters of `struct` of a kernel's arguments, where those of the operator's struct are `linear`."""
    size = 3 * MAP_BYTES + linear_bytes
    return f"{MAPS_FORMAT}{linear}{round_up(size, _ALIGNMENT) - size}x"


def maps_of(
    kind: Wide, x: tuple[DeviceArray, int], packed: tuple[DeviceArray, DeviceArray], boxes: tuple[int, int]
) -> tuple[bytes, bytes, bytes]:
    """The maps that a kernel gets.

    Args:
        kind: The kernel.
        x: With the elements from a row to the next.
        packed: Tiles `[tiles, units, ..]` and scales `[tiles, groups, ..]`, 32-bit words.
        boxes: Units and groups of a round.
    """
    rows, stride = x
    of_x = tensor_map(
        rows.pointer,
        rows.dtype,
        (rows.shape[0], rows.shape[1]),
        (2 * stride,),
        (kind.rows, _ROW_BLOCK),
        swizzled=True,
    )
    of_packed = []
    for array, box in zip(packed, boxes, strict=True):
        count, places = array.shape[:2]
        words = array.shape[2] * array.shape[3]
        strides = (4 * words * places, 4 * words)
        of_packed.append(
            tensor_map(array.pointer, "int32", (count, places, words), strides, (kind.tiles, box, words))
        )
    return of_x, of_packed[0], of_packed[1]


def has_kernel(function: Callable[[str, int], Any], name: str) -> bool:
    """Whether a finder of kernels knows one of this name: of those that only some devices have."""
    try:
        function(name, 0)
    except KernelsError:
        return False
    return True
