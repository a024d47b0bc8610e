"""Small random models whose linears are in 4 bits or ternary, and what their folders hold as the graph's inputs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from quantized_files import Integers, awq_tensors, gptq_tensors
from safetensors.numpy import save_file

from edged.executor.tensorrt_weights import load_weights
from edged.models.architecture import Architecture
from edged.models.cuda_weights import cuda_weight_parts
from edged.models.weights import weight_specs

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 264,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BIASED = {**LLAMA, "attention_bias": True, "mlp_bias": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
TERNARY = {"quant_method": "ternary", "bits": 2, "group_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "gptq": {**LLAMA, "quantization_config": GPTQ},
    "gptq, a group a row, biases": {**BIASED, "quantization_config": {**GPTQ, "group_size": -1}},
    "gptq with its head, the mlp alone": {
        **LLAMA,
        "quantization_config": {
            **GPTQ,
            "lm_head": True,
            "modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]],
        },
    },
    "awq": {
        **LLAMA,
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
        },
    },
    "ternary": {**LLAMA, "quantization_config": TERNARY},
    "ternary, a group a row, biases": {**BIASED, "quantization_config": {**TERNARY, "group_size": -1}},
    "ternary, group 32": {
        **LLAMA,
        "intermediate_size": 352,
        "quantization_config": {**TERNARY, "group_size": 32},
    },
}


def write_packed(folder: Path, config: dict[str, Any], seed: int = 3) -> Architecture:
    """A model folder with random weights, written from the formats' definitions."""
    architecture = Architecture.from_config(config)
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for spec in weight_specs(architecture):
        for source in spec.sources:
            if spec.packing is None:
                is_norm = len(source.shape) == 1 and not source.name.endswith(".bias")
                values = random.standard_normal(source.shape) / source.shape[-1] ** 0.5
                tensors[source.name] = np.float32(0.5 + random.random(source.shape) if is_norm else values)
                continue
            outputs, inputs = source.shape
            group = spec.packing.group
            if spec.packing.ternary:
                tensors |= _ternary(random, source.module, outputs, inputs, group)
                continue
            linear = Integers(random, outputs, inputs, group, scale=0.2 / inputs**0.5)
            is_awq = config["quantization_config"]["quant_method"] == "awq"
            tensors |= (awq_tensors if is_awq else gptq_tensors)(source.module, linear)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(each) for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return architecture


def _ternary(
    random: np.random.Generator, module: str, outputs: int, inputs: int, group: int
) -> dict[str, Any]:
    codes = random.integers(0, 3, (outputs, inputs)).astype(np.uint32)
    scales = ((0.5 + random.random((outputs, inputs // group))) * 1.2 / inputs**0.5).astype(np.float16)
    words = np.zeros((outputs, inputs // 16), np.uint32)
    for place in range(16):
        words |= codes[:, place::16] << np.uint32(2 * place)
    return {f"{module}.qweight": words.view(np.int32), f"{module}.scales": scales}


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
