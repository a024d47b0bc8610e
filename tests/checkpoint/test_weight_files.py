"""Weights in one file or in shards: the index, and folders that hold neither."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from small_safetensors import GOOD, A, pack, read_all, write

from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def shards(folder: Path, weight_map: dict[str, Any] | None = None) -> None:
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, folder / "one.safetensors")
    safetensors.numpy.save_file({"b": np.full(2, 2, np.float16)}, folder / "two.safetensors")
    index = {"metadata": {}, "weight_map": weight_map or {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_one_set_of_tensors(tmp_path: Path) -> None:
    shards(tmp_path)
    with WeightFiles.open(tmp_path) as files:
        assert (files.names(), len(files), files.nbytes, "b" in files, "c" in files) == (
            ("a", "b"),
            2,
            16,
            True,
            False,
        )
        assert files.info("b").file == tmp_path / "two.safetensors"
        assert files.read_array("b").tolist() == [2, 2]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": "one.safetensors", "b": "one.safetensors"},
            "names tensor 'b' in one.safetensors, but it is not there",
        ),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "names tensor 'c'"),
        ({"a": "one.safetensors"} | {"b": "three.safetensors"}, "three.safetensors: this file is missing"),
        ({"a": "one.safetensors", "b": "../two.safetensors"}, r"weight_map\['b'\]"),
        ({"a": "one.safetensors", "b": "/etc/passwd"}, r"weight_map\['b'\]"),
        ({"a": "one.safetensors", "b": 2}, r"weight_map\['b'\]"),
        ([], "weight_map must map"),
    ],
)
def test_an_index_that_is_not_true_is_refused(tmp_path: Path, weight_map: Any, message: str) -> None:
    shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        WeightFiles.open(tmp_path)


def test_an_index_that_leaves_a_tensor_out_is_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    tensors = {"b": np.ones(1, np.float32), "extra": np.ones(1, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"does not list 1 tensors .* 'extra'"):
        WeightFiles.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    safetensors.numpy.save_file({"a": np.ones(1, np.float32)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is also in one\.safetensors"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"weight_map": {}}', "\ud800"[:0] + "nul\x00"])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"), [("x.gguf", "edgectl import"), ("pytorch_model.bin", "pickled"), ("m-00001-of-00002.safetensors", "index"), ("y", "neither")]
)  # fmt: skip
def test_a_folder_without_weights_says_what_to_do(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=hint):
        WeightFiles.open(tmp_path)


def test_a_single_file_may_have_another_name(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "gptq_model-4bit-128g.safetensors")
    assert set(read_all(tmp_path)) == {"a", "b"}
    write(tmp_path, GOOD, "other.safetensors")
    with pytest.raises(CheckpointError, match="need their index"):
        WeightFiles.open(tmp_path)
    for name, tensor in (("model_gptq.safetensors", "d"), ("model_gptq_marlin.safetensors", "e")):
        write(tmp_path, pack({tensor: A}, bytes(8)), name)
        assert set(read_all(tmp_path)) == {tensor}
    write(tmp_path, pack({"c": A}, bytes(8)))
    assert set(read_all(tmp_path)) == {"c"}


def test_what_is_no_folder_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model folder"):
        WeightFiles.open(tmp_path / "absent")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        WeightFiles.open(tmp_path)
