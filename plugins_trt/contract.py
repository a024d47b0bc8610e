"""What every operator's arguments share: device arrays, the ragged batch, the selection's scalars and their checks.

A refused argument raises `LaunchError`, whose message names the argument, before anything runs on the device.
Nothing here touches the device or imports torch: arguments are raw pointers with their shapes beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 64
"""Tokens of a page, which is a block of sparse attention."""

KERNEL, STRIDE = 32, 16
"""Tokens averaged into a fine compressed key, and the distance of two."""

COARSE_KERNEL, COARSE_STRIDE = 128, 64
"""Tokens averaged into a coarse compressed key, and the distance of two."""

MAX_TREE = 64
"""Nodes of one sequence's tree: the bits of a mask word."""

MAX_DECODE = 64
"""Tokens of the largest bucket that the decode kernels take."""

HEAD_DIMS = (64, 128)
MAX_GROUP = 16

ELEMENT_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "uint64": 8,
}
"""Bytes of an element, by dtype name."""

KERNEL_DTYPES = {"float16": "f16", "bfloat16": "bf16"}
"""The suffix of a kernel's name, by the dtype of its keys, values and queries."""


class Tensor(Protocol):
    """What a torch tensor says of itself, as far as a launch needs it."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes."""

    @property
    def dtype(self) -> object:
        """Its name, `torch.` before it or not, is the dtype's."""

    def data_ptr(self) -> int:
        """Where it starts."""

    def stride(self) -> Sequence[int]:
        """Strides in elements."""


class LaunchError(ValueError):
    """An operator was given an argument it does not take; the message begins with the argument's name."""


