"""A small graph and the TensorRT that builds it without a GPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
from small_models import CONFIGS

from edged.engine.graph import GraphSpec
from edged.models.architecture import Architecture
from plugins_trt.contract import SelectionRule

if TYPE_CHECKING:
    from pathlib import Path


def tensorrt_rtx() -> Any:
    """The bindings; skips where TensorRT-RTX has no wheel."""
    from plugins_trt.tensorrt import adapter

    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed: it has no wheel for this machine")
    return adapter.load("tensorrt_rtx")


def small_spec(dtype: str = "bfloat16", *, layers: int = 2, **changes: Any) -> GraphSpec:
    """A Qwen3-like model with sparse attention and heads that the kernels take."""
    config = {**CONFIGS["qwen3"], "head_dim": 64, "num_hidden_layers": layers, **changes}
    return GraphSpec(Architecture.from_config(config), dtype, SelectionRule(dense_below=1024))


def fake_module(folder: Path, version: str) -> str:
    """A plain TensorRT of this version, as far as its import goes; the folder for PYTHONPATH."""
    (folder / "tensorrt.py").write_text(
        f"__version__ = {version!r}\n"
        "class ILogger:\n"
        "    class Severity:\n"
        "        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)\n"
    )
    return str(folder)
