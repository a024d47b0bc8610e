"""Tensor maps: how an array lies, as the driver encodes it for the copy engine of compute capability 9.0 and later.

A kernel that gets one copies boxes of the array without computing addresses; what lies outside of the array arrives as
zeros. Kernels take maps by value, each at a multiple of 64 bytes of their arguments.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

MAP_BYTES = 128
"""Of a map in a kernel's arguments."""

_ALIGNMENT = 64
_TYPES = {"bfloat16": 9, "float16": 6, "int32": 2, "uint32": 2}
_SWIZZLE_NONE, _SWIZZLE_128 = 0, 3
_NO_INTERLEAVE, _PROMOTE_128, _ZEROS = 0, 2, 0


class TensorMapError(RuntimeError):
    """The CUDA driver does not take an array or a box."""


@lru_cache(maxsize=8192)
def tensor_map(
    pointer: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzled: bool = False,
) -> bytes:
    """A map of an array, encoded.

    Args:
        pointer: Where it begins, a multiple of 16.
        dtype: Of its elements.
        shape: Elements along each dimension, 2 to 5 of them; the last one's lie together.
        strides: Bytes from an index of each dimension but the last to the next, multiples of 16.
        box: Elements along each dimension of what is copied at a time, at most 256 each.
        swizzled: Whether 16-byte pieces of the box's rows of 128 bytes change places, as tensor cores read them.

    Raises:
        TensorMapError: The driver does not take it.
    """
    rank = len(shape)
    memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    place = ctypes.addressof(memory)
    place += -place % _ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        _TYPES[dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(strides)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE,
        _SWIZZLE_128 if swizzled else _SWIZZLE_NONE,
        _PROMOTE_128,
        _ZEROS,
    )
    if status:
        raise TensorMapError(
            f"{dtype} array of shape {shape} at {pointer:#x}, {strides} bytes apart, boxes of {box}: error {status}"
        )
    return ctypes.string_at(place, MAP_BYTES)


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
