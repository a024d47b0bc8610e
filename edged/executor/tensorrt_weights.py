"""Weights from the model folder into device memory, without torch: some megabytes at a time, through numpy.

What is read, and what is refused, is as in :mod:`edged.executor.torch_weights`. Packed weights are turned into the layout
that the kernels read, a weight at a time.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from edged.checkpoint.packed import check_no_bias
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError
from edged.memory.specs import ELEMENT_BYTES
from edged.models.checkpoint import CheckpointPlan
from edged.models.cuda_weights import GROUPS, CudaPacked, cuda_packed
from edged.models.quantization import TERNARY_WORD_WEIGHTS, WORD_WEIGHTS
from plugins_trt.ternary_linear import layout as ternary_layout
from plugins_trt.w4a16_linear import layout as w4a16_layout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from edged.checkpoint.packed import PackedModule
    from edged.executor.base import Progress
    from edged.models.architecture import Architecture
    from edged.models.checkpoint import DenseTensor, PackedLinear
    from edged.models.weights import WeightSource

_PIECE_ELEMENTS = 1 << 21
"""Of a tensor, or of a widened weight, that pass through the host at a time."""

_SLAB_OUTPUTS = 2048
"""Outputs of a packed weight that are turned over at a time; whole tiles of 16."""

_MOST_THREADS = 4

_SYMMETRIC = 8
"""Zero point of symmetric 4-bit weights."""

_FLOATS = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16, "F16": np.float16}

Numbers = npt.NDArray[Any]


class Store(Protocol):
    """Takes what was read."""

    def __call__(self, weight: str, offset: int, data: Numbers) -> None:
        """Put an array's bytes ``offset`` bytes behind the start of a weight."""


def load_weights(
    folder: Path, architecture: Architecture, dtype: str, store: Store, progress: Progress
) -> frozenset[str]:
    """Read a model folder.

    Args:
        folder: The model folder.
        architecture: Its hyper-parameters.
        dtype: What dense weights become: float32, bfloat16 or float16.
        store: Is called with the names of :func:`edged.models.cuda_weights.cuda_weight_parts`.
        progress: Is told of every tensor.

    Returns:
        Names of the 4-bit weights that stay packed and whose zero points are all 8.

    Raises:
        CheckpointError: The files are damaged, do not fit the architecture, hold NaN or infinity in a norm or a scale, or
            values that ``dtype`` cannot hold.
    """
    forms = {each.name: each for each in cuda_packed(architecture)}
    symmetric = set()
    with WeightFiles.open(folder) as files:
        plan = CheckpointPlan.of(architecture, files)
        total = sum(files.info(name).nbytes for name in plan.expected() if name in files)
        done = 0
        # In the order of the files, which is the fastest to read.
        for name in files.names():
            if name in plan.dense:
                _read_dense(files, plan.dense[name], dtype, store)
                done += files.info(name).nbytes
                progress("reading weights", done, total)
        for weight, linears in itertools.groupby(plan.packed, key=lambda linear: linear.weight):
            whole = tuple(linears)
            for linear in whole:
                if f"{linear.module}.bias" not in plan.dense:
                    check_no_bias(files, f"{linear.module}.bias")
            modules = ((linear, plan.read(files, linear)) for linear in whole)
            if weight in forms:
                if _pack(forms[weight], modules, store):
                    symmetric.add(weight)
            else:
                _widen(modules, dtype, store)
            for linear in whole:
                done += sum(files.info(name).nbytes for name in plan.tensors_of(linear) if name in files)
            progress("reading weights", done, total)
    return frozenset(symmetric)


