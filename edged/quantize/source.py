"""The dense checkpoint that is quantized: its matrices in fp32, its vectors as they are changed on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edged.checkpoint.safetensors_writer import bfloat16_bits
from edged.errors import CheckpointError
from edged.models.checkpoint import CheckpointPlan
from edged.models.weights import weight_specs
from edged.quantize.state import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edged.checkpoint.safetensors_files import WeightFiles
    from edged.models.architecture import Architecture
    from edged.models.weights import WeightSource, WeightSpec
    from edged.quantize.state import Results

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types that what stays wide can be written in, and their names in safetensors."""
_TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PIECE_BYTES = 32 << 20


class Source:
    """An open dense checkpoint.

    Args:
        files: Its weights.
        architecture: Its hyper-parameters.
        dtype: What is not quantized becomes this (a key of :data:`DTYPES`); empty: it stays as it is.

    Raises:
        CheckpointError: It is quantized already, or its tensors do not fit the architecture.
    """

    def __init__(self, files: WeightFiles, architecture: Architecture, dtype: str = "") -> None:
        if architecture.quantization is not None:
            raise CheckpointError(
                f"{files.folder}: is quantized already ({architecture.quantization.method}); give the model it was made from"
            )
        CheckpointPlan.of(architecture, files)
        self.files = files
        self.architecture = architecture
        self.specs = weight_specs(architecture)
        self._dtype = DTYPES.get(dtype, "")
        self._changed: dict[str, torch.Tensor] = {}
        self._fresh: set[str] = set()

    def matrix(self, spec: WeightSpec) -> torch.Tensor:
        """A weight in fp32, ``[N, K]``."""
        weight = torch.empty(spec.shape)
        for source in spec.sources:
            rows = weight[source.start : source.start + source.shape[0]]
            self._read_rows(source.name, rows)
        return weight

    def row_pieces(self, name: str, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """A matrix, some rows at a time in fp32: the first row's number, and ``[n, K]``."""
        total, columns = self.files.info(name).shape
        for start in range(0, total, rows):
            piece = torch.empty(min(rows, total - start), columns)
            self._read_rows(name, piece, start)
            yield start, piece

    def vector(self, spec: WeightSpec) -> torch.Tensor:
        """A norm or bias in fp32, with the changes so far."""
        return torch.cat([self._part(source) for source in spec.sources])

    def divide(self, source: WeightSource, divisors: torch.Tensor) -> torch.Tensor:
        """Divide a vector, rounded to the type that it is written in; returns by what it was really divided."""
        before = self._part(source)
        kind = self.kind(source.name)
        after = (before / divisors).to(_TORCH[kind]).float()
        zero = (before == 0) | (after == 0) | ~after.isfinite()
        after = torch.where(zero, before, after)
        self._changed[source.name] = after
        self._fresh.add(source.name)
        return torch.where(zero, torch.ones_like(before), before / after)

    def kind(self, name: str) -> str:
        """The type that a tensor which is not quantized is written in; F64 becomes F32."""
        own = self.files.info(name).dtype
        return self._dtype or ("F32" if own == "F64" else own)

    def take_changed(self) -> Results:
        """The vectors that were changed since they were last taken, in the type that they are written in."""
        taken = {name: encode(self._changed[name], self.kind(name)) for name in sorted(self._fresh)}
        self._fresh.clear()
        return taken

    def restore(self, files: WeightFiles) -> None:
        """Take changed vectors from the results of a stage."""
        for name in files.names():
            if name in self.files and len(files.info(name).shape) == 1:
                self._changed[name] = decode(files, name)

    def pieces(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """A tensor that is not quantized, piece by piece in the type that it is written in.

        Raises:
            SourceError: It holds NaN, infinity, or what that type cannot.
        """
        kind = self.kind(name)
        if name in self._changed:
            yield encode(self._changed[name], kind)[1]
            return
        info = self.files.info(name)
        size = info.nbytes // max(1, _count(info.shape))
        step = _PIECE_BYTES // size * size
        for start in range(0, info.nbytes, step):
            raw = np.empty(min(step, info.nbytes - start), np.uint8)
            self.files.read_into(name, raw.data, start)
            values = torch.from_numpy(raw).view(_TORCH[info.dtype])
            _check_finite(values, info.file, name)
            written = values.to(_TORCH[kind])
            if not bool(written.isfinite().all()):
                raise SourceError(
                    f"{info.file}: tensor {name!r} holds values that {kind} cannot; choose bfloat16 or float32"
                )
            yield _bits(written)

    def check_wide(self, quantized: Callable[[WeightSpec], bool]) -> None:
        """Read what is not quantized, before any work is put into the rest.

        Raises:
            SourceError: A tensor holds NaN, infinity, or what the type that it is to be written in cannot.
        """
        for spec in self.specs:
            if not quantized(spec):
                for part in spec.sources:
                    for _ in self.pieces(part.name):
                        pass

    def _part(self, source: WeightSource) -> torch.Tensor:
        if source.name in self._changed:
            return self._changed[source.name]
        vector = torch.empty(source.shape)
        self._read_rows(source.name, vector)
        return vector

    def _read_rows(self, name: str, rows: torch.Tensor, first: int = 0) -> None:
        info = self.files.info(name)
        stored = torch.empty(rows.shape, dtype=_TORCH[info.dtype])
        self.files.read_into(
            name, stored.view(-1).view(torch.uint8).numpy().data, first * stored[0].nbytes if first else 0
        )
        rows.copy_(stored)
        _check_finite(rows, info.file, name)


def _check_finite(values: torch.Tensor, file: Path, name: str) -> None:
    if not bool(values.isfinite().all()):
        raise SourceError(
            f"{file}: tensor {name!r} holds NaN or infinity; download or convert the source again (bfloat16 or float32 hold "
            "what float16 cannot)"
        )


def encode(vector: torch.Tensor, kind: str) -> tuple[str, np.ndarray[Any, Any]]:
    """A vector in a type of safetensors."""
    if kind == "BF16":
        return kind, bfloat16_bits(vector.numpy())
    return kind, vector.to(_TORCH[kind]).numpy()


def decode(files: WeightFiles, name: str) -> torch.Tensor:
    """A tensor of :func:`encode` in fp32."""
    array = files.read_array(name)
    kind = files.info(name).dtype
    if kind == "BF16":
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return torch.from_numpy(array.astype(np.float32))


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (
        tensor.view(torch.uint8).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )
    return array


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
