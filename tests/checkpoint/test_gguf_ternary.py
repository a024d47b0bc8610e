"""Ternary linears of GGUF files that stay ternary: exactly the numbers of the gguf library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from packed_gguf import LINEARS, assert_linears_are, quantize

from edged.checkpoint.gguf_import import import_gguf
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError, InvalidArgumentError
from edged.models.architecture import Architecture
from edged.models.checkpoint import CheckpointPlan

if TYPE_CHECKING:
    from pathlib import Path

TQ1_0, TQ2_0 = gguf.GGMLQuantizationType.TQ1_0, gguf.GGMLQuantizationType.TQ2_0


def kinds(**changes: gguf.GGMLQuantizationType) -> dict[str, gguf.GGMLQuantizationType]:
    """Both types, mixed."""
    return {
        f"blk.{layer}.{name}.weight": changes.get(name, (TQ1_0, TQ2_0)[(layer + index) % 2])
        for layer in range(2)
        for index, name in enumerate(LINEARS)
    }


def held(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The widened weights of the ternary modules of a folder, by module."""
    weights = {}
    with WeightFiles.open(folder) as files:
        plan = CheckpointPlan.of(Architecture.read(folder), files)
        assert plan.layout == "ternary"
        for linear in plan.packed:
            module = plan.read(files, linear)
            assert module.zeros is None
            words = np.concatenate([tile.packed for tile in module.tiles])
            codes = np.stack([words >> np.uint32(2 * place) & 3 for place in range(16)], axis=-1)
            signs = codes.reshape(len(words), -1).astype(np.float32) - 1
            weights[linear.module] = signs * np.repeat(module.scales.astype(np.float32), 256, axis=1)
    return weights


def test_every_linear_stays_as_it_is(tmp_path: Path, recipe: Any) -> None:
    expected = quantize(recipe, kinds())
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", dtype="bfloat16", keep_ternary=True)
    assert_linears_are(held(tmp_path / "model"), expected)
    config = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["group_size"]) == ("ternary", 256)
    assert config["modules_to_not_convert"] == []


def test_other_types_beside_them_are_widened(tmp_path: Path, recipe: Any) -> None:
    quantize(recipe, kinds(attn_v=gguf.GGMLQuantizationType.Q8_0))
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", keep_ternary=True)
    assert len(held(tmp_path / "model")) == 8


def test_what_cannot_be_kept_is_refused(tmp_path: Path, recipe: Any) -> None:
    with pytest.raises(CheckpointError, match="no linears of type TQ1_0 or TQ2_0"):
        import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", keep_ternary=True)
    with pytest.raises(InvalidArgumentError, match="not both"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "model", keep_ternary=True, keep_4bit=True)
    quantize(recipe, kinds(ffn_up=TQ2_0))
    packed = recipe.tensors["blk.1.ffn_up.weight"].copy()
    packed[3, 7] |= 3 << 4
    recipe.tensors["blk.1.ffn_up.weight"] = packed
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj' holds weights that are not -1, 0"
    ):
        import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", keep_ternary=True)
    packed[3, 64:66] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    recipe.tensors["blk.1.ffn_up.weight"] = packed
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj' holds NaN or infinity"):
        import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model", keep_ternary=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
