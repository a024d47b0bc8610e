"""GGUF linears of types TQ1_0 and TQ2_0 kept ternary: at 2 bits a weight, with exactly the numbers that the blocks have.

A block is 256 inputs of one output with one float16 scale d at its end; the weight is ``d * (code - 1)``. TQ2_0 has 64
octets of four codes: octet m of the first or second half holds inputs m, m + 32, m + 64 and m + 96 of that half, the first
in its lowest bits. TQ1_0 has 48 octets of five codes and 4 of four, as fractions in base 3: the next code is the integer part
of three times the octet over 256, and the fraction goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from edged.checkpoint.gguf_packed import (
    SCALE_BYTES,
    blocks_of,
    finite_scales,
    which_are_packed,
    whole_products,
)
from edged.checkpoint.safetensors_header import TensorSpec
from edged.checkpoint.ternary import WORD, pack_ternary_words
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edged.checkpoint.gguf_file import GgufFile
    from edged.checkpoint.gguf_llama import TensorSource
    from edged.checkpoint.packed import UInt8

GROUP = 256
TYPES = (GGMLQuantizationType.TQ1_0, GGMLQuantizationType.TQ2_0)
_TQ1_PARTS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # octets from, to, and how many codes each holds


def ternary_modules(tensors: Mapping[str, TensorSource]) -> tuple[str, ...]:
    """The modules that stay ternary: linears of these types, whose companions in one product are too."""
    return whole_products(tensors, lambda source: source.tensor.type in TYPES)


def ternary_config(tensors: Mapping[str, TensorSource], packed: tuple[str, ...]) -> dict[str, Any]:
    """``quantization_config`` of a folder that has these modules ternary."""
    return {
        "quant_method": "ternary",
        "bits": 2,
        "group_size": GROUP,
        **which_are_packed(tensors, packed),
    }


def ternary_specs(module: str, shape: tuple[int, ...]) -> list[TensorSpec]:
    """The tensors that a module becomes."""
    outputs, inputs = shape
    return [
        TensorSpec(f"{module}.qweight", "I32", (outputs, inputs // WORD)),
        TensorSpec(f"{module}.scales", "F16", (outputs, inputs // GROUP)),
    ]


def ternary_arrays(
    file: GgufFile, module: str, source: TensorSource, order: np.ndarray[Any, Any] | None
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors of :func:`ternary_specs`, by name.

    Args:
        file: The GGUF file.
        module: The module's name.
        source: Its tensor.
        order: The source row of each output, where rows were permuted.

    Raises:
        CheckpointError: The file ends early, a scale is NaN or infinity, or a code is none of the three.
    """
    outputs, inputs = source.shape
    blocks = blocks_of(file, source, GROUP, order)
    scales = finite_scales(file, module, blocks[..., -SCALE_BYTES:])  # [N, K/256]
    octets = blocks[..., :-SCALE_BYTES]
    codes = _tq1(octets) if source.tensor.type is GGMLQuantizationType.TQ1_0 else _tq2(octets)
    if (codes > 2).any():
        raise CheckpointError(
            f"{file.path}: tensor {module!r} holds weights that are not -1, 0 or +1; the file is damaged"
        )
    yield f"{module}.qweight", pack_ternary_words(codes.reshape(outputs, inputs)).view(np.int32)
    yield f"{module}.scales", scales


def _tq2(octets: UInt8) -> UInt8:
    """Codes of blocks: ``[.., 64]`` to ``[.., 256]``."""
    halves = octets.reshape(*octets.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    codes: UInt8 = halves >> shifts & np.uint8(3)  # [.., 2, 4, 32]
    return codes.reshape(*octets.shape[:-1], GROUP)


def _tq1(octets: UInt8) -> UInt8:
    """Codes of blocks: ``[.., 52]`` to ``[.., 256]``."""
    parts = []
    for start, end, count in _TQ1_PARTS:
        fraction = octets[..., start:end].astype(np.uint16)
        for _ in range(count):
            fraction = fraction * np.uint16(3)
            parts.append((fraction >> 8).astype(np.uint8))
            fraction &= np.uint16(255)
    return np.concatenate(parts, axis=-1)
