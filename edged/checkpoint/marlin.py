"""4-bit linears in Marlin's layout, as CPM.cu's converter writes them from a symmetric GPTQ checkpoint.

The integers ``[K, N]`` are cut into tiles of 16 inputs by 16 outputs; four tiles side by side (1024 numbers) are permuted
to the order in which a warp's threads hold an ``mma.m16n8k16`` operand, and packed: ``qweight`` int32 ``[K/16, 2 N]``, of
which word ``4 t + j`` of each 128 is what thread t holds of tile j.
``scales`` ``[K/G, N]`` are permuted in runs of 64 outputs (of 32 when a row is one group). The zero point is 8. q, k and v
lie in one module ``qkv_proj`` and gate and up in one ``gate_up_proj``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.checkpoint.packed import (
    INTEGERS,
    SCALES,
    Expected,
    PackedModule,
    PackedTile,
    interleave,
    read_scales,
    read_slabs,
    turn_numbers,
)
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from edged.checkpoint.packed import Shape
    from edged.checkpoint.safetensors_files import WeightFiles

TILE = 16
ZERO = 8
_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}


def fused_name(modules: Sequence[str]) -> str:
    """Name of the module that holds these one below the other (``..q_proj`` and two more: ``..qkv_proj``)."""
    folder, _, name = modules[0].rpartition(".")
    return f"{folder}.{_FUSED.get(name, name)}" if len(modules) > 1 else modules[0]


def is_marlin(files: WeightFiles) -> bool:
    """Whether a checkpoint's linears are in this layout: GPTQ's own never joins q, k and v."""
    return any(name.endswith((".qkv_proj.qweight", ".gate_up_proj.qweight")) for name in files.names())


def expected(module: str, shape: Shape) -> dict[str, Expected]:
    """The tensors of a module, by name.

    Raises:
        CheckpointError: Sizes that the layout cannot have.
    """
    if shape.inputs % TILE or shape.outputs % (4 * TILE):
        raise CheckpointError(
            f"{module} has {shape.outputs} outputs and {shape.inputs} inputs; Marlin's layout has multiples of "
            f"{4 * TILE} and {TILE}"
        )
    return {
        f"{module}.qweight": Expected((shape.inputs // TILE, 2 * shape.outputs), INTEGERS),
        f"{module}.scales": Expected((shape.groups, shape.outputs), SCALES),
    }


def read(files: WeightFiles, module: str, shape: Shape) -> PackedModule:
    """Read a module, which has the tensors of :func:`expected`.

    Raises:
        CheckpointError: Scales that are no numbers.
    """
    from_stored = np.argsort(scale_order(one_group=shape.groups == 1))
    scales = read_scales(files, f"{module}.scales")
    scales = scales.reshape(-1, len(from_stored))[:, from_stored].reshape(scales.shape)  # [K/G, N]
    return PackedModule(
        None,
        np.ascontiguousarray(scales.T),
        np.full((shape.outputs, shape.groups), ZERO, np.uint8),
        _tiles(files, f"{module}.qweight", shape),
    )


def scale_order(*, one_group: bool) -> npt.NDArray[np.intp]:
    """Which output of a run each stored scale belongs to."""
    if one_group:
        return np.array([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)], np.intp)
    return np.array([i + 8 * j for i in range(8) for j in range(8)], np.intp)


def _tiles(files: WeightFiles, name: str, shape: Shape) -> Iterator[PackedTile]:
    """A word is of one thread and one tile: of outputs ``o`` and ``o + 8``, inputs ``2 r``, ``2 r + 8`` and those after them.

    Its lower half holds the inputs with even numbers and its higher half those that follow them, so that one octet of the
    form is a number of each.
    """
    runs = shape.outputs // (4 * TILE)
    for row, slab in read_slabs(files, name, 2):  # [some 16 inputs, 2 N]; 32 inputs come together
        # [16 inputs, 64 outputs, output in eight, r, tile] words of [half of a tile's outputs, half of its inputs] octets
        held = interleave(slab).reshape(len(slab), runs, 8, 4, 4)
        # From a word an r to a word a pair of halves, of four r: the outputs of eight, then tiles, then 16 inputs.
        turned = turn_numbers(np.array(held.transpose(3, 1, 4, 2, 0), order="C"), bits=8)
        packed = np.empty((runs, 4, 2, 8, len(slab), 2), np.uint32)
        for octet in range(4):
            packed[:, :, octet // 2, :, :, octet % 2] = turned[octet]
        yield PackedTile(0, 2 * row, packed.reshape(shape.outputs, 2 * len(slab)))
