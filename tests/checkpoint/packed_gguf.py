"""Linears of GGUF files as the gguf library quantizes and widens them, and where they lie in a model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantize(recipe: Any, kinds: Mapping[str, gguf.GGMLQuantizationType]) -> dict[str, np.ndarray[Any, Any]]:
    """Quantize tensors of the recipe and return what the gguf library makes of them."""
    widened = {}
    for name, kind in kinds.items():
        packed = gguf.quantize(recipe.tensors[name], kind)
        recipe.tensors[name], recipe.types[name] = packed, kind
        widened[name] = gguf.dequantize(packed, kind)
    return widened


def from_llama_cpp(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Pairs beside each other back to halves."""
    restored: np.ndarray[Any, Any] = (
        rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
    )
    return restored


def assert_linears_are(
    found: Mapping[str, np.ndarray[Any, Any]], expected: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Every linear of both layers stands in the folder with exactly the library's numbers, and nothing else does."""
    assert len(found) == 2 * len(LINEARS)
    for layer in range(2):
        for short, name in zip(LINEARS, NAMES, strict=True):
            part = "self_attn" if name in NAMES[:4] else "mlp"
            rows = expected[f"blk.{layer}.{short}.weight"]
            if short in ("attn_q", "attn_k"):
                rows = from_llama_cpp(rows, {"attn_q": 4, "attn_k": 2}[short])
            assert np.array_equal(found[f"model.layers.{layer}.{part}.{name}"], rows), (layer, name)
