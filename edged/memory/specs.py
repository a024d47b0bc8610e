"""The form of a buffer, the dtypes it may have, and the ledger rows it may belong to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plugins_trt.contract import BLOCK

PAGE_TOKENS = BLOCK
"""Tokens of a page."""

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "int8": 1,
}
"""Bytes of an element, by dtype name."""

KV_TYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}
"""Types of keys and values, by the names that the configuration has for them."""

KV_NAMES = {stored: name for name, stored in KV_TYPES.items()}
"""What the configuration calls each."""

QUANTIZED_STORAGE = {"int8": "int8", "float8_e4m3fn": "uint8"}
"""What buffers of quantized keys and values are made of: bytes, of which no type needs to know more."""

WEIGHTS, KV_PAGES, COMPRESSED_KEYS, ACTIVATIONS, ENGINE, LOGITS = (
    "weights",
    "KV pages",
    "compressed keys",
    "activations and scratch",
    "TensorRT engine",
    "logits and sampling",
)
"""Rows of the ledger that buffers belong to."""


TENSORRT = "tensorrt"
"""Name of the executor whose activations are its engine's."""


@dataclass(frozen=True)
class BufferSpec:
    """One buffer: its name, the ledger row it belongs to, its shape and dtype."""

    name: str
    row: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]