def narrowed(values: npt.NDArray[np.float32], dtype: str) -> Numbers:
    """fp32 numbers in ``dtype``, rounded to the nearest, ties to even; bfloat16 as its bits, uint16."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            cast: Numbers = values.astype(dtype)
        return cast
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    # Adding would turn some NaN into infinity or zero.
    halves: Numbers = np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return halves


def widened(values: Numbers, dtype: str) -> npt.NDArray[np.float32]:
    """fp32 numbers of an array that ``dtype`` (bfloat16: as its bits) is the type of."""
    if dtype != "bfloat16":
        return values.astype(np.float32)
    wide: npt.NDArray[np.float32] = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def _read_dense(files: WeightFiles, tensor: DenseTensor, dtype: str, store: Store) -> None:
    """One tensor into its rows of a weight."""
    source = tensor.source
    info = files.info(source.name)
    found = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[info.dtype]
    count = int(np.prod(source.shape))
    start = source.start * (count // source.shape[0])
    piece = np.empty(min(count, _PIECE_ELEMENTS), _FLOATS[info.dtype])
    for first in range(0, count, _PIECE_ELEMENTS):
        part = piece[: count - first]
        files.read_into(source.name, part.view(np.uint8).data, first * part.itemsize)
        data = part
        if found != dtype:
            wide = widened(part, found)
            data = narrowed(wide, dtype)
            _check_range(files, source, wide, data, dtype)
        if len(source.shape) == 1 and not np.isfinite(widened(data, dtype)).all():
            raise CheckpointError(f"{info.file}: tensor {source.name!r} holds NaN or infinity")
        store(tensor.weight, (start + first) * ELEMENT_BYTES[dtype], data)


def _check_range(files: WeightFiles, source: WeightSource, wide: Numbers, data: Numbers, dtype: str) -> None:
    if dtype == "float16" and not np.isfinite(data).all() and np.isfinite(wide).all():
        raise CheckpointError(
            f"{files.info(source.name).file}: tensor {source.name!r} holds values that float16 cannot; "
            "set dtype to bfloat16 or float32"
        )


def _pack(form: CudaPacked, modules: Iterable[tuple[PackedLinear, PackedModule]], store: Store) -> bool:
    """A packed weight, its modules one below the other, into the kernels' layout; whether its zero points are all 8."""
    of_word = TERNARY_WORD_WEIGHTS if form.ternary else WORD_WEIGHTS
    packed = np.empty((form.outputs, form.inputs // of_word), np.uint32)
    scales, zeros = [], []
    for linear, module in modules:
        for output, word, tile in module.tiles:
            count, words = tile.shape
            packed[linear.start + output :][:count, word : word + words] = tile
        scales.append(module.scales)
        if module.zeros is not None:
            zeros.append(module.zeros)
    _store_tiles(form, packed, store)
    scale = np.concatenate(scales)
    if form.ternary:
        groups = ternary_layout.pack_scales(scale, form.inputs, gated=form.gated)
    else:
        # A group of the file may be several of the kernels'.
        repeats = form.inputs // form.group // scale.shape[1]
        groups = w4a16_layout.pack_groups(
            np.repeat(scale, repeats, axis=1),
            np.repeat(np.concatenate(zeros), repeats, axis=1),
            gated=form.gated,
        )
    store(form.name + GROUPS, 0, groups)
    return not form.ternary and all(bool((zero == _SYMMETRIC).all()) for zero in zeros)


def _store_tiles(form: CudaPacked, packed: npt.NDArray[np.uint32], store: Store) -> None:
    """The integers of a weight, some outputs at a time on several cores: turning them over is what loading waits for."""
    layout = ternary_layout if form.ternary else w4a16_layout
    # Gate and up lie in tiles together, so a slab has the same outputs of both.
    parts = packed.reshape(2 if form.gated else 1, -1, packed.shape[1])  # [parts, N / parts, words]
    step = _SLAB_OUTPUTS // len(parts)

    def turn(first: int) -> npt.NDArray[np.uint32]:
        slab = parts[:, first : first + step].reshape(-1, packed.shape[1])
        tiles: npt.NDArray[np.uint32] = layout.pack_tiles(slab, gated=form.gated)
        return tiles

    offset = 0
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        for tiles in pool.map(turn, range(0, parts.shape[1], step)):
            store(form.name, offset, tiles)
            offset += tiles.nbytes


def _widen(modules: Iterable[tuple[PackedLinear, PackedModule]], dtype: str, store: Store) -> None:
    """A packed weight that is not packed on the device: ``scale * (q - zero)``, rounded once."""
    for linear, module in modules:
        shape = linear.shape
        of_word = TERNARY_WORD_WEIGHTS if module.zeros is None else WORD_WEIGHTS
        bits = 32 // of_word
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        words = np.empty((shape.outputs, shape.inputs // of_word), np.uint32)
        for output, word, tile in module.tiles:
            words[output : output + len(tile), word : word + tile.shape[1]] = tile
        step = max(1, _PIECE_ELEMENTS // shape.inputs)
        for first in range(0, shape.outputs, step):
            rows = slice(first, first + step)
            numbers = (words[rows, :, None] >> shifts) & np.uint32((1 << bits) - 1)
            wide = numbers.reshape(-1, shape.inputs // shape.group, shape.group).astype(np.float32)
            wide -= 1.0 if module.zeros is None else module.zeros[rows, :, None].astype(np.float32)
            wide *= module.scales[rows, :, None].astype(np.float32)
            offset = (linear.start + first) * shape.inputs * ELEMENT_BYTES[dtype]
            store(linear.weight, offset, narrowed(wide.reshape(-1), dtype))
