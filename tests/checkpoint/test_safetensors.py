"""Safetensors: what is written is read, also by others; what is damaged is refused, with its place."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_safetensors import GOOD, A, B, Header, pack, read_all, write

from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.safetensors_header import BITS, read_header
from edged.errors import CheckpointError


def test_reads_every_dtype_that_torch_writes(tmp_path: Path) -> None:
    tensors = {
        "f64": torch.randn(3, dtype=torch.float64),
        "f32": torch.randn(2, 5),
        "f16": torch.randn(7).half(),
        "bf16": torch.randn(2, 2, 3).bfloat16(),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "i64": torch.arange(4),
        "i32": torch.arange(4, dtype=torch.int32),
        "u8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    arrays = read_all(tmp_path)
    assert set(arrays) == set(tensors)
    for name, tensor in tensors.items():
        assert arrays[name].shape == tuple(tensor.shape)
        assert (
            arrays[name].tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ), name


def test_reads_into_memory_of_the_caller(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    target = torch.full((10,), 7.0)
    with WeightFiles.open(tmp_path) as files:
        info = files.info("a")
        assert (info.dtype, info.shape, info.nbytes, info.file.name) == (
            "F32",
            (2, 3),
            24,
            "model.safetensors",
        )
        files.read_into("a", target[2:8].numpy().data)
        with pytest.raises(ValueError, match="24 bytes"):
            files.read_into("a", memoryview(bytearray(23)))
        with pytest.raises(ValueError, match="readonly=True"):
            files.read_into("a", memoryview(bytes(24)))
        with pytest.raises(ValueError, match="contiguous=False"):
            files.read_into("a", memoryview(bytearray(48))[::2])
        with pytest.raises(CheckpointError, match="'c'"):
            files.info("c")
    expected = np.frombuffer(bytes(range(24)), np.float32)
    assert target.numpy()[2:8].tobytes() == expected.tobytes()
    assert target[:2].tolist() == target[8:].tolist() == [7.0, 7.0]


def test_reads_parts(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    buffer = memoryview(bytearray(6))
    with WeightFiles.open(tmp_path) as files:
        files.read_into("b", buffer, 2)
        assert bytes(buffer) == bytes(range(26, 32))
        files.read_into("b", buffer[:0], 8)
        for start in (-1, 3, 2**63):
            with pytest.raises(ValueError, match="outside its 8"):
                files.read_into("b", buffer, start)


def test_a_file_that_shrinks_while_in_use_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with WeightFiles.open(tmp_path) as files:
        os.truncate(path, len(GOOD) - 1)
        files.read_array("a")
        with pytest.raises(CheckpointError, match=r"'b'.*truncated"):
            files.read_array("b")


def test_closing_gives_the_descriptors_back(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with WeightFiles.open(tmp_path):
            assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
        write(tmp_path, GOOD[:-1])
        with pytest.raises(CheckpointError):
            WeightFiles.open(tmp_path)
        write(tmp_path, GOOD)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("cut", sorted({*range(0, len(GOOD), 7), len(GOOD) - 1}))
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path, GOOD[:cut])
    with pytest.raises(CheckpointError, match=str(path)):
        WeightFiles.open(tmp_path)


TWICE = b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(B).encode() + b"}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808"),
        (struct.pack("<Q", 100_000_001) + b"{" + b" " * 100, "claims"),
        (pack(b"[]"), "begin with"),
        (pack(b'{"a": '), "not valid"),
        (pack(b"{" + b'"a":{' * 100_000), "not valid"),
        (pack(b"\xff\xfe{}"), "begin with"),
        (pack(b'{"\xff": 1}'), "not valid"),
        (pack(TWICE, bytes(16)), "'a' appears twice"),
        (pack({"__metadata__": {"x": 1}}), "__metadata__"),
        (pack({"a": 7}), "'a' needs exactly"),
        (pack({"a": {**A, "extra": 1}}, bytes(8)), "'a' needs exactly"),
        (pack({"a": {**A, "dtype": "F128"}}, bytes(8)), "'a' has the unknown dtype 'F128'"),
        (pack({"a": {**A, "dtype": ["F32"]}}, bytes(8)), "'a' has the unknown dtype"),
        (pack({"a": {**A, "shape": 2}}, bytes(8)), "'a' has the shape"),
        (pack({"a": {**A, "shape": [-2]}}, bytes(8)), "'a' has the shape"),
        (pack({"a": {**A, "shape": [2.0]}}, bytes(8)), "'a' has the shape"),
        (pack({"a": {**A, "shape": [True, 2]}}, bytes(8)), "'a' has the shape"),
        (pack({"a": {**A, "shape": [3]}}, bytes(8)), "'a' .* needs 12 bytes"),
        (pack({"a": {**A, "shape": [2**62, 2**62]}}, bytes(8)), "'a' .* needs"),
        (pack({"a": {**A, "data_offsets": [0]}}, bytes(8)), "'a' has data_offsets"),
        (pack({"a": {**A, "data_offsets": [8, 0]}}, bytes(8)), "'a' has data_offsets"),
        (pack({"a": {**A, "data_offsets": [-8, 0]}}, bytes(8)), "'a' has data_offsets"),
        (pack({"a": {**A, "data_offsets": [2**64, 2**64 + 8]}}, bytes(8)), "'a' ends at byte"),
        (pack({"a": A, "b": B}, bytes(15)), "'b' ends at byte 16"),
        (pack({"a": A, "b": {**B, "data_offsets": [4, 12]}}, bytes(12)), "'b' .* overlaps"),
        (pack({"a": A, "b": {**B, "data_offsets": [0, 8]}}, bytes(8)), "overlaps"),
        (pack({"a": A, "b": {**B, "data_offsets": [12, 20]}}, bytes(20)), "'b' .* gap"),
        (pack({"a": {**A, "data_offsets": [4, 12]}}, bytes(12)), "'a' .* gap"),
        (pack({"a": A}, bytes(9)), "1 bytes after the last"),
        (pack({}, bytes(1)), "1 bytes after the last"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        WeightFiles.open(tmp_path)
    assert str(path) in caught.value.message


def _accepted_by_both(content: bytes, path: Path) -> None:
    """Whatever is accepted here is accepted by the format's own library, and read the same."""
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        infos = read_header(descriptor, path)
    except CheckpointError:
        return
    finally:
        os.close(descriptor)
    deserialize: Any = safetensors.deserialize
    theirs = deserialize(content)
    assert {info.name: (info.dtype, list(info.shape)) for info in infos} == {
        name: (tensor["dtype"], tensor["shape"]) for name, tensor in theirs
    }
    data = {name: bytes(tensor["data"]) for name, tensor in theirs}
    for info in infos:
        assert content[info.offset : info.offset + info.nbytes] == data[info.name]


@given(st.binary(max_size=200))
@example(GOOD)
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    _accepted_by_both(content, tmp_path_factory.getbasetemp() / "any.safetensors")


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_change_of_a_good_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        piece = data.draw(st.sampled_from([b"", b"0", b"9", b"-", b",", b"]", b'"', b"\x00", b"\xff"]))
        content[place : place + data.draw(st.integers(0, 2))] = piece
        if not content:
            break
    if data.draw(st.booleans()) and len(content) > 8:  # keep the length true, so that the JSON is reached
        content[:8] = struct.pack("<Q", max(len(content) - 8 - 32, 0))
    _accepted_by_both(bytes(content), tmp_path_factory.getbasetemp() / "changed.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        json_values
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*BITS, "F128"]) | json_values,
                "shape": st.lists(st.integers(-1, 3), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
            }
        ),
        max_size=3,
    ),
    st.integers(0, 40),
)
@settings(max_examples=200, deadline=None)
def test_any_json_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: Header, size: int
) -> None:
    _accepted_by_both(pack(header, bytes(size)), tmp_path_factory.getbasetemp() / "json.safetensors")
