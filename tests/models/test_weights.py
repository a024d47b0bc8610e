from __future__ import annotations

import json
import os
import struct

import pytest
import torch
import transformers
from test_architecture import LLAMA, MINICPM4_8B

from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError
from edged.models.architecture import Architecture
from edged.models.checkpoint import CheckpointPlan
from edged.models.weights import packed_count, parameter_count, weight_parts, weight_specs

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def plan_of(folder, architecture, shapes, dtype="BF16"):
    """The plan of a checkpoint with tensors of these shapes, all zeros (the file has a hole for them)."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(file, 8 + len(raw) + end)
    with WeightFiles.open(folder) as files:
        return CheckpointPlan.of(architecture, files)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
        transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
        transformers.Qwen2Config(**{key: value for key, value in SMALL.items() if key != "head_dim"}),
        transformers.Qwen3Config(**SMALL),
    ],
    ids=lambda config: config.model_type,
)
def test_every_tensor_of_transformers_has_its_place(config, tmp_path):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    architecture = Architecture.from_config(config.to_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    plan = plan_of(tmp_path, architecture, shapes)
    assert set(plan.dense) == set(shapes)
    assert not plan.packed
    assert parameter_count(architecture) == model.num_parameters()


def test_sources_fill_each_weight_without_gaps():
    for config in (
        LLAMA,
        MINICPM4_8B,
        {**LLAMA, "model_type": "qwen2", "attention_bias": True, "mlp_bias": True},
    ):
        for spec in weight_specs(Architecture.from_config(config)):
            row = 0
            for source in spec.sources:
                assert source.start == row
                assert source.shape[1:] == spec.shape[1:]
                row += source.shape[0]
            assert row == spec.shape[0]


def test_q_k_v_and_gate_up_are_one_matrix_each():
    specs = {spec.name: spec for spec in weight_specs(Architecture.from_config(LLAMA))}
    qkv = specs["layers.7.qkv"]
    assert qkv.shape == (576 + 2 * 192, 576)
    assert [source.name.split(".")[-2] for source in qkv.sources] == ["q_proj", "k_proj", "v_proj"]
    assert specs["layers.7.gate_up"].shape == (2 * 1536, 576)


def test_minicpm4_8b_has_its_published_size():
    count = parameter_count(Architecture.from_config(MINICPM4_8B))
    assert 2 * count == pytest.approx(16.4e9, rel=0.01)  # bytes in bfloat16, as released


def test_all_faults_are_listed(tmp_path):
    architecture = Architecture.from_config(LLAMA)
    with pytest.raises(CheckpointError) as caught:
        plan_of(tmp_path, architecture, {"model.norm.weight": (3,), "extra": (1,)}, "I16")
    message = caught.value.message
    assert "272 tensors are missing: model.embed_tokens.weight, " in message
    assert (
        "model.layers.{0-29}.self_attn.q_proj.weight, model.layers.{0-29}.self_attn.k_proj.weight" in message
    )
    assert "1 tensors have no place in this architecture: extra" in message
    assert "model.norm.weight is [3] instead of [576]" in message
    assert "model.norm.weight is I16 instead of F64 or F32 or BF16 or F16" in message


def test_a_4_bit_minicpm4_8b_is_as_large_as_the_published_one():
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    architecture = Architecture.from_config({**MINICPM4_8B, "quantization_config": quantization})
    assert packed_count(architecture) == parameter_count(architecture) - 2 * 73448 * 4096 - 65 * 4096
    widths = {"": 2, "int32": 4, "float16": 2, "uint8": 1}
    held = sum(
        torch.Size(part.shape).numel() * widths[part.dtype]
        for spec in weight_specs(architecture)
        for part in weight_parts(spec)
    )
    assert held == pytest.approx(5.1e9, rel=0.02)  # 7.58e9 weights of 4.19 bits, and two tables in bfloat16
