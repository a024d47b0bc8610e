"""AWQ linears as AutoAWQ writes them, layout ``gemm`` (arXiv 2306.00978).

``qweight`` int32 ``[K, N/8]`` and ``qzeros`` int32 ``[K/G, N/8]``: eight consecutive outputs a word, of which bits 4j to
4j+3 hold output ``(0, 2, 4, 6, 1, 3, 5, 7)[j]``. ``scales`` ``[K/G, N]``.
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
    read_scales,
    read_slabs,
    turn_numbers,
    unpack_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.checkpoint.packed import Shape, UInt8, UInt32
    from edged.checkpoint.safetensors_files import WeightFiles

INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output of eight each four bits of a word hold."""
_PLACE = tuple(INTERLEAVED.index(output) for output in range(8))


def expected(module: str, shape: Shape) -> dict[str, Expected]:
    """The tensors of a module, by name."""
    n, k, groups = shape.outputs, shape.inputs, shape.groups
    return {
        f"{module}.qweight": Expected((k, n // 8), INTEGERS),
        f"{module}.qzeros": Expected((groups, n // 8), INTEGERS),
        f"{module}.scales": Expected((groups, n), SCALES),
    }


def read(files: WeightFiles, module: str) -> PackedModule:
    """Read a module (its name as in ``model.layers.0.self_attn.q_proj``), which has the tensors of :func:`expected`.

    Raises:
        CheckpointError: Scales that are no numbers.
    """
    scales = read_scales(files, f"{module}.scales")  # [K/G, N]
    zeros = _outputs(files.read_array(f"{module}.qzeros").view(np.uint32))  # [K/G, N]
    return PackedModule(
        None,
        np.ascontiguousarray(scales.T),
        np.ascontiguousarray(zeros.T),
        _tiles(files, f"{module}.qweight"),
    )


def _tiles(files: WeightFiles, name: str) -> Iterator[PackedTile]:
    for start, slab in read_slabs(files, name, 32):  # [some inputs, N/8]; 32 inputs come together
        rows, eights = len(slab) // 8, slab.shape[1]
        # Eight inputs of eight outputs: from a word an input to a word an output.
        turned = turn_numbers(np.array(slab.reshape(rows, 8, eights).transpose(1, 0, 2), order="C"))
        packed = np.empty((eights, 8, rows), np.uint32)  # [N, inputs / 8]
        for place, output in enumerate(INTERLEAVED):
            packed[:, output] = turned[place].T
        yield PackedTile(0, start // 8, packed.reshape(8 * eights, rows))


def _outputs(words: UInt32) -> UInt8:
    """Words of eight interleaved outputs, in the outputs' order: ``[rows, m]`` to ``[rows, 8 m]``."""
    numbers: UInt8 = unpack_words(words)[..., _PLACE]
    return numbers.reshape(words.shape[0], -1)
