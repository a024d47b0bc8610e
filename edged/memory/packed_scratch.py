"""Scratch memory of products with packed weights."""

from __future__ import annotations

from functools import lru_cache

from plugins_trt.ternary_linear.contract import LinearPlan as TernaryPlan
from plugins_trt.w4a16_linear.contract import LinearPlan

MULTIPROCESSORS = 192
"""Most multiprocessors of a device that scratch memory is planned for (the largest RTX cards have 188)."""


@lru_cache(maxsize=256)
def product_workspace(ternary: bool, outputs: int, inputs: int, rows: int) -> int:
    """Bytes that the product of some rows needs on any device: not the largest device shares the inputs out most."""
    of = TernaryPlan.of if ternary else LinearPlan.of
    return max(
        of(rows=rows, outputs=outputs, inputs=inputs, multiprocessors=count).workspace_bytes
        for count in range(1, MULTIPROCESSORS + 1)
    )
