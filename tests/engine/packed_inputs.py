"""Packed models of every kind, and what their folders hold as the graph's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from packed_models import AWQ, BIASED, GPTQ, LLAMA, MLP, TERNARY, write_packed

from edged.executor.tensorrt_weights import load_weights
from edged.models.architecture import Architecture
from edged.models.cuda_weights import cuda_weight_parts
from edged.models.weights import weight_specs

if TYPE_CHECKING:
    from pathlib import Path

MODELS: dict[str, dict[str, Any]] = {
    "gptq": {**LLAMA, "quantization_config": GPTQ},
    "gptq, a group a row, biases": {**BIASED, "quantization_config": {**GPTQ, "group_size": -1}},
    "gptq with its head, the mlp alone": {
        **LLAMA,
        "quantization_config": {**GPTQ, **MLP, "lm_head": True},
    },
    "awq": {**LLAMA, "quantization_config": AWQ},
    "ternary": {**LLAMA, "quantization_config": TERNARY},
    "ternary, a group a row, biases": {**BIASED, "quantization_config": {**TERNARY, "group_size": -1}},
    "ternary, group 32": {
        **LLAMA,
        "intermediate_size": 352,
        "quantization_config": {**TERNARY, "group_size": 32},
    },
}


def write_named(folder: Path, name: str) -> Architecture:
    """Writes the folder of one of :data:`MODELS`."""
    config = MODELS[name]
    write_packed(folder, config, config["quantization_config"])
    return Architecture.from_config(config)


def weight_inputs(folder: Path, architecture: Architecture, dtype: str = "float32") -> dict[str, Any]:
    """What the loader puts into memory, as the graph's inputs."""
    stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int32": np.int32}
    arrays = {
        part.name: np.full(part.shape, 77, stored[part.dtype or dtype])
        for spec in weight_specs(architecture)
        for part in cuda_weight_parts(spec)
    }

    def store(weight: str, offset: int, data: Any) -> None:
        target = arrays[weight].reshape(-1).view(np.uint8)
        content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        assert offset + len(content) <= len(target)
        target[offset : offset + len(content)] = content

    load_weights(folder, architecture, dtype, store, lambda *_: None)
    return arrays
