"""The memory that a launch would see, as torch tensors over the pointers it is given; on this machine's CPU."""

from __future__ import annotations

import ctypes

import torch

from plugins_trt.append.reference import Pages, QuantizedPages
from plugins_trt.contract import ELEMENT_BYTES, DeviceArray
from plugins_trt.quantized.reference import STORAGE


def tensor_of(array: DeviceArray) -> torch.Tensor:
    """The memory that a launch would see."""
    dtype = getattr(torch, array.dtype)
    strides = array.contiguous_strides if array.strides is None else array.strides
    extent = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    raw = (ctypes.c_char * (extent * ELEMENT_BYTES[array.dtype])).from_address(array.pointer)
    return torch.frombuffer(raw, dtype=dtype).as_strided(array.shape, strides)


def pages_of(arena, layer):
    """One layer of an arena. Where all pages share one place, nothing reads it: torch gets pages to write to."""

    def pool(part, slots):
        size = ELEMENT_BYTES[arena.dtype]
        shape = (arena.pages, arena.kv_heads, slots, arena.head_dim)
        if part.page_stride == 0:
            return torch.full(shape, float("nan"), dtype=getattr(torch, arena.dtype))
        strides = (part.page_stride, part.head_stride, arena.head_dim, 1)
        pointer = part.pointer + layer * part.layer_stride * size
        return tensor_of(DeviceArray(pointer, arena.dtype, shape, strides))

    compressed = {"fine": pool(arena.fine, 4), "coarse": pool(arena.coarse, 1)}
    if arena.kv_dtype is None:
        return Pages(pool(arena.keys, 64), pool(arena.values, 64), **compressed)

    def bytes_or_scales(part, dtype, *width):
        shape = (arena.pages, arena.kv_heads, 64, *width)
        strides = (part.page_stride, part.head_stride, *(width or (1,)), *(1 for _ in width))
        pointer = part.pointer + layer * part.layer_stride * ELEMENT_BYTES[dtype]
        return tensor_of(DeviceArray(pointer, dtype, shape, strides))

    stored = str(STORAGE[arena.kv_dtype]).removeprefix("torch.")
    return QuantizedPages(
        keys=bytes_or_scales(arena.keys, stored, arena.head_dim),
        values=bytes_or_scales(arena.values, stored, arena.head_dim),
        key_scales=bytes_or_scales(arena.key_scales, "float16"),
        value_scales=bytes_or_scales(arena.value_scales, "float16"),
        **compressed,
    )


def masks_of(batch):
    """Those of a step of trees."""
    if batch.tree_masks is None:
        return None
    return [mask % (1 << 64) for mask in tensor_of(batch.tree_masks).tolist()]
