"""Weights from the model folder into the executor's buffers: each byte is read once, into its final place.

A tensor of another dtype than the plan's passes through a small bounce buffer, piece by piece. While a model loads,
memory therefore holds the model and a few megabytes more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError
from edged.models.weights import WeightSource, check_checkpoint, weight_specs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edged.executor.base import Progress
    from edged.models.architecture import Architecture

FILE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PIECE_ELEMENTS = 1 << 20


def read_weights(
    folder: Path, architecture: Architecture, weights: Mapping[str, torch.Tensor], progress: Progress
) -> None:
    """Fill ``weights`` (by the names of ``weight_specs``) from the safetensors files of ``folder``.

    Raises:
        CheckpointError: The files are damaged, do not fit the architecture, have a dtype that is no float, hold NaN
            or infinity in a norm, or values that the plan's dtype cannot hold.
    """
    with WeightFiles.open(folder) as files:
        check_checkpoint(architecture, {name: files.info(name).shape for name in files.names()})
        places = {
            source.name: (weights[spec.name], source)
            for spec in weight_specs(architecture)
            for source in spec.sources
        }
        _check_dtypes(files, places)
        total = sum(files.info(name).nbytes for name in places)
        done = 0
        # In the order of the files, which is the fastest to read.
        for name in files.names():
            if name in places:
                weight, source = places[name]
                _read_tensor(files, source, weight[source.start : source.start + source.shape[0]])
                done += files.info(name).nbytes
                progress("reading weights", done, total)


def _check_dtypes(files: WeightFiles, names: Mapping[str, object]) -> None:
    for name in names:
        dtype = files.info(name).dtype
        if dtype not in FILE_DTYPES:
            raise CheckpointError(
                f"{files.info(name).file}: tensor {name!r} is {dtype}; weights must be one of {', '.join(FILE_DTYPES)}"
            )


def _read_tensor(files: WeightFiles, source: WeightSource, target: torch.Tensor) -> None:
    """Read one checkpoint tensor into its rows of a weight."""
    dtype = FILE_DTYPES[files.info(source.name).dtype]
    if dtype == target.dtype:
        files.read_into(source.name, _bytes_of(target))
    else:
        _convert(files, source.name, dtype, target.view(-1))
    # Norms and biases are small, and one bad value in them spoils everything after it.
    if target.dim() == 1 and not bool(target.isfinite().all()):
        raise CheckpointError(f"{files.info(source.name).file}: tensor {source.name!r} holds NaN or infinity")


def _convert(files: WeightFiles, name: str, dtype: torch.dtype, target: torch.Tensor) -> None:
    """Read piece by piece and convert."""
    piece = torch.empty(min(_PIECE_ELEMENTS, target.numel()), dtype=dtype)
    loses_range = target.dtype == torch.float16
    for start in range(0, target.numel(), _PIECE_ELEMENTS):
        part = target[start : start + _PIECE_ELEMENTS]
        files.read_into(name, _bytes_of(piece[: part.numel()]), start * piece.element_size())
        part.copy_(piece[: part.numel()])
        if loses_range and not bool(part.isfinite().all()) and bool(piece[: part.numel()].isfinite().all()):
            raise CheckpointError(
                f"{files.info(name).file}: tensor {name!r} holds values that float16 cannot; "
                f"set dtype to bfloat16 or float32"
            )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
