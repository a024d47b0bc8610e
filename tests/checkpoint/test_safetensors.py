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
from safetensors.torch import load_file, save_file

from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.safetensors_header import BITS, TensorSpec, element_count, read_header
from edged.checkpoint.safetensors_writer import SafetensorsWriter, bfloat16_bits
from edged.errors import CheckpointError

Header = dict[str, Any]


def entry(dtype: str, shape: list[int], begin: int) -> Header:
    size = element_count(shape) * BITS[dtype] // 8
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}


def pack(header: Header | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def read_all(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    with WeightFiles.open(folder) as files:
        return {name: files.read_array(name) for name in files.names()}


GOOD = pack({"a": entry("F32", [2, 3], 0), "b": entry("BF16", [4], 24)}, bytes(range(32)))


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


A, B = entry("F32", [2], 0), entry("F32", [2], 8)
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
