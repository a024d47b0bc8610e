"""A GGUF file: metadata and tensors, read with no trust in the file.

The block formats (sizes and dequantization) come from the ``gguf`` library. Its reader takes every length in the
file at its word, so a damaged file can make it loop or allocate without end; the container is therefore parsed here,
where each length is held against what is left of the file.
"""

from __future__ import annotations

import functools
import os
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from edged.checkpoint.safetensors_files import open_regular, pread_into
from edged.checkpoint.safetensors_header import element_count
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

_T = TypeVar("_T", bool, int, float, str, list[Any])

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_STRING_BYTES = 16 << 20  # the longest in use are chat templates of some 10 KB
_MAX_ARRAY_LENGTH = 1 << 24  # the longest in use are vocabularies of some 260 000 tokens
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL = 7
# Dequantizing takes several temporaries of this size; the whole of a large embedding would take gigabytes.
_CHUNK_ELEMENTS = 4 << 20


class GgufTensor(NamedTuple):
    """One tensor. ``shape`` is row-major (rows first); ``offset`` counts from the start of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    nbytes: int
    offset: int


@functools.cache
def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether the ``gguf`` library turns tensors of this type into floats."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@final
class GgufFile:
    """An open GGUF file; a context manager that closes it.

    Raises:
        CheckpointError: The file is no GGUF file, damaged, big-endian, or of a version that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._file = os.fdopen(open_regular(path), "rb")
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._read(_Cursor(self._file, self.size, path))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """Return a metadata value (bool, int, float, str or list), or None where the key is missing.

        Raises:
            CheckpointError: The value is of another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.path}: {key} is {str(value)[:100]!r}, which is no {kind.__name__}")
        return value

    def get(self, key: str, default: _T) -> _T:
        """Return a metadata value of the type of ``default``, which stands where the key is missing.

        Raises:
            CheckpointError: The value is of another type.
        """
        value = self.find(key, type(default))
        return default if value is None else value

    def read_rows(
        self, tensor: GgufTensor, order: np.ndarray[Any, Any] | None = None
    ) -> Iterator[np.ndarray[Any, Any]]:
        """Read and dequantize a tensor some rows at a time.

        Args:
            tensor: One of :attr:`tensors`.
            order: The source row of each output row, [rows]. The packed rows are then read at once and gathered
                before they are dequantized; without it no more than a few megabytes are read at a time.

        Yields:
            float32 [some rows, columns] (a vector counts as one row), together the whole tensor.

        Raises:
            CheckpointError: The file ends early or cannot be read.
        """
        columns = tensor.shape[-1]
        rows = element_count(tensor.shape[:-1])
        row_bytes = tensor.nbytes // rows
        where = f"{self.path}: tensor {tensor.name!r}"
        step = max(1, _CHUNK_ELEMENTS // columns)
        if order is None:
            packed = np.empty((min(step, rows), row_bytes), np.uint8)
            for start in range(0, rows, step):
                part = packed[: min(step, rows - start)]
                pread_into(
                    self._file.fileno(), part.reshape(-1).data, tensor.offset + start * row_bytes, where
                )
                yield _dequantize(part, tensor.type)
            return
        packed = self.read_blocks(tensor)
        for start in range(0, rows, step):
            yield _dequantize(packed[order[start : start + step]], tensor.type)

    def read_blocks(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """Read a tensor's blocks as they stand, uint8 ``[rows, bytes of a row]``.

        Raises:
            CheckpointError: The file ends early or cannot be read.
        """
        rows = element_count(tensor.shape[:-1])
        packed = np.empty((rows, tensor.nbytes // rows), np.uint8)
        where = f"{self.path}: tensor {tensor.name!r}"
        pread_into(self._file.fileno(), packed.reshape(-1).data, tensor.offset, where)
        return packed

    def _read(self, cursor: _Cursor) -> None:
        if cursor.take(4) != _MAGIC:
            raise CheckpointError(f"{self.path}: does not begin with GGUF; this is no GGUF file")
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            reason = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise CheckpointError(
                f"{self.path}: this GGUF file is {reason}; supported are little-endian 2 and 3"
            )
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(key_count):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise CheckpointError(f"{self.path}: the metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"), key, 0)
        entries = [self._read_tensor(cursor) for _ in range(tensor_count)]
        alignment = self.get("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment}, which is no power of two")
        self._place(entries, -(-cursor.position // alignment) * alignment, alignment)

    def _read_tensor(self, cursor: _Cursor) -> GgufTensor:
        name = cursor.string("a tensor's name")
        where = f"{self.path}: tensor {name!r}"
        dimensions = cursor.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{where} has {dimensions} dimensions; GGUF has 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
        number = cursor.scalar("I")
        offset = cursor.scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(f"{where} has the unknown tensor type {number}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise CheckpointError(
                f"{where} of type {kind.name} has the shape {list(shape)}; rows are blocks of {block}"
            )
        return GgufTensor(name, kind, shape, element_count(shape) // block * block_bytes, offset)

    def _place(self, entries: list[GgufTensor], data_start: int, alignment: int) -> None:
        end = data_start
        for entry in sorted(entries, key=lambda entry: entry.offset):
            where = f"{self.path}: tensor {entry.name!r}"
            if entry.offset % alignment:
                raise CheckpointError(
                    f"{where} begins at {entry.offset}, which is no multiple of {alignment}"
                )
            start = data_start + entry.offset
            if start < end:
                raise CheckpointError(f"{where} overlaps the tensor before it")
            end = start + entry.nbytes
            if end > self.size:
                raise CheckpointError(
                    f"{where} ends at byte {end}, but the file has {self.size}; it is truncated, download it again"
                )
        for entry in entries:
            if entry.name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {entry.name!r} appears twice")
            self.tensors[entry.name] = entry._replace(offset=data_start + entry.offset)


def _dequantize(packed: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):  # a damaged scale is found in the result
        return dequantize(packed, kind)


class _Cursor:
    """Reads forward through the head of the file; every length is checked before anything is allocated."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file = file
        self._size = size
        self._path = path
        self.position = 0

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._size - self.position else b""
        if len(data) != count:
            raise CheckpointError(
                f"{self._path}: needs {count} bytes at byte {self.position} of {self._size}; the file is truncated"
            )
        self.position += count
        return data

    def scalar(self, code: str) -> Any:  # noqa: ANN401 - what the file holds
        form = "<" + code
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q")
        if length > _MAX_STRING_BYTES:
            raise CheckpointError(f"{self._path}: {what} claims {length} bytes; the file is damaged")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not UTF-8: {error}") from None

    def value(self, kind: int, key: str, depth: int) -> Any:  # noqa: ANN401 - what the file holds
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key, depth)
        code = _SCALARS.get(kind)
        if code is None:
            raise CheckpointError(f"{self._path}: {key} has the unknown value type {kind}")
        return self.scalar(code)

    def _array(self, key: str, depth: int) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if length > _MAX_ARRAY_LENGTH or depth >= _MAX_ARRAY_DEPTH:
            raise CheckpointError(
                f"{self._path}: {key} claims {length} values at depth {depth}; the file is damaged"
            )
        code = _SCALARS.get(kind)
        if code is None:
            return [self.value(kind, key, depth + 1) for _ in range(length)]
        form = f"<{length}{code}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))
