"""Small random models whose linears are in 4 bits or ternary, written from the formats' definitions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from quantized_files import Integers, awq_tensors, gptq_tensors, marlin_tensors
from safetensors.numpy import save_file

from edged.models.architecture import Architecture
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
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MLP = {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]]}
TERNARY = {"quant_method": "ternary", "bits": 2, "group_size": 128}
MODELS = {
    "gptq, group 64": (LLAMA, GPTQ),
    "gptq, a group a row, biases": (BIASED, {**GPTQ, "group_size": -1}),
    "gptq with its head": (LLAMA, {**GPTQ, "lm_head": True}),
    "gptq, the mlp alone": (LLAMA, {**GPTQ, **MLP}),
    "awq, group 128": (LLAMA, AWQ),
    "marlin, group 128": (LLAMA, {**GPTQ, "group_size": 128, "sym": True, "marlin": True}),
    "ternary, group 128": (LLAMA, TERNARY),
    "ternary, group 32, biases": ({**BIASED, "intermediate_size": 352}, {**TERNARY, "group_size": 32}),
    "ternary, a group a row, with its head": (LLAMA, {**TERNARY, "group_size": -1, "lm_head": True}),
    "ternary, group 256": ({**LLAMA, "intermediate_size": 512}, {**TERNARY, "group_size": 256}),
}


def write_packed(
    folder: Path, config: dict[str, Any], quantization: dict[str, Any], seed: int = 3
) -> dict[str, Any]:
    """Writes a model with random weights, its linears packed; what these are, by the name of their module.

    ``marlin`` in the quantization writes GPTQ's in CPM.cu's layout.
    """
    quantization = dict(quantization)
    marlin = quantization.pop("marlin", False)
    config = {**config, "quantization_config": quantization}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for spec in weight_specs(Architecture.from_config(config)):
        linears: list[tuple[str, Integers]] = []
        for source in spec.sources:
            if spec.packing is None:
                small = len(source.shape) == 1 and not source.name.endswith(".bias")
                values = random.standard_normal(source.shape) / (1 if small else source.shape[-1] ** 0.5)
                tensors[source.name] = np.float32(0.5 + random.random(source.shape) if small else values)
                continue
            outputs, inputs = source.shape
            if spec.packing.ternary:
                written, weights[source.module] = ternary_tensors(
                    random, source.module, outputs, inputs, spec.packing.group
                )
                tensors |= written
                continue
            linear = Integers(
                random, outputs, inputs, spec.packing.group, symmetric=marlin, scale=0.2 / inputs**0.5
            )
            weights[source.module] = linear.weight()
            linears.append((source.module, linear))
        if marlin and linears:
            module, whole = linears[0]
            for part in ("q", "scales"):
                setattr(whole, part, np.concatenate([getattr(linear, part) for _, linear in linears], axis=1))
            fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
            start, _, name = module.rpartition(".")
            tensors |= marlin_tensors(f"{start}.{fused.get(name, name)}", whole)
            continue
        for module, linear in linears:
            write = awq_tensors if quantization["quant_method"] == "awq" else gptq_tensors
            tensors |= write(module, linear)
    save_file(
        {name: np.ascontiguousarray(item) for name, item in tensors.items()}, folder / "model.safetensors"
    )
    return weights


def ternary_tensors(
    random: np.random.Generator, module: str, outputs: int, inputs: int, group: int
) -> tuple[dict[str, Any], Any]:
    """A module of random ternary weights, element by element as the format is defined, and the weights."""
    codes = random.integers(0, 3, (outputs, inputs)).astype(np.uint32)
    scales = ((0.5 + random.random((outputs, inputs // group))) * 1.2 / inputs**0.5).astype(np.float16)
    words = np.zeros((outputs, inputs // 16), np.uint32)
    for place in range(16):
        words |= codes[:, place::16] << np.uint32(2 * place)
    weight = (codes.astype(np.float64) - 1.0) * np.repeat(scales.astype(np.float64), group, axis=1)
    return {f"{module}.qweight": words.view(np.int32), f"{module}.scales": scales}, weight
