"""The paged KV arena: where the keys, values and compressed keys of every layer lie, by layer, page and head.

A page holds 64 tokens. Fine compressed key j is the mean of the stored keys 16j .. 16j+31, coarse key c that of
64c .. 64c+127; each lies in the page of the *last* token it averages, so a page depends only on itself and what
came before it. Slot s of a sequence's page p holds fine key j = 4p - 1 + s (completed by token 64p + 16s + 15)
and its one coarse slot holds c = p - 1 (completed by token 64p + 63); j = -1 and c = -1 do not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import BLOCK, ELEMENT_BYTES, HEAD_DIMS, KERNEL_DTYPES, LaunchError, check_at_least

FINE_SLOTS = 4
"""Fine compressed keys a page holds."""

COARSE_SLOTS = 1
"""Coarse compressed keys a page holds."""

TOKEN_SLOTS = BLOCK + BLOCK + FINE_SLOTS + COARSE_SLOTS
"""Rows of head_dim elements that a page takes for one layer and one KV head."""


@dataclass(frozen=True)
class Pool:
    """One of the arena's four pools, `[layers, pages, kv_heads, slots, head_dim]`; strides are in elements.

    The rows of a page and head lie one after the other (slot stride `head_dim`).
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

    FORMAT = 4 * Pool.FORMAT

    def __post_init__(self) -> None:
        """Checks sizes, dtype, and that strides and pointers suit 16-byte accesses."""
        check_at_least("layers", self.layers, 1)
        check_at_least("pages", self.pages, 1)
        check_at_least("kv_heads", self.kv_heads, 1)
        if self.head_dim not in HEAD_DIMS:
            raise LaunchError(f"head_dim: {self.head_dim}, must be one of {HEAD_DIMS}")
        if self.dtype not in KERNEL_DTYPES:
            raise LaunchError(f"dtype: {self.dtype}, must be one of {tuple(KERNEL_DTYPES)}")
        for name in ("keys", "values", "fine", "coarse"):
            pool: Pool = getattr(self, name)
            if pool.pointer == 0 or pool.pointer % 16:
                raise LaunchError(f"{name}: pointer {pool.pointer:#x}, must be a multiple of 16 and not null")
            for stride in ("layer_stride", "page_stride", "head_stride"):
                value = getattr(pool, stride)
                if value < 0 or value % 8:
                    raise LaunchError(f"{name}: {stride} {value}, must be a multiple of 8 elements")

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
    ) -> Arena:
        """An arena whose pools are contiguous arrays that begin at the four pointers."""

        def pool(pointer: int, slots: int) -> Pool:
            head = slots * head_dim
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
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    def pack(self, layer: int) -> tuple[int, ...]:
        """The kernels' `Arena` struct for one layer, in the order of `FORMAT`.

        Raises:
            LaunchError: naming `layer`, when the arena has no such layer.
        """
        if not 0 <= layer < self.layers:
            raise LaunchError(f"layer: {layer}, the arena has layers 0 to {self.layers - 1}")
        return (
            *self.keys.pack(layer, self.element_bytes),
            *self.values.pack(layer, self.element_bytes),
            *self.fine.pack(layer, self.element_bytes),
            *self.coarse.pack(layer, self.element_bytes),
        )


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes that one page takes over all layers: keys, values and both kinds of compressed keys."""
    return layers * kv_heads * TOKEN_SLOTS * head_dim * ELEMENT_BYTES[dtype]
