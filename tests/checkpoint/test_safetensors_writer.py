"""Writing safetensors files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_safetensors import GOOD, read_all, write

from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.safetensors_header import BITS, TensorSpec
from edged.checkpoint.safetensors_writer import SafetensorsWriter, bfloat16_bits
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


@given(st.lists(st.floats(width=32), max_size=50))
@example([float("nan"), -0.0, float("inf"), 3.4e38, 1e-45, 1.00390625, 1.01171875])
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).bfloat16()
    mine = torch.from_numpy(bfloat16_bits(array).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(mine.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(mine[known].view(torch.int16), expected[known].view(torch.int16))


def test_bfloat16_keeps_nan_whatever_its_payload() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan((bfloat16_bits(bits.view(np.float32)).astype(np.uint32) << 16).view(np.float32)).all()


def test_what_is_written_others_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    full = generator.standard_normal((6, 4), np.float32)
    specs = [TensorSpec("h", "BF16", (3,)), TensorSpec("w", "F32", (6, 4)), TensorSpec("v", "F16", (5,)), TensorSpec("none", "F32", (0,))]  # fmt: skip
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, specs) as writer:
        writer.write("v", full[0:1, :4].astype(np.float16))
        writer.write("w", full[:2])
        writer.write("v", np.ones(1, np.float16))
        writer.write("w", full[2:])
        writer.write("h", bfloat16_bits(full[0, :3]))
        assert not path.exists()
    assert path.stat().st_size == writer.nbytes
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    tensors = load_file(path)
    assert np.array_equal(tensors["w"].numpy(), full)
    assert torch.equal(tensors["h"], torch.from_numpy(full[0, :3]).bfloat16())
    assert tensors["v"].tolist() == [*full[0].astype(np.float16).tolist(), 1.0]
    arrays = read_all(tmp_path)
    assert np.array_equal(arrays["w"], full)
    with WeightFiles.open(tmp_path) as files:
        assert all(info.offset % (BITS[info.dtype] // 8) == 0 for info in map(files.info, files.names()))


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    specs = [TensorSpec("w", "F32", (2,))]

    def attempt(*arrays: np.ndarray[Any, Any], name: str = "w") -> None:
        with SafetensorsWriter(path, specs) as writer:
            for array in arrays:
                writer.write(name, array)

    two = np.zeros(2, np.float32)
    with pytest.raises(CheckpointError, match="'w' has 0 of 8 bytes"):
        attempt()
    with pytest.raises(ValueError, match="already full"):
        attempt(two, two)
    with pytest.raises(ValueError, match="float64"):
        attempt(np.zeros(2))
    with pytest.raises(ValueError, match="not announced"):
        attempt(two, name="x")
    assert path.read_bytes() == GOOD
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="I8"):
        SafetensorsWriter(tmp_path / "x", [TensorSpec("w", "I8", (2,))])
    with pytest.raises(ValueError, match="twice"):
        SafetensorsWriter(tmp_path / "x", [TensorSpec("w", "F32", (2,))] * 2)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "x", [TensorSpec("w", "F32", (2,))])

    def fill() -> None:
        with writer:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, writer._descriptor)
            os.close(full)
            writer.write("w", np.zeros(2, np.float32))

    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        fill()
    assert not list(tmp_path.iterdir())
