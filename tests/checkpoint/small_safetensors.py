"""Safetensors files made byte by byte."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.safetensors_header import BITS, element_count

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

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


A, B = entry("F32", [2], 0), entry("F32", [2], 8)
