"""GPTQ linears as AutoGPTQ, GPTQModel and optimum write them (arXiv 2210.17323).

``qweight`` int32 ``[K/8, N]``: eight consecutive inputs of an output a word, the first in the lowest bits. ``qzeros``
int32 ``[K/G, N/8]``: eight consecutive outputs a word; the first format stores them less one. ``scales`` ``[K/G, N]``.
``g_idx`` int32 ``[K]``: the group of each input; with act-order any, else ``k // G``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.checkpoint.packed import (
    INTEGERS,
    SCALES,
    TILE_OUTPUTS,
    Expected,
    PackedModule,
    PackedTile,
    pack_words,
    read_scales,
    read_slabs,
    unpack_words,
)
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.checkpoint.packed import Int32, Shape
    from edged.checkpoint.safetensors_files import WeightFiles


def expected(module: str, shape: Shape, *, act_order: bool) -> dict[str, Expected]:
    """The tensors of a module, by name."""
    n, k, groups = shape.outputs, shape.inputs, shape.groups
    return {
        f"{module}.qweight": Expected((k // 8, n), INTEGERS),
        f"{module}.qzeros": Expected((groups, n // 8), INTEGERS),
        f"{module}.scales": Expected((groups, n), SCALES),
        f"{module}.g_idx": Expected((k,), INTEGERS, needed=act_order),
    }


def read(files: WeightFiles, module: str, shape: Shape, *, act_order: bool, zero_offset: int) -> PackedModule:
    """Read a module.

    Args:
        files: The open checkpoint, which has the tensors of :func:`expected`.
        module: Its name, ``model.layers.0.self_attn.q_proj``.
        shape: Its sizes.
        act_order: Whether groups are as ``g_idx`` says.
        zero_offset: What is added to a stored zero point, modulo 16.

    Raises:
        CheckpointError: ``g_idx`` gives groups of another size, or groups of its own without act-order; scales that are
            no numbers.
    """
    order = _order(files, f"{module}.g_idx", shape, act_order=act_order)
    scales = read_scales(files, f"{module}.scales")  # [K/G, N]
    zeros = unpack_words(files.read_array(f"{module}.qzeros")).reshape(shape.groups, shape.outputs)
    zeros = (zeros + np.uint8(zero_offset)) & np.uint8(15)
    name = f"{module}.qweight"
    tiles = _consecutive(files, name) if order is None else _ordered(files, name, shape, order)
    return PackedModule(order, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T), tiles)


def _order(files: WeightFiles, name: str, shape: Shape, *, act_order: bool) -> Int32 | None:
    if name not in files:
        return None
    groups = files.read_array(name)  # int32 [K]
    inside = bool(((groups >= 0) & (groups < shape.groups)).all())
    if not inside or (np.bincount(groups, minlength=shape.groups) != shape.group).any():
        raise CheckpointError(
            f"{files.info(name).file}: tensor {name!r} does not give each of {shape.groups} groups {shape.group} inputs"
        )
    if not act_order:
        if (groups != np.arange(shape.inputs) // shape.group).any():
            raise CheckpointError(
                f"{files.info(name).file}: tensor {name!r} reorders inputs, but quantization_config.desc_act is false; "
                "set it to true"
            )
        return None
    return np.argsort(groups, kind="stable").astype(np.int32)


def _consecutive(files: WeightFiles, name: str) -> Iterator[PackedTile]:
    """Words are those of the form, input by output; 32 inputs come together."""
    for word, slab in read_slabs(files, name, 4):
        yield PackedTile(0, word, np.array(slab.T, order="C"))


def _ordered(files: WeightFiles, name: str, shape: Shape, order: Int32) -> Iterator[PackedTile]:
    """Any input may be any column, so the module is held as a whole."""
    words = files.read_array(name).view(np.uint32)  # [K/8, N]
    for start in range(0, shape.outputs, TILE_OUTPUTS):
        numbers = unpack_words(words[:, start : start + TILE_OUTPUTS].T).reshape(-1, shape.inputs)  # [n, K]
        yield PackedTile(start, 0, pack_words(numbers[:, order]))
