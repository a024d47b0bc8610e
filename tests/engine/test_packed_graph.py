"""Graphs of 4-bit and ternary models, held to the torch executor that runs the same files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from packed_inputs import MODELS, weight_inputs, write_named
from packed_models import GPTQ, LLAMA, write_packed
from packed_models import MODELS as PACKED
from reference_attention import Attention, LayerPages
from reference_linear import TernaryLinear, W4A16Linear
from safetensors.numpy import load_file, save_file
from small_models import CONFIGS, Sequences, graph_inputs, write_model

from edged.config import ModelConfig
from edged.engine.graph import GraphSpec, emit
from edged.engine.rope_tables import rope_tables
from edged.errors import UnsupportedError
from edged.executor import tensorrt_weights
from edged.executor.tensorrt_weights import load_weights
from edged.models.architecture import Architecture

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT = 256


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_of_a_packed_model_gives_the_logits_of_the_torch_executor(
    name: str, tmp_path: Path
) -> None:
    from edged.executor.torch_executor import TorchExecutor

    architecture = write_named(tmp_path, name)
    executor = TorchExecutor(
        ModelConfig(name, tmp_path, context_length=CONTEXT, max_sequences=2, prefill_chunk=CONTEXT, threads=1)
    )
    executor.load(lambda *_: None)
    spec = GraphSpec(architecture, "float32")
    model = emit(spec)
    onnx.checker.check_model(model, full_check=True)
    constants = weight_inputs(tmp_path, architecture)
    constants["rope_cosine"], constants["rope_sine"] = rope_tables(architecture, CONTEXT)
    evaluator = ReferenceEvaluator(model, new_ops=[Attention, W4A16Linear, TernaryLinear])
    LayerPages(architecture.layers, executor.limits.pages, architecture.kv_heads, architecture.head_dim)
    sequences = Sequences(2, CONTEXT // 64, architecture.vocabulary)
    for new in ({0: 70, 1: 5}, {0: 1, 1: 1}):
        batch = sequences.step(new)
        expected = executor.logits(batch)
        outputs: list[Any] = list(evaluator.run(None, {**constants, **graph_inputs(batch)}))
        np.testing.assert_allclose(outputs[0], expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


def nodes(config: dict[str, Any], kind: str) -> list[onnx.NodeProto]:
    model = emit(GraphSpec(Architecture.from_config(config), "float16"))
    return [node for node in model.graph.node if node.op_type == kind]


def test_every_packed_linear_is_one_node_whose_weights_are_inputs() -> None:
    found = nodes(MODELS["gptq, a group a row, biases"], "W4A16Linear")
    assert [node.input[1] for node in found] == [
        f"layers.{layer}.{part}" for layer in range(2) for part in ("qkv", "output", "gate_up", "down")
    ]
    assert [node.input[2] for node in found] == [f"{node.input[1]}.groups" for node in found]
    assert found[0].input[3] == "layers.0.qkv_bias"
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in found[2].attribute}
    assert attributes == {
        "plugin_version": b"1",
        "plugin_namespace": b"edged",
        "weight": b"layers.0.gate_up",
        "outputs_of_row": 768,
        "inputs_of_row": 256,
        "group": 128,
        "gated": 1,
        "bias": 1,
    }
    # The activation came along, and the head, which is dense, is the one product of ONNX's own.
    assert len(nodes(MODELS["gptq, a group a row, biases"], "Sigmoid")) == 0
    assert len(nodes(MODELS["gptq, a group a row, biases"], "Gemm")) == 1
    assert len(nodes(MODELS["ternary"], "TernaryLinear")) == 8


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({**GPTQ, "desc_act": True}, "desc_act: .*--act-order static"),
        ({**GPTQ, "group_size": 32}, r"weight layers.0.qkv: group: 32, must be one of \(64, 128\)"),
    ],
)
def test_packed_weights_that_no_plugin_takes_are_refused(quantization: dict[str, Any], message: str) -> None:
    architecture = Architecture.from_config({**LLAMA, "quantization_config": quantization})
    with pytest.raises(UnsupportedError, match=message):
        GraphSpec(architecture, "bfloat16")


@pytest.mark.parametrize("name", ["gptq", "ternary, group 32"])
@pytest.mark.parametrize("slab", [32, 96])
def test_packed_weights_are_the_same_however_they_are_cut(
    name: str, slab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = write_named(tmp_path, name)
    whole = weight_inputs(tmp_path, architecture)
    monkeypatch.setattr(tensorrt_weights, "_SLAB_OUTPUTS", slab)
    cut = weight_inputs(tmp_path, architecture)
    assert all(np.array_equal(whole[each], cut[each]) for each in whole)


@pytest.mark.parametrize(
    ("name", "symmetric"),
    [
        (
            "marlin, group 128",
            {f"layers.{i}.{part}" for i in (0, 1) for part in ("qkv", "output", "gate_up", "down")},
        ),
        ("gptq, group 64", set()),
        ("ternary, group 128", set()),
    ],
)
def test_weights_whose_zero_points_are_all_8_are_told_apart(
    name: str, symmetric: set[str], tmp_path: Path
) -> None:
    config, quantization = PACKED[name]
    write_packed(tmp_path, config, quantization)
    architecture = Architecture.read(tmp_path)
    assert load_weights(tmp_path, architecture, "float16", lambda *_: None, lambda *_: None) == symmetric


def test_one_zero_point_that_is_not_8_makes_a_weight_asymmetric(tmp_path: Path) -> None:
    quantization = {**GPTQ, "group_size": 128}
    write_packed(tmp_path, LLAMA, quantization)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for module, tensor in tensors.items():
        if module.endswith("qzeros"):  # (version 1 stores one less)
            tensor[:] = 0x77777777
    tensors["model.layers.1.mlp.up_proj.qzeros"][1, 3] = 0x77777776
    save_file(tensors, file)
    found = load_weights(tmp_path, Architecture.read(tmp_path), "float16", lambda *_: None, lambda *_: None)
    assert {"layers.0.gate_up", "layers.1.down", "layers.1.qkv"} <= found
    assert "layers.1.gate_up" not in found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_weights_are_rounded_as_torch_rounds_them(dtype: str, tmp_path: Path) -> None:
    import torch

    architecture = write_model(tmp_path, "llama_biased")
    tensors = load_file(tmp_path / "model.safetensors")
    found = weight_inputs(tmp_path, architecture, dtype)
    rows = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    expected = torch.from_numpy(np.concatenate(rows)).to(getattr(torch, dtype))
    assert np.array_equal(found["layers.1.qkv"].view(np.int16), expected.view(torch.int16).numpy())
    assert CONFIGS["llama_biased"]["attention_bias"]
    bias = torch.from_numpy(tensors["model.layers.1.mlp.down_proj.bias"]).to(getattr(torch, dtype))
    assert np.array_equal(found["layers.1.down_bias"].view(np.int16), bias.view(torch.int16).numpy())
