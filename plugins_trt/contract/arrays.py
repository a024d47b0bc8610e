"""Arrays in device memory, what each must be, and the refusal of those that are something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

ELEMENT_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint64": 8,
}
"""Bytes of an element, by dtype name."""

KERNEL_DTYPES = {"float16": "f16", "bfloat16": "bf16"}
"""The suffix of a kernel's name, by the dtype of its keys, values and queries."""

QUANTIZED_KV = {"int8": "i8", "float8_e4m3fn": "e4m3"}
"""Types of keys and values in eight bits, which have a scale for each token and KV head, and how kernels' names say it."""


def kernel_suffix(dtype: str, kv_dtype: str | None = None) -> str:
    """What the name of a kernel over paged keys says of its types: those of the queries, and of quantized pages."""
    quantized = QUANTIZED_KV.get(kv_dtype or dtype)
    return KERNEL_DTYPES[dtype] if quantized is None else f"{KERNEL_DTYPES[dtype]}_{quantized}"


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
