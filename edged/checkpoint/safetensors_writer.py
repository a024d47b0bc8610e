"""Writes a safetensors file tensor by tensor, so that a model is never in memory as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from typing import TYPE_CHECKING, Any, final

import numpy as np

from edged.checkpoint.safetensors_header import BITS, TensorSpec
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32}
"""What :class:`SafetensorsWriter` writes, and the numpy type of one element (BF16: its bits)."""


def bfloat16_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round float32 to bfloat16 (nearest, ties to even) and return the bits as uint16, NaN staying NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
    # Rounding may carry a NaN's payload into infinity; a quiet bit keeps it a NaN.
    result: np.ndarray[Any, Any] = np.where(np.isnan(values), high | np.uint32(0x40), rounded)
    return result.astype(np.uint16)


@final
class SafetensorsWriter:
    """Writes ``path`` in one pass: the header first, then each tensor in one or several pieces.

    Use as a context manager. The bytes go to a temporary file beside ``path``, which takes its name when the block
    ends well and all tensors are complete; otherwise it is removed and ``path`` stays as it was.

    Args:
        path: The file to write.
        specs: Names, dtypes (F32, F16, BF16 or I32) and shapes of all tensors.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        # Wide elements first: every tensor then begins at a multiple of its element's size.
        ordered = sorted(specs, key=lambda spec: -BITS.get(spec.dtype, 0))
        self._specs = {spec.name: spec for spec in ordered}
        if len(self._specs) != len(ordered):
            raise ValueError(f"{path}: a tensor's name appears twice")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        position = 0
        for spec in ordered:
            if spec.dtype not in DTYPES:
                raise ValueError(
                    f"{path}: tensor {spec.name!r} has dtype {spec.dtype}, not one of {', '.join(DTYPES)}"
                )
            end = position + spec.nbytes
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [position, end],
            }
            self._offsets[spec.name] = position
            position = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._header = len(raw).to_bytes(8, "little") + raw
        self._written = dict.fromkeys(self._specs, 0)
        self._descriptor = -1

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return len(self._header) + sum(spec.nbytes for spec in self._specs.values())

    def __enter__(self) -> SafetensorsWriter:
        self._descriptor = os.open(
            self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )
        try:
            self._pwrite(memoryview(self._header), 0)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._check_complete()
            os.fsync(self._descriptor)
            self._temporary.replace(self.path)
        except BaseException:
            self._discard()
            raise
        os.close(self._descriptor)
        self._descriptor = -1
        fsync_folder(self.path.parent)

    def write(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Append ``array`` to tensor ``name``: the whole of it, or its next elements in row-major order.

        Raises:
            ValueError: Unknown name, wrong element type, or more elements than the tensor has.
            CheckpointError: The disk refuses the bytes.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise ValueError(f"{self.path}: tensor {name!r} was not announced")
        if array.dtype != DTYPES[spec.dtype]:
            raise ValueError(f"{self.path}: tensor {name!r} is {spec.dtype}, the array is {array.dtype}")
        if self._written[name] + array.nbytes > spec.nbytes:
            raise ValueError(f"{self.path}: tensor {name!r} of shape {spec.shape} is already full")
        if array.nbytes:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            self._pwrite(data, len(self._header) + self._offsets[name] + self._written[name])
            self._written[name] += array.nbytes

    def _check_complete(self) -> None:
        for name, spec in self._specs.items():
            if self._written[name] != spec.nbytes:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} has {self._written[name]} of {spec.nbytes} bytes"
                )

    def _pwrite(self, data: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], offset + done)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from error

    def _discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()


def fsync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
