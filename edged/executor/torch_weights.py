"""Weights from the model folder into the executor's buffers: each byte is read once, into its final place.

A tensor of another dtype than the plan's, or for another device, passes through a small bounce buffer, piece by piece, and
so do 4-bit modules (those with act-order as a whole). While a model loads, memory therefore holds the model and a few
megabytes more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.checkpoint.packed import check_no_bias
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError
from edged.models.checkpoint import CheckpointPlan
from edged.models.weights import ORDER, SCALES, ZEROS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from edged.checkpoint.packed import PackedModule
    from edged.executor.base import Progress
    from edged.models.architecture import Architecture
    from edged.models.checkpoint import PackedLinear
    from edged.models.weights import WeightSource

FILE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PIECE_ELEMENTS = 1 << 20


def read_weights(
    folder: Path,
    architecture: Architecture,
    weights: Mapping[str, torch.Tensor],
    progress: Progress,
    store: Callable[[PackedLinear, PackedModule], None] | None = None,
) -> None:
    """Fill ``weights`` (by the names of ``weight_parts``) from the safetensors files of ``folder``.

    Args:
        folder: The model folder.
        architecture: Its hyper-parameters.
        weights: What is filled.
        progress: Is told of every tensor.
        store: Puts a packed module where it belongs; by default into ``weights``, as it comes.

    Raises:
        CheckpointError: The files are damaged, do not fit the architecture, have a dtype that is no float, hold NaN
            or infinity in a norm or a scale, or values that the plan's dtype cannot hold.
    """
    with WeightFiles.open(folder) as files:
        plan = CheckpointPlan.of(architecture, files)
        total = sum(files.info(name).nbytes for name in plan.expected() if name in files)
        done = 0
        # In the order of the files, which is the fastest to read.
        for name in files.names():
            if name in plan.dense:
                weight, source = plan.dense[name]
                _read_tensor(files, source, weights[weight][source.start : source.start + source.shape[0]])
                done += files.info(name).nbytes
                progress("reading weights", done, total)
        for linear in plan.packed:
            if f"{linear.module}.bias" not in plan.dense:
                check_no_bias(files, f"{linear.module}.bias")
            module = plan.read(files, linear)
            if store is None:
                store_packed(linear, module, weights)
            else:
                store(linear, module)
            done += sum(files.info(name).nbytes for name in plan.tensors_of(linear) if name in files)
            progress("reading weights", done, total)


def _read_tensor(files: WeightFiles, source: WeightSource, target: torch.Tensor) -> None:
    """Read one checkpoint tensor into its rows of a weight."""
    dtype = FILE_DTYPES[files.info(source.name).dtype]
    if dtype == target.dtype and target.device.type == "cpu":
        files.read_into(source.name, _bytes_of(target))
    else:
        _convert(files, source.name, dtype, target.view(-1))
    # Norms and biases are small, and one bad value in them spoils everything after it.
    if target.dim() == 1 and not bool(target.isfinite().all()):
        raise CheckpointError(f"{files.info(source.name).file}: tensor {source.name!r} holds NaN or infinity")


def read_whole(files: WeightFiles, source: WeightSource) -> torch.Tensor:
    """A checkpoint tensor of a draft as it is stored.

    Raises:
        CheckpointError: It holds NaN or infinity: all that is drafted would be, and a draft is small enough to look.
    """
    whole = torch.empty(source.shape, dtype=FILE_DTYPES[files.info(source.name).dtype])
    files.read_into(source.name, _bytes_of(whole))
    if not bool(whole.isfinite().all()):
        raise CheckpointError(f"{files.info(source.name).file}: tensor {source.name!r} holds NaN or infinity")
    return whole


def _convert(files: WeightFiles, name: str, dtype: torch.dtype, target: torch.Tensor) -> None:
    """Read piece by piece and convert."""
    piece = torch.empty(min(_PIECE_ELEMENTS, target.numel()), dtype=dtype)
    loses_range = target.dtype == torch.float16 and dtype != torch.float16
    for start in range(0, target.numel(), _PIECE_ELEMENTS):
        part = target[start : start + _PIECE_ELEMENTS]
        files.read_into(name, _bytes_of(piece[: part.numel()]), start * piece.element_size())
        part.copy_(piece[: part.numel()])
        if loses_range and not bool(part.isfinite().all()) and bool(piece[: part.numel()].isfinite().all()):
            raise CheckpointError(
                f"{files.info(name).file}: tensor {name!r} holds values that float16 cannot; "
                f"set dtype to bfloat16 or float32"
            )


def store_packed(linear: PackedLinear, module: PackedModule, weights: Mapping[str, torch.Tensor]) -> None:
    """Put one 4-bit or ternary module into its rows of a weight."""
    rows = slice(linear.start, linear.start + linear.shape.outputs)
    packed, scales = (weights[linear.weight + part][rows] for part in ("", SCALES))
    scales.copy_(torch.from_numpy(module.scales))
    if module.zeros is not None:
        weights[linear.weight + ZEROS][rows].copy_(torch.from_numpy(module.zeros))
    orders = weights.get(linear.weight + ORDER)
    if orders is not None and module.order is not None:
        orders[linear.part].copy_(torch.from_numpy(module.order))
    for output, word, tile in module.tiles:
        count, words = tile.shape
        packed[output : output + count, word : word + words].copy_(torch.from_numpy(tile.view(np.int32)))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
