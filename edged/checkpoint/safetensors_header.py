"""The safetensors header: read with no trust in the file.

A file is ``u64 little-endian length | JSON header | data``. The header maps a tensor's name to its dtype, shape and
``[begin, end)`` in the data. The format allows neither gaps nor overlaps, so every byte of the data belongs to exactly
one tensor; a file that says otherwise is damaged or hostile and is refused before any of it is used.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit that the format's own library sets
_MAX_DIMENSIONS = 64

BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
"""Bits of one element, by the dtype's name in the header."""


class TensorSpec(NamedTuple):
    """What a tensor is: enough to write it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return element_count(self.shape) * BITS[self.dtype] // 8


class TensorInfo(NamedTuple):
    """A tensor of an open checkpoint: what it is and where its bytes are.

    ``offset`` counts from the start of ``file``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of that shape (exact, whatever the sizes)."""
    count = 1
    for size in shape:
        count *= size
    return count


def read_header(file_descriptor: int, file: Path) -> list[TensorInfo]:
    """Read and check the header of an open file; return its tensors in the order of their data.

    Raises:
        CheckpointError: The header, or its agreement with the file's size, is wrong; names the file and the tensor.
    """
    file_size = os.fstat(file_descriptor).st_size
    if file_size < LENGTH_BYTES + 2:
        raise CheckpointError(
            f"{file}: {file_size} bytes are too few for a safetensors file; download it again"
        )
    length = int.from_bytes(_read_exactly(file_descriptor, LENGTH_BYTES, 0, file), "little")
    if length > MAX_HEADER_BYTES or length > file_size - LENGTH_BYTES:
        raise CheckpointError(
            f"{file}: the header claims {length} bytes of a file of {file_size}; "
            f"the file is truncated or no safetensors file"
        )
    raw = _read_exactly(file_descriptor, length, LENGTH_BYTES, file)
    return _check_layout(_parse(raw, file), file, LENGTH_BYTES + length, file_size)


def _read_exactly(file_descriptor: int, count: int, offset: int, file: Path) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        piece = os.pread(file_descriptor, count - len(parts), offset + len(parts))
        if not piece:
            raise CheckpointError(f"{file}: ends at byte {offset + len(parts)}, inside its header")
        parts += piece
    return bytes(parts)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the name {key!r} appears twice")
            seen.add(key)
    return result


def _parse(raw: bytes, file: Path) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise CheckpointError(f"{file}: the header does not begin with '{{'; this is no safetensors file")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{file}: the header is not valid: {error}") from None
    if not isinstance(header, dict):  # '{' opened it, so only an internal fault leads here
        raise CheckpointError(f"{file}: the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map strings to strings")
    return header


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_entry(name: str, entry: object, file: Path) -> tuple[str, tuple[int, ...], int, int]:
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where} has the unknown dtype {dtype!r}; known are {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise CheckpointError(f"{where} has the shape {str(shape)[:200]}; it must be a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"{where} has data_offsets {str(offsets)[:200]}; it must be [begin, end]")
    begin, end = offsets
    expected = element_count(shape) * BITS[dtype] // 8
    if end - begin != expected:
        raise CheckpointError(
            f"{where} has data_offsets [{begin}, {end}], but {dtype} of shape {shape} needs {expected} bytes"
        )
    return dtype, tuple(shape), begin, end


def _check_layout(header: dict[str, Any], file: Path, data_start: int, file_size: int) -> list[TensorInfo]:
    data_size = file_size - data_start
    tensors: list[TensorInfo] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _check_entry(name, entry, file)
        if end > data_size:
            raise CheckpointError(
                f"{file}: tensor {name!r} ends at byte {end} of the data, but the file holds {data_size}; "
                f"the file is truncated, download it again"
            )
        tensors.append(TensorInfo(name, dtype, shape, end - begin, file, data_start + begin))
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    position = data_start
    for info in tensors:
        if info.offset != position:
            kind = "overlaps the tensor before it" if info.offset < position else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: tensor {info.name!r} begins at byte {info.offset - data_start} of the data and {kind} "
                f"(expected {position - data_start})"
            )
        position += info.nbytes
    if position != file_size:
        raise CheckpointError(f"{file}: {file_size - position} bytes after the last tensor belong to none")
    return tensors
