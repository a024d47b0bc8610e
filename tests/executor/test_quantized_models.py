"""4-bit checkpoints of every format, whole models: the logits of transformers' model with the widened weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from executor_runner import Runner, load, reference_logits
from quantized_files import (
    Integers,
    awq_tensors,
    awq_weight,
    gptq_tensors,
    gptq_weight,
    marlin_tensors,
)
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from edged.errors import CheckpointError
from edged.executor.torch_packed import PackedProduct, PackedWeight
from edged.memory.buffers import PACKED_TILE, ModelPlan, weight_buffers
from edged.models.architecture import Architecture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA = LlamaConfig(**SIZES)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantized(
    folder: Path,
    quantization: dict[str, Any],
    *,
    config: Any = LLAMA,
    keep: Callable[[str], bool] = lambda _module: False,
    head: bool = False,
    marlin: bool = False,
    act_order: str = "",
) -> Any:
    """Write a random model with 4-bit linears and return transformers' model with what stands in the files.

    Args:
        folder: Where.
        quantization: The ``quantization_config``.
        config: The model's.
        keep: Which modules are not quantized.
        head: Whether the LM head is.
        marlin: Whether in Marlin's layout.
        act_order: ``shared`` gives q, k and v one order, and gate and up; ``own`` gives each linear its own.
    """
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, dtype=torch.float64) + 0.5)
    model.float().save_pretrained(folder)
    tensors: dict[str, Any] = {
        name: item.numpy() for name, item in load_file(folder / "model.safetensors").items()
    }
    fused: dict[str, list[Integers]] = {}
    for name, module in model.named_modules():
        short = name.rpartition(".")[2]
        if not (short in LINEARS and not keep(name)) and not (head and name == "lm_head"):
            continue
        outputs, inputs = module.weight.shape
        group = quantization["group_size"] if quantization["group_size"] > 0 else inputs
        linear = Integers(
            random, outputs, inputs, group, symmetric=bool(marlin), act_order=act_order == "own", scale=0.01
        )
        if act_order == "shared":
            same = np.random.default_rng(len(name.rpartition(".")[0]) + inputs)
            linear.g_idx = same.permutation(linear.g_idx)
        del tensors[f"{name}.weight"]
        if marlin:
            joined = {
                "q": "qkv_proj",
                "k": "qkv_proj",
                "v": "qkv_proj",
                "g": "gate_up_proj",
                "u": "gate_up_proj",
            }
            where = name.rpartition(".")[0] + "." + joined.get(short[0], short)
            fused.setdefault(where, []).append(linear)
            weight = linear.weight()
        elif quantization["quant_method"] == "awq":
            written = awq_tensors(name, linear)
            weight = awq_weight(written, name)
            tensors |= written
        else:
            version = 2 if quantization.get("checkpoint_format") == "gptq_v2" else 1
            written = gptq_tensors(name, linear, version=version)
            weight = gptq_weight(written, name, version=version)
            tensors |= written
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(weight))
    for where, linears in fused.items():
        whole = linears[0]
        whole.q = np.concatenate([each.q for each in linears], axis=1)
        whole.scales = np.concatenate([each.scales for each in linears], axis=1)
        tensors |= marlin_tensors(where, whole)
    save_file(
        {name: torch.from_numpy(np.ascontiguousarray(item)) for name, item in tensors.items()},
        folder / "model.safetensors",
    )
    change(folder, quantization_config=quantization)
    return model


def change(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def rewrite(folder: Path, update: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    update(tensors)
    save_file(tensors, folder / "model.safetensors")


CASES: dict[str, dict[str, Any]] = {
    "gptq, group 64": {"quantization": GPTQ},
    "gptq, group 128": {"quantization": {**GPTQ, "group_size": 128}},
    "gptq, a group a row": {"quantization": {**GPTQ, "group_size": -1}},
    "gptq_v2": {"quantization": {**GPTQ, "checkpoint_format": "gptq_v2"}},
    "gptq, act-order": {"quantization": {**GPTQ, "desc_act": True}, "act_order": "shared"},
    "gptq, an act-order each": {"quantization": {**GPTQ, "desc_act": True}, "act_order": "own"},
    "gptq, act-order, consecutive": {"quantization": {**GPTQ, "desc_act": True}},
    "gptq, qwen3": {"quantization": GPTQ, "config": Qwen3Config(**SIZES)},
    "gptq, biases": {
        "quantization": GPTQ,
        "config": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    },
    "gptq with its head": {"quantization": {**GPTQ, "lm_head": True}, "head": True},
    "gptq, some modules": {
        "quantization": {**GPTQ, "modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"]]},
        "keep": lambda name: not name.endswith(("gate_proj", "up_proj")),
    },
    "gptq, tied": {"quantization": GPTQ, "config": LlamaConfig(**SIZES, tie_word_embeddings=True)},
    "awq, group 64": {"quantization": AWQ},
    "awq, group 128": {"quantization": {**AWQ, "group_size": 128}},
    "awq, a layer's mlp kept": {
        "quantization": {**AWQ, "modules_to_not_convert": ["layers.1.mlp", "lm_head"]},
        "keep": lambda name: "layers.1.mlp" in name,
    },
    "marlin, group 128": {"quantization": {**GPTQ, "group_size": 128, "sym": True}, "marlin": True},
    "marlin, group 64": {"quantization": {**GPTQ, "sym": True}, "marlin": True},
    "marlin, a group a row": {"quantization": {**GPTQ, "group_size": -1, "sym": True}, "marlin": True},
}


EXACT = ("gptq, an act-order each", "awq, group 64", "marlin, group 128")
"""Also in fp64, so that rounding hides nothing."""


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_widened_model(tmp_path: Path, name: str) -> None:
    model = quantized(tmp_path, **CASES[name])
    ids = np.random.default_rng(2).integers(0, SIZES["vocab_size"], 90).tolist()
    expected = reference_logits(model, ids)
    for dtype in ("float32", "float64") if name in EXACT else ("float32",):
        runner = Runner(load(tmp_path, dtype=dtype, context_length=128, max_sequences=2, prefill_chunk=64))
        ours = runner.prefill(runner.sequence(ids), 64)  # 64 rows feature by feature, then 26
        error = np.abs(ours - expected).max() / np.abs(expected).max()
        assert error < 1e-4, dtype
        sequence = runner.sequence(ids)
        for count in (60, 29):
            runner.logits([(sequence, count)])
        one = runner.logits([(sequence, 1)])  # one row
        assert np.abs(one[0] - expected[-1]).max() / np.abs(expected).max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gptq, act-order", "gptq with its head"])
def test_half_precision_plans_keep_the_4_bit_weights_as_they_are(
    tmp_path: Path, name: str, dtype: str
) -> None:
    model = quantized(tmp_path, **CASES[name])
    ids = list(range(50))
    expected = reference_logits(model, ids)
    runner = Runner(load(tmp_path, dtype=dtype, context_length=64, max_sequences=1, prefill_chunk=49))
    ours = runner.prefill(runner.sequence(ids), 49)  # 49 rows, then one
    assert np.abs(ours - expected).max() / np.abs(expected).max() < 2e-2  # embedding, head and KV are rounded


def test_the_ledger_knows_the_bytes_of_4_bit_weights(tmp_path: Path) -> None:
    quantized(tmp_path, **CASES["gptq, an act-order each"])
    architecture = Architecture.read(tmp_path)
    plan = ModelPlan(architecture, "float32", 64, 1, 64)
    executor = load(tmp_path, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=64)
    buffers = {spec.name: spec for spec in weight_buffers(plan)}
    for name, spec in buffers.items():
        tensor = executor.buffers[name]
        assert tensor.numel() * tensor.element_size() == spec.nbytes, name
    for name, outputs, inputs, modules in (
        ("layers.0.qkv", 256, 128, 3),
        ("layers.1.output", 128, 128, 1),
        ("layers.1.gate_up", 512, 128, 2),
        ("layers.0.down", 128, 256, 1),
    ):
        held = sum(buffers[name + part].nbytes for part in ("", ".scales", ".zeros", ".order"))
        assert held == outputs * (inputs // 2 + 3 * inputs // 64) + 4 * modules * inputs


class LargestTensor(TorchDispatchMode):
    """Elements of the largest new tensor that anything makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_4_bit_weight_is_never_wide_as_a_whole(rows: int) -> None:
    outputs, inputs, group = 4096, 1024, 128
    assert outputs * inputs > 4 * PACKED_TILE
    linear = Integers(np.random.default_rng(3), outputs, inputs, group)
    packed = np.ascontiguousarray(gptq_tensors("m", linear)["m.qweight"].T)
    weight = PackedWeight(
        torch.from_numpy(packed),
        torch.from_numpy(np.ascontiguousarray(linear.scales.T)),
        torch.from_numpy(np.ascontiguousarray(linear.zeros.T.astype(np.uint8))),
        (outputs,),
    )
    product = PackedProduct(
        torch.full((rows * inputs,), torch.nan),
        torch.full((PACKED_TILE // 2,), torch.nan),
        torch.zeros(PACKED_TILE // 2, dtype=torch.uint8),
    )
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    out = torch.full((rows, outputs), torch.nan)
    with LargestTensor() as largest:
        product(x, weight, out)
    assert largest.elements < outputs * inputs // 4
    expected = x.double().numpy() @ linear.weight().T
    assert np.abs(out.numpy() - expected).max() / np.abs(expected).max() < 1e-5


def refused(folder: Path, message: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=8)
    return caught.value


def test_tensors_that_do_not_fit_are_all_listed(tmp_path: Path) -> None:
    quantized(tmp_path, GPTQ)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.self_attn.k_proj.qzeros"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(128, 128)
        tensors["model.layers.1.mlp.up_proj.qweight"] = torch.zeros(8, 256, dtype=torch.int32)
        tensors["model.layers.1.mlp.down_proj.scales"] = torch.zeros(4, 128, dtype=torch.int32)

    rewrite(tmp_path, damage)
    message = refused(tmp_path, "do not fit the gptq llama model").message
    assert "1 tensors are missing: model.layers.0.self_attn.k_proj.qzeros" in message
    assert "no place in this architecture: model.layers.0.self_attn.q_proj.weight" in message
    assert "model.layers.1.mlp.up_proj.qweight is [8, 256] instead of [16, 256]" in message
    assert "model.layers.1.mlp.down_proj.scales is I32 instead of F16 or BF16 or F32" in message


def test_a_bias_of_zeros_is_harmless_and_another_is_refused(tmp_path: Path) -> None:
    model = quantized(tmp_path, GPTQ)
    name = "model.layers.1.mlp.up_proj.bias"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(256)}))
    runner = Runner(load(tmp_path, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=8))
    expected = reference_logits(model, [1, 2, 3])
    assert np.abs(runner.prefill(runner.sequence([1, 2, 3]), 3) - expected).max() < 1e-3
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.full((256,), -0.0, dtype=torch.bfloat16)}))
    load(tmp_path, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=8).close()
    rewrite(tmp_path, lambda tensors: tensors[name][7:8].fill_(1e-3))
    refused(tmp_path, rf"{name}.*not all zeros")


