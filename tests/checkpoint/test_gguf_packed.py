"""Q4_0 linears that stay in 4 bits: exactly the numbers of the gguf library, in the form of every 4-bit checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from packed_gguf import LINEARS, assert_linears_are, from_llama_cpp, quantize

from edged.checkpoint.gguf_import import import_gguf
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError
from edged.models.architecture import Architecture
from edged.models.checkpoint import CheckpointPlan

if TYPE_CHECKING:
    from pathlib import Path

Q4_0, Q4_1 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1


def linears(*layers: int) -> dict[str, gguf.GGMLQuantizationType]:
    return {f"blk.{layer}.{name}.weight": Q4_0 for layer in layers for name in LINEARS}


def held(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The widened weights of the 4-bit modules of a folder, by module."""
    architecture = Architecture.read(folder)
    weights = {}
    with WeightFiles.open(folder) as files:
        plan = CheckpointPlan.of(architecture, files)
        for linear in plan.packed:
            module = plan.read(files, linear)
            q = np.zeros((linear.shape.outputs, linear.shape.inputs), np.float32)
            for output, word, packed in module.tiles:
                for place in range(8):
                    columns = slice(8 * word + place, 8 * (word + packed.shape[1]), 8)
                    q[output : output + len(packed), columns] = (packed >> np.uint32(4 * place)) & 15
            scales = np.repeat(module.scales, linear.shape.group, axis=1)
            zeros = np.repeat(module.zeros, linear.shape.group, axis=1)
            weights[linear.module] = scales.astype(np.float32) * (q - zeros)
    return weights


def test_every_linear_stays_as_it_is(tmp_path: Path, recipe: Any) -> None:
    expected = quantize(recipe, linears(0, 1) | {"token_embd.weight": Q4_0})
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", dtype="bfloat16", keep_4bit=True)
    assert_linears_are(held(tmp_path / "model"), expected)
    with WeightFiles.open(tmp_path / "model") as files:
        assert files.info("model.embed_tokens.weight").dtype == "BF16"  # a table, not a linear
    quantization = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]
    assert (quantization["group_size"], quantization["checkpoint_format"]) == (32, "gptq_v2")
    assert quantization["modules_to_not_convert"] == []


def test_other_types_beside_them_are_widened(tmp_path: Path, recipe: Any) -> None:
    kinds = linears(0, 1)
    kinds |= {"blk.0.ffn_down.weight": Q4_1, "blk.1.attn_v.weight": Q4_1}  # the second takes q and k along
    expected = quantize(recipe, kinds)
    recipe.tensors["output.weight"] = recipe.tensors["token_embd.weight"].copy()
    expected |= quantize(recipe, {"output.weight": Q4_0})
    vocabulary = len(recipe.metadata["tokenizer.ggml.tokens"])
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", keep_4bit=True)
    quantization = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]
    assert quantization["lm_head"] is (vocabulary % 8 == 0)
    assert sorted(quantization["modules_to_not_convert"]) == [
        "model.layers.0.mlp.down_proj",
        *(f"model.layers.1.self_attn.{name}_proj" for name in "kqv"),
    ]
    found = held(tmp_path / "model")
    assert len(found) == 10 + (vocabulary % 8 == 0)
    with WeightFiles.open(tmp_path / "model") as files:
        down = files.read_array("model.layers.0.mlp.down_proj.weight")
        assert np.array_equal(down, expected["blk.0.ffn_down.weight"])
        key = files.read_array("model.layers.1.self_attn.k_proj.weight")
        assert np.array_equal(key, from_llama_cpp(expected["blk.1.attn_k.weight"], 2))


def test_a_file_without_them_is_refused(tmp_path: Path, recipe: Any) -> None:
    quantize(recipe, {"token_embd.weight": Q4_0})
    with pytest.raises(CheckpointError, match="no linears of type Q4_0"):
        import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", keep_4bit=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path, recipe: Any) -> None:
    quantize(recipe, linears(0, 1))
    packed = recipe.tensors["blk.1.ffn_up.weight"].copy()
    packed[3, 18:20] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    recipe.tensors["blk.1.ffn_up.weight"] = packed
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj' holds NaN or infinity"):
        import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", keep_4bit=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
