"""Ternary checkpoints: what is recognised, how it is packed, and the numbers that come out of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_models import random_model, write_folder
from safetensors.numpy import save_file
from test_run import digest, edged_logits

from edged.checkpoint.packed import Shape
from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.ternary import not_ternary, pack_ternary_words, read, ternary_form, unpack_ternary_words
from edged.config import ModelConfig
from edged.errors import CheckpointError
from edged.executor.torch_ternary import TernaryProduct, TernaryWeight
from edged.memory.buffers import ModelPlan, weight_buffers
from edged.memory.model_rows import model_rows
from edged.models.architecture import Architecture
from edged.quantize.ternary_pack import pack_ternary

if TYPE_CHECKING:
    from pathlib import Path


def ternary(random: np.random.Generator, outputs: int, inputs: int, group: int) -> np.ndarray[Any, Any]:
    """Fake-quantized in bfloat16: {-1, 0, +1} times a scale a group, some groups all zeros."""
    scales = (
        torch.from_numpy(random.uniform(0.01, 0.2, (outputs, inputs // group))).bfloat16().float().numpy()
    )
    signs = random.integers(-1, 2, (outputs, inputs // group, group))
    signs[random.random((outputs, inputs // group)) < 0.1] = 0
    return (signs * scales[..., None]).reshape(outputs, inputs).astype(np.float32)


def ternary_model(group: int, kind: str = "llama") -> Any:
    """A model in bfloat16 whose linears are ternary; 0: a scale a row."""
    random = np.random.default_rng(group)
    model = random_model(kind)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            outputs, inputs = parameter.shape
            parameter.data = torch.from_numpy(ternary(random, outputs, inputs, group or inputs))
    return model.bfloat16()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2), min_size=32, max_size=32))
def test_words_hold_sixteen_codes_the_first_lowest(codes):
    words = pack_ternary_words(np.array(codes, np.uint8).reshape(1, 32))
    assert words.dtype == np.uint32
    assert [int(words[0, k // 16]) >> 2 * (k % 16) & 3 for k in range(32)] == codes
    assert unpack_ternary_words(words).tolist() == [codes]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), group=st.sampled_from([16, 32, 64]), data=st.data())
def test_a_group_is_ternary_or_it_is_not(seed, group, data):
    random = np.random.default_rng(seed)
    weight = ternary(random, 3, 128, group)
    assert not not_ternary(weight, group).any()
    words, scales = ternary_form(weight, group)
    codes = unpack_ternary_words(words).astype(np.float32) - 1
    assert np.array_equal(codes * np.repeat(scales.astype(np.float32), group, axis=1), weight)
    row, column = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 127))
    weight[row, column] = weight[row, column] * np.float32(0.5) + np.float32(0.003)
    own = np.abs(weight[row, column // group * group : (column // group + 1) * group])
    alone = len(set(own[own > 0].tolist())) <= 1 and np.float32(np.float16(own.max())) == own.max()
    expected = np.zeros((3, 128 // group), bool)
    expected[row, column // group] = not alone
    assert np.array_equal(not_ternary(weight, group), expected)


@pytest.mark.parametrize("scale", [1e-9, 1e6, 0.1])
def test_scales_that_float16_does_not_have_are_not_exact(scale):
    weight = np.full((1, 32), np.float32(scale))
    assert not_ternary(weight, 32).all()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    rows=st.sampled_from([1, 2, 5, 70]),
    shape=st.sampled_from([(1, 16, 16), (7, 64, 32), (33, 96, 32), (20, 256, 256)]),
    tile=st.integers(1, 3),
)
def test_the_product_is_that_of_the_widened_weight(seed, rows, shape, tile):
    outputs, inputs, group = shape
    random = np.random.default_rng(seed)
    weight = ternary(random, outputs, inputs, group)
    words, scales = ternary_form(weight, group)
    x = torch.from_numpy(random.standard_normal((rows, inputs)))
    poison = float("nan")
    product = TernaryProduct(
        torch.full((rows * inputs,), poison, dtype=torch.float64),
        torch.full((tile * inputs // 4,), poison, dtype=torch.float64),
        torch.empty(tile * inputs // 4, dtype=torch.uint8),
    )
    out = torch.full((outputs, rows), poison, dtype=torch.float64).t()
    product(x, TernaryWeight(torch.from_numpy(words.view(np.int32)), torch.from_numpy(scales)), out)
    assert torch.allclose(out, x @ torch.from_numpy(weight).double().t(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("group", "kind"), [(0, "llama"), (32, "llama"), (32, "qwen2")])
def test_a_packed_folder_has_the_same_numbers(tmp_path, group, kind):
    model = ternary_model(group, kind)
    folder = write_folder(tmp_path / "m", model)
    pack_ternary(folder, tmp_path / "t")
    config = json.loads((tmp_path / "t/config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "ternary", "bits": 2, "group_size": group or -1, "lm_head": False}
    tokens = list(range(1, 90))
    wide = random_model(kind)  # a model that was in bfloat16 has frequencies that are rounded
    wide.load_state_dict(model.float().state_dict())
    with torch.inference_mode():
        expected = wide(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(edged_logits(tmp_path / "t", tokens) - expected).max() < 1e-3 * np.abs(expected).max()
    pack_ternary(folder, tmp_path / "again")
    assert digest(tmp_path / "again") == digest(tmp_path / "t")


def test_the_ledger_counts_two_bits_a_weight(tmp_path):
    pack_ternary(write_folder(tmp_path / "m", ternary_model(32)), tmp_path / "t")
    architecture = Architecture.read(tmp_path / "t")
    plan = ModelPlan.of(ModelConfig(name="m", path=tmp_path / "t", dtype="bfloat16"), architecture)
    linears = 3 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96)
    parts = {spec.name: spec.nbytes for spec in weight_buffers(plan)}
    packed = sum(
        size for name, size in parts.items() if name.split(".")[-1] in ("qkv", "output", "gate_up", "down")
    )
    scales = sum(size for name, size in parts.items() if name.endswith(".scales"))
    assert (packed, scales) == (linears // 4, linears // 32 * 2)
    assert not [name for name in parts if name.endswith(".zeros")]
    row = model_rows(plan)[0]
    assert row.bytes == sum(parts.values())
    assert row.note.startswith(f"{linears:,} parameters in 2 bits with their scales")


def test_what_is_not_ternary_is_refused_with_its_share(tmp_path):
    model = ternary_model(32)
    weight = model.model.layers[2].mlp.up_proj.weight.data
    weight[5, 40] = 0.77
    folder = write_folder(tmp_path / "m", model)
    with pytest.raises(CheckpointError) as caught:
        pack_ternary(folder, tmp_path / "t")
    share = 100 / (3 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96) // 32)
    assert f"{share:.3g} % of groups of 32 are not -1, 0 and +1" in caught.value.message
    assert "model.layers.2.mlp.up_proj, group 1" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    dense = write_folder(tmp_path / "dense", random_model())
    with pytest.raises(CheckpointError, match=r"100 % of rows, 100 % of groups of 32 are not"):
        pack_ternary(dense, tmp_path / "t")


def test_a_code_that_stands_for_nothing_is_refused(tmp_path: Path):
    words = pack_ternary_words(np.ones((4, 32), np.uint8))
    words[2, 1] |= np.uint32(3 << 20)
    save_file(
        {"m.qweight": words.view(np.int32), "m.scales": np.ones((4, 1), np.float16)},
        tmp_path / "model.safetensors",
    )
    with (
        WeightFiles.open(tmp_path) as files,
        pytest.raises(CheckpointError, match=r"m\.qweight.*not -1, 0 or \+1"),
    ):
        list(read(files, "m").tiles)
    assert Shape(4, 32, 32).groups == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 4}, "ternary weights have 2"),
        ({"group_size": 24}, "multiples of 16"),
        ({"group_size": 128}, "does not divide the 64 inputs"),
    ],
)
def test_configurations_that_cannot_be_are_refused(tmp_path, change, message):
    pack_ternary(write_folder(tmp_path / "m", ternary_model(32)), tmp_path / "t")
    config = json.loads((tmp_path / "t/config.json").read_text())
    config["quantization_config"].update(change)
    (tmp_path / "t/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        Architecture.read(tmp_path / "t")
