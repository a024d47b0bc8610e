"""The one form in which a 4-bit linear lies in memory, whatever file it came from.

For N outputs and K inputs in groups of G:

- packed, uint32 ``[N, K/8]``: eight consecutive inputs of one output a word, the first in its lowest four bits;
- scales, float16 ``[N, K/G]``, and zero points, uint8 ``[N, K/G]`` (0 to 15);
- with act-order, ``order``, int32 ``[K]``: column j belongs to input ``order[j]``. Groups are consecutive columns.

The weight of output n at column j is ``scales[n, j // G] * (q[n, j] - zeros[n, j // G])``. Files are read and turned over
a few megabytes at a time (with act-order, a module at a time); no weight is ever widened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.checkpoint.safetensors_files import WeightFiles

UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
Float16 = npt.NDArray[np.float16]
Int32 = npt.NDArray[np.int32]

INTEGERS = ("I32",)
SCALES = ("F16", "BF16", "F32")
SLAB_BYTES = 4 << 20
"""What is read at a time."""
TILE_OUTPUTS = 256
"""Outputs that are turned over at a time with act-order."""


class Shape(NamedTuple):
    """Sizes of one 4-bit linear."""

    outputs: int
    inputs: int
    group: int

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.inputs // self.group


class Expected(NamedTuple):
    """A tensor that a module has in its file."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    needed: bool = True


class PackedTile(NamedTuple):
    """Some words of some outputs; ``output`` and ``word`` are the first."""

    output: int
    word: int
    packed: UInt32  # [n, words]


class PackedModule(NamedTuple):
    """One module; its tiles together are all of its packed integers."""

    order: Int32 | None  # [K]; None without act-order
    scales: Float16  # [N, K/G]
    zeros: UInt8 | None  # [N, K/G]; None for ternary weights
    tiles: Iterator[PackedTile]


def read_slabs(files: WeightFiles, name: str, multiple: int = 1) -> Iterator[tuple[int, UInt32]]:
    """The rows of an int32 matrix, some megabytes at a time: the first row's number, and ``[rows, columns]``.

    Args:
        files: The open checkpoint.
        name: The tensor.
        multiple: Rows come in multiples of this, of which the tensor has a whole number.

    Raises:
        CheckpointError: The file changed or cannot be read.
    """
    rows, columns = files.info(name).shape
    step = max(1, SLAB_BYTES // (4 * columns * multiple)) * multiple
    buffer = np.empty((min(step, rows), columns), np.uint32)
    for start in range(0, rows, step):
        slab = buffer[: rows - start]
        files.read_into(name, slab.reshape(-1).view(np.uint8).data, 4 * columns * start)
        yield start, slab


def unpack_words(words: npt.NDArray[Any]) -> UInt8:
    """The eight 4-bit numbers of each 32-bit word, lowest first: ``[..]`` to ``[.., 8]``."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    numbers = np.empty((*words.shape, 8), np.uint8)
    np.bitwise_and(octets, 15, out=numbers[..., 0::2])
    np.right_shift(octets, 4, out=numbers[..., 1::2])
    return numbers


_SWAPS = {
    4: ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)),
    8: ((2, 0x0000FFFF), (1, 0x00FF00FF)),
}
"""By the bits of a number: distances of words that exchange halves, and masks of the lower ones."""


def turn_numbers(words: UInt32, bits: int = 4) -> UInt32:
    """Number j of word i becomes number i of word j, of as many words as a word has numbers.

    Args:
        words: ``[32 / bits, ..]``, overwritten and returned.
        bits: Of a number, 4 or 8.
    """
    for distance, mask in _SWAPS[bits]:
        shift = np.uint32(bits * distance)
        for first in range(len(words)):
            if first & distance:
                continue
            low, high = words[first], words[first + distance]
            swapped = low >> shift
            swapped ^= high
            swapped &= np.uint32(mask)
            high ^= swapped
            swapped <<= shift
            low ^= swapped
    return words


def interleave(words: UInt32) -> UInt32:
    """The 4-bit numbers 0 4 1 5 2 6 3 7 of each word, from the lowest bits on; overwritten and returned."""
    for shift, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        swapped = words >> np.uint32(shift)
        swapped ^= words
        swapped &= np.uint32(mask)
        words ^= swapped
        swapped <<= np.uint32(shift)
        words ^= swapped
    return words


def pack_words(numbers: UInt8) -> UInt32:
    """4-bit numbers into 32-bit words, the first in the lowest bits: ``[.., K]`` to ``[.., K/8]``."""
    octets = np.left_shift(numbers[..., 1::2], 4)
    np.bitwise_or(octets, numbers[..., 0::2], out=octets)
    return np.ascontiguousarray(octets).view(np.uint32)


def read_scales(files: WeightFiles, name: str) -> Float16:
    """A tensor of scales in float16.

    bfloat16 is exact from 2^-17 on and rounded to a multiple of 2^-24 below; float32 is rounded.

    Raises:
        CheckpointError: NaN or infinity, or a scale beyond float16; names the tensor.
    """
    found = files.read_array(name)
    if files.info(name).dtype == "BF16":
        found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if not np.isfinite(found).all():
        raise CheckpointError(f"{files.info(name).file}: tensor {name!r} holds NaN or infinity")
    with np.errstate(over="ignore"):
        scales = found.astype(np.float16)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{files.info(name).file}: tensor {name!r} holds scales that float16 cannot")
    return scales


def check_no_bias(files: WeightFiles, name: str) -> None:
    """Old quantizers wrote a bias of zeros beside every linear, which changes nothing; any other is refused.

    Raises:
        CheckpointError: It is not all zeros; names the tensor.
    """
    if name not in files:
        return
    bias = files.read_array(name)
    if files.info(name).dtype == "BF16":
        bias &= np.uint16(0x7FFF)  # -0 is zero too
    if bias.any():
        raise CheckpointError(
            f"{files.info(name).file}: tensor {name!r} has no place in this architecture, and is not all zeros"
        )
