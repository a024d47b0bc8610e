"""4-bit formats: each comes out in the one form with exactly the numbers that its definition gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from quantized_files import (
    Integers,
    awq_tensors,
    awq_weight,
    gptq_tensors,
    gptq_weight,
    marlin_tensors,
    pack,
)

from edged.checkpoint import awq, gptq, marlin
from edged.checkpoint.packed import PackedModule, Shape, pack_words, unpack_words
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "model.layers.0.mlp.down_proj"
SHAPES = [
    Shape(64, 128, 128),
    Shape(256, 256, 64),
    Shape(320, 384, 128),
    Shape(576, 576, 64),
    Shape(64, 96, 96),
    Shape(832, 64, 32),
]


def opened(folder: Path, tensors: dict[str, Any]) -> WeightFiles:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return WeightFiles.open(folder)


def widened(module: PackedModule, shape: Shape) -> np.ndarray[Any, Any]:
    """float64 ``[N, K]`` of the form, one element at a time as its description says."""
    weight = np.full((shape.outputs, shape.inputs), np.nan)
    order = np.arange(shape.inputs) if module.order is None else module.order
    kinds = [str(part.dtype) for part in (module.scales, module.zeros)]
    assert kinds == ["float16", "uint8"]
    assert module.scales.shape == module.zeros.shape == (shape.outputs, shape.groups)
    for output, word, packed in module.tiles:
        assert str(packed.dtype) == "uint32"
        n = output + np.arange(len(packed))
        for j in range(8 * word, 8 * (word + packed.shape[1])):
            q = (packed[:, j // 8 - word] >> np.uint32(4 * (j % 8))) & 15
            scale = module.scales[n, j // shape.group].astype(np.float64)
            zero = module.zeros[n, j // shape.group].astype(np.float64)
            assert np.isnan(weight[n, order[j]]).all(), "twice"
            weight[n, order[j]] = scale * (q.astype(np.float64) - zero)
    return weight


@pytest.fixture(params=[None, 3000], ids=["at once", "in slabs"], autouse=True)
def slabs(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read at once, or some rows at a time."""
    if request.param is not None:
        monkeypatch.setattr("edged.checkpoint.packed.SLAB_BYTES", request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_is_what_its_definition_says(
    tmp_path: Path, shape: Shape, act_order: bool, version: int
) -> None:
    linear = Integers(np.random.default_rng(1), *shape, act_order=act_order)
    tensors = gptq_tensors(MODULE, linear, version=version)
    with opened(tmp_path, tensors) as files:
        module = gptq.read(files, MODULE, shape, act_order=act_order, zero_offset=2 - version)
        ours = widened(module, shape)
    assert np.array_equal(ours, gptq_weight(tensors, MODULE, version=version))
    assert np.array_equal(ours, linear.weight())
    assert (module.order is not None) == act_order


def test_the_first_gptq_format_without_a_group_index(tmp_path: Path) -> None:
    shape = SHAPES[1]
    tensors = gptq_tensors(MODULE, Integers(np.random.default_rng(2), *shape))
    expected = gptq_weight(tensors, MODULE)
    del tensors[f"{MODULE}.g_idx"]
    with opened(tmp_path, tensors) as files:
        assert np.array_equal(
            widened(gptq.read(files, MODULE, shape, act_order=False, zero_offset=1), shape), expected
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_awq_is_what_its_definition_says(tmp_path: Path, shape: Shape) -> None:
    linear = Integers(np.random.default_rng(3), *shape)
    tensors = awq_tensors(MODULE, linear)
    with opened(tmp_path, tensors) as files:
        ours = widened(awq.read(files, MODULE), shape)
    assert np.array_equal(ours, awq_weight(tensors, MODULE))
    assert np.array_equal(ours, linear.weight())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_marlin_is_the_gptq_checkpoint_that_it_was_made_from(tmp_path: Path, shape: Shape) -> None:
    linear = Integers(np.random.default_rng(4), *shape, symmetric=True)
    with opened(tmp_path, marlin_tensors(MODULE, linear)) as files:
        assert np.array_equal(widened(marlin.read(files, MODULE, shape), shape), linear.weight())


def test_marlin_joins_modules_under_names_of_its_own(tmp_path: Path) -> None:
    attention, mlp = "model.layers.3.self_attn.", "model.layers.3.mlp."
    names = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    assert marlin.fused_name(names) == attention + "qkv_proj"
    assert marlin.fused_name([mlp + "gate_proj", mlp + "up_proj"]) == mlp + "gate_up_proj"
    assert marlin.fused_name([mlp + "down_proj"]) == mlp + "down_proj"
    with opened(tmp_path, {attention + "qkv_proj.qweight": np.zeros((1, 1), np.int32)}) as files:
        assert marlin.is_marlin(files)
    with opened(tmp_path, {attention + "q_proj.qweight": np.zeros((1, 1), np.int32)}) as files:
        assert not marlin.is_marlin(files)
    with pytest.raises(CheckpointError, match=r"down_proj has 72 outputs"):
        marlin.expected(mlp + "down_proj", Shape(72, 64, 64))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_words_are_eight_numbers_lowest_first(rows: int, words: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 16, (rows, 8 * words), np.uint8)
    packed = pack_words(numbers)
    assert np.array_equal(packed.view(np.int32), pack(numbers, 1))
    assert np.array_equal(unpack_words(packed).reshape(numbers.shape), numbers)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_scales_of_every_kind(tmp_path: Path, kind: str) -> None:
    shape = SHAPES[0]
    linear = Integers(np.random.default_rng(5), *shape)
    bits = linear.scales.astype(np.float32).view(np.uint32)
    bits &= np.uint32(0xFFFF0000)  # bfloat16 has these
    linear.scales = bits.view(np.float32).astype(np.float16)
    tensors = gptq_tensors(MODULE, linear)
    with opened(tmp_path, tensors) as files:
        expected = widened(gptq.read(files, MODULE, shape, act_order=False, zero_offset=1), shape)
    if kind == "F32":
        tensors[f"{MODULE}.scales"] = bits.view(np.float32)
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    elif kind == "BF16":
        pieces = {
            name: {"dtype": {"int32": "I32", "float16": "BF16"}[str(array.dtype)], "shape": list(array.shape)}
            for name, array in tensors.items()
        }
        tensors[f"{MODULE}.scales"] = (bits >> np.uint32(16)).astype(np.uint16)
        _save_raw(tmp_path / "model.safetensors", tensors, pieces)
    with WeightFiles.open(tmp_path) as files:
        assert files.info(f"{MODULE}.scales").dtype == kind
        ours = widened(gptq.read(files, MODULE, shape, act_order=False, zero_offset=1), shape)
    assert np.array_equal(ours, expected)


def _save_raw(path: Path, tensors: dict[str, Any], header: dict[str, Any]) -> None:
    import json
    import struct

    data = b""
    for name, array in tensors.items():
        header[name]["data_offsets"] = [len(data), len(data) + array.nbytes]
        data += array.tobytes()
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN or infinity"), (np.inf, "NaN or infinity"), (1e6, "float16")])  # fmt: skip
def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path: Path, value: float, message: str) -> None:
    shape = SHAPES[0]
    tensors = awq_tensors(MODULE, Integers(np.random.default_rng(6), *shape))
    tensors[f"{MODULE}.scales"] = tensors[f"{MODULE}.scales"].astype(np.float32)
    tensors[f"{MODULE}.scales"][0, 5] = value
    expected = rf"{MODULE}\.scales.*{message}"
    with opened(tmp_path, tensors) as files, pytest.raises(CheckpointError, match=expected):
        awq.read(files, MODULE)


def test_a_group_index_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    shape = SHAPES[1]
    tensors = gptq_tensors(MODULE, Integers(np.random.default_rng(7), *shape, act_order=True))
    name = f"{MODULE}.g_idx"
    for change, act_order, message in (
        (lambda g: g, False, "desc_act is false"),
        (lambda g: np.where(g == 1, 0, g), True, "give each of 4 groups 64 inputs"),
        (lambda g: g + 1, True, "give each of 4 groups"),
        (lambda g: g - 1, True, "give each of 4 groups"),
        (lambda g: np.where(g == 3, 2**31 - 1, g), True, "give each of 4 groups"),
    ):
        changed = {**tensors, name: change(tensors[name]).astype(np.int32)}
        with opened(tmp_path, changed) as files, pytest.raises(CheckpointError, match=message) as caught:
            gptq.read(files, MODULE, shape, act_order=act_order, zero_offset=1)
        assert name in caught.value.message