@dataclass(frozen=True)
class DeviceArray:
    """An array in device memory: where it starts, what it holds, its shape and its strides in elements."""

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> DeviceArray:
        """A view of a torch tensor."""
        return cls(
            pointer=int(tensor.data_ptr()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(int(size) for size in tensor.shape),
            strides=tuple(int(stride) for stride in tensor.stride()),
        )

    @property
    def contiguous_strides(self) -> tuple[int, ...]:
        """The strides that this shape has when nothing lies between its elements."""
        strides = []
        step = 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other (dimensions of size 1 may have any stride)."""
        return self.strides is None or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.strides, self.contiguous_strides, strict=True)
        )


def check_array(
    name: str,
    array: DeviceArray,
    dtype: str | Sequence[str],
    shape: Sequence[int | None],
    *,
    alignment: int = 16,
) -> None:
    """Refuses an array of another dtype or shape (None fits any size), with gaps, or badly aligned.

    Raises:
        LaunchError: naming the argument.
    """
    allowed = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    if array.dtype not in allowed:
        raise LaunchError(f"{name}: dtype {array.dtype}, must be {' or '.join(allowed)}")
    if len(array.shape) != len(shape) or any(
        want is not None and got != want for got, want in zip(array.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LaunchError(f"{name}: shape {array.shape}, must be ({wanted})")
    if not array.is_contiguous:
        raise LaunchError(
            f"{name}: strides {array.strides} of shape {array.shape}, must be contiguous "
            f"{array.contiguous_strides}"
        )
    if array.pointer == 0:
        raise LaunchError(f"{name}: a null pointer")
    if array.pointer % alignment:
        raise LaunchError(f"{name}: pointer {array.pointer:#x}, must be a multiple of {alignment} bytes")


def check_rows(name: str, array: DeviceArray, dtype: str, shape: Sequence[int | None]) -> int:
    """Refuses an array whose rows (all dimensions but the first) have gaps; the rows may lie further apart.

    That lets an operator read a part of a fused projection's output where it lies.

    Returns:
        Elements from a row to the next.

    Raises:
        LaunchError: naming the argument.
    """
    row = DeviceArray(
        array.pointer, array.dtype, array.shape[1:], None if array.strides is None else array.strides[1:]
    )
    if len(array.shape) != len(shape) or (shape[0] is not None and array.shape[0] != shape[0]):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LaunchError(f"{name}: shape {array.shape}, must be ({wanted})")
    check_array(name, row, dtype, shape[1:])
    width = 1
    for size in row.shape:
        width *= size
    stride = width if array.strides is None or array.shape[0] == 1 else array.strides[0]
    if stride < width or stride % 8:
        raise LaunchError(
            f"{name}: rows {stride} elements apart, must be a multiple of 8 and at least {width}"
        )
    return stride


def check_workspace(name: str, array: DeviceArray, needed: int) -> None:
    """Refuses scratch memory of fewer than `needed` bytes.

    Raises:
        LaunchError: naming the argument.
    """
    size = ELEMENT_BYTES.get(array.dtype, 1)
    for dimension in array.shape:
        size *= dimension
    if size < needed:
        raise LaunchError(f"{name}: {size} bytes, this bucket needs {needed}")
    if array.pointer == 0 or array.pointer % 16:
        raise LaunchError(f"{name}: pointer {array.pointer:#x}, must be a multiple of 16 and not null")


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """The next multiple that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def check_at_least(name: str, value: int, least: int) -> None:
    """Refuses an integer below `least`.

    Raises:
        LaunchError: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LaunchError(f"{name}: {value!r}, must be an integer of at least {least}")


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuses a head layout the kernels have no tile for.

    Raises:
        LaunchError: naming `head_dim`, `kv_heads` or `heads`.
    """
    if head_dim not in HEAD_DIMS:
        raise LaunchError(f"head_dim: {head_dim}, must be one of {HEAD_DIMS}")
    check_at_least("kv_heads", kv_heads, 1)
    check_at_least("heads", heads, 1)
    if heads % kv_heads:
        raise LaunchError(f"heads: {heads}, must be a multiple of kv_heads {kv_heads}")
    if heads // kv_heads > MAX_GROUP:
        raise LaunchError(
            f"heads: {heads} over {kv_heads} KV heads is a group of {heads // kv_heads}, "
            f"at most {MAX_GROUP} query heads share a KV head"
        )


@dataclass(frozen=True)
class Batch:
    """One step's ragged batch, all of it device data except the sizes of its bucket.

    S sequences bring T tokens; sequence s has `lengths[s]` tokens stored before the step and brings those of
    rows `sequence_starts[s] .. sequence_starts[s+1]`; its i-th new token is stored in slot `lengths[s] + i`.
    Rows from `sequence_starts[S]` on are padding. In a chain, `positions[t] = lengths[s] + i`. In a tree
    (`tree_masks` given: bit j of word t says that new token j of the same sequence is t's ancestor or t itself,
    parents before their children), `positions[t] = lengths[s] + depth`, where the root has depth 0.

    Kernels that may start early (`registry.Kernel.prepare`, `overlaps`) read these arrays before they wait for the
    launch before them: the launch right before a selection or an attention must not be the one that writes them.
    """

    sequence_starts: DeviceArray  # int32 [S + 1]
    lengths: DeviceArray  # int32 [S]
    page_tables: DeviceArray  # int32 [S, max_pages]
    positions: DeviceArray  # int32 [T]
    tree_masks: DeviceArray | None = None  # uint64 [T]

    FORMAT = "PPPPPiiii"

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("sequence_starts", self.sequence_starts, "int32", (None,), alignment=4)
        if self.sequence_starts.shape[0] < 2:
            raise LaunchError(
                f"sequence_starts: shape {self.sequence_starts.shape}, must be (S + 1) with S >= 1"
            )
        check_array("lengths", self.lengths, "int32", (self.sequences,), alignment=4)
        check_array("page_tables", self.page_tables, "int32", (self.sequences, None), alignment=4)
        check_at_least("page_tables: pages a sequence", self.max_pages, 1)
        check_array("positions", self.positions, "int32", (None,), alignment=4)
        check_at_least("positions: tokens", self.tokens, 1)
        if self.tree_masks is not None:
            check_array("tree_masks", self.tree_masks, ("uint64", "int64"), (self.tokens,), alignment=8)

    @property
    def sequences(self) -> int:
        """S, sequences of the bucket (those without tokens included)."""
        return self.sequence_starts.shape[0] - 1

    @property
    def tokens(self) -> int:
        """T, tokens of the bucket, padding included."""
        return self.positions.shape[0]

    @property
    def max_pages(self) -> int:
        """Pages that a sequence's table can name."""
        return self.page_tables.shape[1]

    def pack(self) -> tuple[int, ...]:
        """The kernels' `Batch` struct, in the order of `FORMAT`."""
        return (
            self.sequence_starts.pointer,
            self.lengths.pointer,
            self.page_tables.pointer,
            self.positions.pointer,
            0 if self.tree_masks is None else self.tree_masks.pointer,
            self.sequences,
            self.tokens,
            self.max_pages,
            0,
        )


def check_batch_values(
    sequence_starts: Sequence[int],
    lengths: Sequence[int],
    page_tables: Sequence[Sequence[int]],
    *,
    tokens: int,
    pages: int,
) -> None:
    """Refuses a batch whose values, read on the host, would send a kernel outside its pages (debug mode).

    Args:
        sequence_starts: S + 1 offsets.
        lengths: tokens stored before the step, S of them.
        page_tables: S rows.
        tokens: T, the bucket.
        pages: pages of the arena.

    Raises:
        LaunchError: naming `sequence_starts`, `lengths` or `page_tables`, with the sequence's index.
    """
    if sequence_starts[0] != 0 or sequence_starts[-1] > tokens:
        raise LaunchError(
            f"sequence_starts: runs from {sequence_starts[0]} to {sequence_starts[-1]}, "
            f"must run from 0 to at most the bucket's {tokens} tokens"
        )
    for index, length in enumerate(lengths):
        new = sequence_starts[index + 1] - sequence_starts[index]
        if new < 0:
            raise LaunchError(f"sequence_starts: falls by {-new} after sequence {index}")
        if length < 0:
            raise LaunchError(f"lengths: {length} of sequence {index}, must not be negative")
        if new == 0:
            continue
        needed = ceil_div(length + new, BLOCK)
        row = page_tables[index]
        if needed > len(row):
            raise LaunchError(
                f"lengths: sequence {index} stores {length} + {new} tokens, which takes {needed} pages; "
                f"its row of page_tables holds {len(row)}"
            )
        for slot, page in enumerate(row[:needed]):
            if not 0 <= page < pages:
                raise LaunchError(
                    f"page_tables: entry {slot} of sequence {index} is page {page}, the arena has {pages}"
                )


@dataclass(frozen=True)
class SelectionRule:
    """Which blocks a query attends to (InfLLM-v2, arXiv 2509.24663).

    The first `init_blocks` blocks, the query's own block and the `window / 64` blocks before it always win;
    the best `top_k + window / 64` in all are attended. `local_blocks`, when given, is the number of winning
    blocks that end with the own one (so `window / 64` itself gives the paper's rule, the default one more).
    A query at position i is dense while i + 1 < `dense_below`. `lse` says where the softmax over compressed
    keys takes its maximum and sum: "approximate" from the coarse keys, "exact" from the fine ones.
    """

    init_blocks: int = 1
    window: int = 2048
    top_k: int = 64
    dense_below: int = 8192
    lse: str = "approximate"
    local_blocks: int | None = None

    def __post_init__(self) -> None:
        """Checks that the blocks that always win fit among the attended ones."""
        check_at_least("init_blocks", self.init_blocks, 0)
        check_at_least("window", self.window, 0)
        check_at_least("top_k", self.top_k, 0)
        check_at_least("dense_below", self.dense_below, 0)
        if self.window % BLOCK:
            raise LaunchError(f"window: {self.window}, must be a multiple of {BLOCK} tokens")
        if self.lse not in ("approximate", "exact"):
            raise LaunchError(f"lse: {self.lse!r}, must be 'approximate' or 'exact'")
        if self.local_blocks is not None:
            check_at_least("local_blocks", self.local_blocks, 1)
        if self.init_blocks + self.local > self.total:
            raise LaunchError(
                f"top_k: {self.top_k} leaves {self.total} blocks, fewer than the {self.init_blocks} first and "
                f"{self.local} local ones that always win; raise top_k to at least "
                f"{self.init_blocks + self.local - self.window // BLOCK}"
            )

    @property
    def local(self) -> int:
        """Blocks, the query's own the last of them, that always win."""
        return self.window // BLOCK + 1 if self.local_blocks is None else self.local_blocks

    @property
    def total(self) -> int:
        """Blocks attended in all, when the context has as many."""
        return self.top_k + self.window // BLOCK