def test_an_act_order_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    quantized(tmp_path, GPTQ, act_order="own")
    refused(tmp_path, r"q_proj\.g_idx.*desc_act is false")
    change(tmp_path, quantization_config={**GPTQ, "desc_act": True})
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.g_idx"))
    refused(tmp_path, r"1 tensors are missing: model\.layers\.0\.mlp\.down_proj\.g_idx")


def test_marlin_has_no_act_order(tmp_path: Path) -> None:
    quantized(tmp_path, {**GPTQ, "desc_act": True}, marlin=True)
    refused(tmp_path, "desc_act is true, which files in Marlin's layout do not have")


def test_parts_of_one_product_are_quantized_together(tmp_path: Path) -> None:
    quantized(tmp_path, {**AWQ, "modules_to_not_convert": ["k_proj"]}, keep=lambda name: "k_proj" in name)
    error = refused(tmp_path, r"q_proj, .*v_proj and not .*k_proj")
    assert error.field == "quantization_config"


@pytest.mark.parametrize(
    ("quantization", "name"), [(GPTQ, "quantize_config.json"), (AWQ, "quant_config.json")]
)
def test_the_quantizers_own_file_says_how_a_folder_is_quantized(
    tmp_path: Path, quantization: dict[str, Any], name: str
) -> None:
    model = quantized(tmp_path, quantization)
    change(tmp_path, quantization_config=None)
    own = {key: value for key, value in quantization.items() if key != "quant_method"}
    (tmp_path / name).write_text(json.dumps(own))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-64g.safetensors")
    runner = Runner(load(tmp_path, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=8))
    expected = reference_logits(model, [1, 2, 3])
    assert np.abs(runner.prefill(runner.sequence([1, 2, 3]), 3) - expected).max() < 1e-3
