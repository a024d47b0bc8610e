"""The paged KV arena: where the keys, values and compressed keys of every layer lie, by layer, page and head.

A page holds 64 tokens. Fine compressed key j is the mean of the stored keys 16j .. 16j+31, coarse key c that of
64c .. 64c+127; each lies in the page of the *last* token it averages, so a page depends only on itself and what
came before it. Slot s of a sequence's page p holds fine key j = 4p - 1 + s (completed by token 64p + 16s + 15)
and its one coarse slot holds c = p - 1 (completed by token 64p + 63); j = -1 and c = -1 do not exist.

Keys and values may be stored in eight bits, with one float16 scale for each token and KV head of both: the scales are
two pools more, and belong to the page as its keys do. Compressed keys stay in the model's dtype: means of the keys as
they are stored, which is all that is left of earlier tokens however the prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import (
    BLOCK,
    ELEMENT_BYTES,
    HEAD_DIMS,
    KERNEL_DTYPES,
    QUANTIZED_KV,
    LaunchError,
    check_at_least,
)

FINE_SLOTS = 4
"""Fine compressed keys a page holds."""

COARSE_SLOTS = 1
"""Coarse compressed keys a page holds."""


@dataclass(frozen=True)
class Pool:
    """One of the arena's pools, `[layers, pages, kv_heads, slots, head_dim]`; strides are in elements.

    The rows of a page and head lie one after the other (slot stride `head_dim`; scales: 1).
    """

    pointer: int
    layer_stride: int
    page_stride: int
    head_stride: int

    FORMAT = "Pqq"

    def pack(self, layer: int, element_bytes: int) -> tuple[int, int, int]:
        """The kernels' `Pool` struct for one layer: pointer, page stride, head stride."""
        return (
            self.pointer + layer * self.layer_stride * element_bytes,
            self.page_stride,
            self.head_stride,
        )


@dataclass(frozen=True)
class Arena:
    """Geometry of the KV pages of one model; the memory itself belongs to whoever made it."""

    layers: int
    pages: int
    kv_heads: int
    head_dim: int
    dtype: str
    keys: Pool
    values: Pool
    fine: Pool
    coarse: Pool
    kv_dtype: str | None = None
    """Type of keys and values in eight bits; None: `dtype`, without scales."""
    key_scales: Pool | None = None  # float16 [layers, pages, kv_heads, 64]
    value_scales: Pool | None = None

    FORMAT = 4 * Pool.FORMAT
    QUANTIZED_FORMAT = 6 * Pool.FORMAT

    def __post_init__(self) -> None:
        """Checks sizes, dtype, and that strides and pointers suit 16-byte accesses."""
        check_at_least("layers", self.layers, 1)
        check_at_least("pages", self.pages, 1)
        check_at_least("kv_heads", self.kv_heads, 1)
        if self.head_dim not in HEAD_DIMS:
            raise LaunchError(f"head_dim: {self.head_dim}, must be one of {HEAD_DIMS}")
        if self.dtype not in KERNEL_DTYPES:
            raise LaunchError(f"dtype: {self.dtype}, must be one of {tuple(KERNEL_DTYPES)}")
        if self.kv_dtype is not None and self.kv_dtype not in QUANTIZED_KV:
            raise LaunchError(f"kv_dtype: {self.kv_dtype}, must be one of {tuple(QUANTIZED_KV)} or None")
        scales = [self.key_scales, self.value_scales]
        if [pool is None for pool in scales] != 2 * [self.kv_dtype is None]:
            raise LaunchError(
                f"key_scales and value_scales: kv_dtype {self.kv_dtype} has {'none' if self.kv_dtype is None else 'both'}"
            )
        for name in ("keys", "values", "fine", "coarse", "key_scales", "value_scales"):
            pool: Pool | None = getattr(self, name)
            if pool is None:
                continue
            if pool.pointer == 0 or pool.pointer % 16:
                raise LaunchError(f"{name}: pointer {pool.pointer:#x}, must be a multiple of 16 and not null")
            elements = 16 if self.kv_dtype is not None and name in ("keys", "values") else 8
            for stride in ("layer_stride", "page_stride", "head_stride"):
                value = getattr(pool, stride)
                if value < 0 or value % elements:
                    raise LaunchError(f"{name}: {stride} {value}, must be a multiple of {elements} elements")

    @classmethod
    def contiguous(
        cls,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        *,
        keys: int,
        values: int,
        fine: int,
        coarse: int,
        kv_dtype: str | None = None,
        key_scales: int | None = None,
        value_scales: int | None = None,
    ) -> Arena:
        """An arena whose pools are contiguous arrays that begin at the pointers; quantized keys and values have scales."""

        def pool(pointer: int, slots: int, width: int = head_dim) -> Pool:
            head = slots * width
            return Pool(pointer, pages * kv_heads * head, kv_heads * head, head)

        return cls(
            layers,
            pages,
            kv_heads,
            head_dim,
            dtype,
            keys=pool(keys, BLOCK),
            values=pool(values, BLOCK),
            fine=pool(fine, FINE_SLOTS),
            coarse=pool(coarse, COARSE_SLOTS),
            kv_dtype=kv_dtype,
            key_scales=None if key_scales is None else pool(key_scales, BLOCK, 1),
            value_scales=None if value_scales is None else pool(value_scales, BLOCK, 1),
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a compressed key, and of a key or value that is not quantized."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def scales(self) -> tuple[Pool, ...]:
        """The scales' pools, of keys and of values, where these are quantized."""
        return tuple(pool for pool in (self.key_scales, self.value_scales) if pool is not None)

    def pack_keys_values(self, layer: int) -> tuple[int, ...]:
        """For kernels that read nothing else: the pools of keys and values of one layer, then those of their scales.

        Raises:
            LaunchError: naming `layer`, when the arena has no such layer.
        """
        return (*self.pack(layer)[:6], *self._pack_scales(layer))

    def pack_all(self, layer: int) -> tuple[int, ...]:
        """The struct of kernels that read and write keys and values: `pack`, then the pools of the scales, if any.

        Raises:
            LaunchError: naming `layer`, when the arena has no such layer.
        """
        return (*self.pack(layer), *self._pack_scales(layer))

    def _pack_scales(self, layer: int) -> tuple[int, ...]:
        return tuple(number for pool in self.scales for number in pool.pack(layer, ELEMENT_BYTES["float16"]))

    def pack(self, layer: int) -> tuple[int, ...]:
        """The kernels' `Arena` struct for one layer, in the order of `FORMAT`.

        Raises:
            LaunchError: naming `layer`, when the arena has no such layer.
        """
        if not 0 <= layer < self.layers:
            raise LaunchError(f"layer: {layer}, the arena has layers 0 to {self.layers - 1}")
        stored = ELEMENT_BYTES[self.kv_dtype or self.dtype]
        return (
            *self.keys.pack(layer, stored),
            *self.values.pack(layer, stored),
            *self.fine.pack(layer, self.element_bytes),
            *self.coarse.pack(layer, self.element_bytes),
        )


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: str, kv_dtype: str | None = None) -> int:
    """Bytes that one page takes over all layers: keys, values, their scales and both kinds of compressed keys."""
    tokens = 2 * BLOCK * head_dim * ELEMENT_BYTES[kv_dtype or dtype]
    scales = 0 if kv_dtype is None else 2 * BLOCK * ELEMENT_BYTES["float16"]
    compressed = (FINE_SLOTS + COARSE_SLOTS) * head_dim * ELEMENT_BYTES[dtype]
    return layers * kv_heads * (tokens + scales + compressed)
