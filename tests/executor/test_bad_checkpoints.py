"""Damaged checkpoints: refused with the file or the tensor at fault, and nothing of them stays."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from executor_runner import load
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from edged.config import ModelConfig
from edged.errors import CheckpointError
from edged.executor.torch_executor import TorchExecutor

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A model in two shards, as transformers saves it."""
    folder = tmp_path_factory.mktemp("sharded")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    return folder


@pytest.fixture
def folder(sharded, tmp_path):
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def refusal(folder):
    """The refusal of a folder; the executor that refused holds nothing."""
    executor = TorchExecutor(
        ModelConfig(
            name="m", path=folder, context_length=64, prefill_chunk=8, threads=torch.get_num_threads()
        )
    )
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CheckpointError) as caught:
        executor.load(lambda what, done, total: None)
    assert executor.buffers == {}
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    return caught.value.message


def test_the_model_itself_loads(folder):
    load(folder, dtype="float32", context_length=64, prefill_chunk=8).close()


def test_a_missing_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: this file is missing" in refusal(folder)


@pytest.mark.parametrize("seed", range(4))
def test_a_shard_that_is_truncated_anywhere_is_named(folder, seed):
    """At 100 random bytes in all."""
    random = np.random.default_rng(seed)
    shards = sorted(folder.glob("*.safetensors"))
    for _ in range(25):
        shard = shards[random.integers(len(shards))]
        whole = shard.read_bytes()
        os.truncate(shard, int(random.integers(len(whole))))
        assert str(shard) in refusal(folder)
        shard.write_bytes(whole)


def test_a_header_of_2_to_the_63_bytes_is_refused(folder):
    shard = min(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(struct.pack("<Q", 2**63) + content[8:])
    message = refusal(folder)
    assert str(shard) in message
    assert "claims 9223372036854775808 bytes" in message


def rewritten(folder, change):
    """Change a shard's header without moving its data."""
    shard = min(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    name = change(header)
    raw = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    return name


def test_overlapping_offsets_are_refused_by_the_tensors_name(folder):
    def change(header):
        names = sorted(
            (each for each in header if each != "__metadata__"), key=lambda each: header[each]["data_offsets"]
        )
        begin, end = header[names[1]]["data_offsets"]
        header[names[1]]["data_offsets"] = [begin - 4, end - 4]
        return names[1]

    name = rewritten(folder, change)
    assert f"tensor {name!r}" in refusal(folder)
    assert "overlaps" in refusal(folder)


def test_an_unknown_dtype_is_refused_by_the_tensors_name(folder):
    def change(header):
        name = next(each for each in header if each != "__metadata__")
        header[name]["dtype"] = "F12"
        return name

    name = rewritten(folder, change)
    assert f"tensor {name!r} has the unknown dtype 'F12'" in refusal(folder)


def test_shapes_that_contradict_the_configuration_are_all_listed(folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 40}))
    message = refusal(folder)
    assert "6 tensors have shapes that contradict config.json" in message
    assert "model.layers.{0-1}.mlp.gate_proj.weight is [48, 32] instead of [40, 32]" in message
    assert "model.layers.{0-1}.mlp.down_proj.weight is [32, 48] instead of [32, 40]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_an_element_type_that_no_weight_has_is_named(tmp_path, dtype):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] = torch.zeros(16, 32).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "model.layers.1.self_attn.v_proj.weight is " in refusal(tmp_path)


def test_missing_and_surplus_tensors_are_all_listed(folder):
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "num_hidden_layers": 3, "attention_bias": True}))
    message = refusal(folder)
    assert "21 tensors are missing" in message
    file.write_text(json.dumps({**content, "num_hidden_layers": 1}))
    message = refusal(folder)
    assert "9 tensors have no place in this architecture: " in message
    assert "model.layers.1." in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.post_attention_layernorm.weight"])
def test_a_norm_that_is_not_finite_is_named(tmp_path, name, value):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][7] = value
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert f"tensor {name!r} holds NaN or infinity" in message


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "rope_scaling.type"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config.quant_method"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused_by_its_key(folder, change, key):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError) as caught:
        load(folder, dtype="float32", context_length=64, prefill_chunk=8)
    assert caught.value.field == key
    assert str(file) in caught.value.message


def test_a_file_that_shrinks_while_it_is_read_leaves_nothing(folder):
    shards = sorted(folder.glob("*.safetensors"))
    executor = TorchExecutor(
        ModelConfig(
            name="m", path=folder, context_length=64, prefill_chunk=8, threads=torch.get_num_threads()
        )
    )

    def shrink(what, _done, _total):
        if what == "reading weights" and shards[-1].stat().st_size > 200:
            os.truncate(shards[-1], 200)

    with pytest.raises(CheckpointError, match="truncated while in use"):
        executor.load(shrink)
    assert executor.buffers == {}
