"""GGUF linears of type Q4_0 kept in 4 bits: written as a GPTQ checkpoint, with exactly the numbers that the blocks have.

A block is 32 inputs of one output: a float16 scale d and 16 octets, whose low halves are inputs 0 to 15 and whose high
halves are inputs 16 to 31; the weight is ``d * (q - 8)``. That is a symmetric GPTQ linear with groups of 32. The other
types of some four bits have minima or scales that no integer zero point stands for, and are widened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from edged.checkpoint.packed import pack_words
from edged.checkpoint.safetensors_header import TensorSpec
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from edged.checkpoint.gguf_file import GgufFile
    from edged.checkpoint.gguf_llama import TensorSource
    from edged.checkpoint.packed import UInt8

GROUP = 32
ZERO = 8
SCALE_BYTES = 2
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head"


def linears_of(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The matrices that a model multiplies with, by the names of their modules."""
    return {
        name.removesuffix(".weight"): source
        for name, source in tensors.items()
        if name != _EMBEDDING and len(source.shape) == 2
    }


def whole_products(
    tensors: Mapping[str, TensorSource], stays: Callable[[TensorSource], bool]
) -> tuple[str, ...]:
    """The linears that ``stays`` is true of, and of all their companions in one product."""
    found = {name for name, source in linears_of(tensors).items() if stays(source)}
    return tuple(sorted(name for name in found if all(each in found for each in companions(name))))


def which_are_packed(tensors: Mapping[str, TensorSource], packed: tuple[str, ...]) -> dict[str, Any]:
    """The keys of ``quantization_config`` that tell packed linears from wide ones."""
    return {
        "lm_head": _HEAD in packed,
        "modules_to_not_convert": [
            name for name in linears_of(tensors) if name not in packed and name != _HEAD
        ],
    }


def packed_modules(tensors: Mapping[str, TensorSource]) -> tuple[str, ...]:
    """The modules that stay in 4 bits: linears of type Q4_0, whose companions in one product are too."""
    return whole_products(
        tensors,
        lambda source: source.shape[0] % 8 == 0 and source.tensor.type is GGMLQuantizationType.Q4_0,
    )


def quantization_config(tensors: Mapping[str, TensorSource], packed: tuple[str, ...]) -> dict[str, Any]:
    """``quantization_config`` of a folder that has these modules in 4 bits."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq_v2",
        **which_are_packed(tensors, packed),
    }


def packed_specs(module: str, shape: tuple[int, ...]) -> list[TensorSpec]:
    """The tensors that a module becomes."""
    outputs, inputs = shape
    return [
        TensorSpec(f"{module}.qweight", "I32", (inputs // 8, outputs)),
        TensorSpec(f"{module}.qzeros", "I32", (inputs // GROUP, outputs // 8)),
        TensorSpec(f"{module}.scales", "F16", (inputs // GROUP, outputs)),
        TensorSpec(f"{module}.g_idx", "I32", (inputs,)),
    ]


def packed_arrays(
    file: GgufFile, module: str, source: TensorSource, order: np.ndarray[Any, Any] | None
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors of :func:`packed_specs`, by name.

    Args:
        file: The GGUF file.
        module: The module's name.
        source: Its tensor.
        order: The source row of each output, where rows were permuted.

    Raises:
        CheckpointError: The file ends early, or a scale is NaN or infinity.
    """
    outputs, inputs = source.shape
    groups = inputs // GROUP
    blocks = blocks_of(file, source, GROUP, order)
    scales = finite_scales(file, module, blocks[..., :SCALE_BYTES])  # [N, K/32]
    octets = blocks[..., SCALE_BYTES:]  # [N, K/32, 16]
    numbers = np.concatenate([octets & 15, octets >> 4], axis=2).reshape(outputs, inputs)
    words = pack_words(numbers)  # [N, K/8]
    yield f"{module}.qweight", np.ascontiguousarray(words.T).view(np.int32)
    yield f"{module}.qzeros", np.full((groups, outputs // 8), 0x11111111 * ZERO, np.uint32).view(np.int32)
    yield f"{module}.scales", np.ascontiguousarray(scales.T)
    yield f"{module}.g_idx", (np.arange(inputs) // GROUP).astype(np.int32)


def blocks_of(file: GgufFile, source: TensorSource, group: int, order: np.ndarray[Any, Any] | None) -> UInt8:
    """The blocks of a linear whose quants are of so many inputs each: ``[N, K / group, bytes of a block]``.

    Args:
        file: The GGUF file.
        source: The linear's tensor.
        group: Inputs of a block.
        order: The source row of each output, where rows were permuted.
    """
    outputs, inputs = source.shape
    blocks: UInt8 = file.read_blocks(source.tensor).reshape(outputs, inputs // group, -1)
    return blocks if order is None else blocks[order]


def finite_scales(file: GgufFile, module: str, octets: UInt8) -> npt.NDArray[np.float16]:
    """The scales of a module's blocks, ``[N, K / group, 2]`` as they are stored: ``[N, K / group]``.

    Raises:
        CheckpointError: One is NaN or infinity.
    """
    scales = np.ascontiguousarray(octets).view(np.float16)[..., 0]
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{file.path}: tensor {module!r} holds NaN or infinity; the file is damaged")
    return scales


def companions(module: str) -> list[str]:
    """The modules that are one product with a module, itself among them; none where it is alone."""
    folder, _, name = module.rpartition(".")
    return [f"{folder}.{each}" for group in _TOGETHER if name in group for each in group]
