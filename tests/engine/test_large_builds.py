"""The shapes of real models, built as `bench/build.py` builds them; their memory and size, not their time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorrt_case import tensorrt_rtx

BENCH = Path(__file__).resolve().parents[2] / "bench" / "build.py"


def figures_of(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCH), *arguments, "--json", str(folder / "figures")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "figures").read_text())
    return {**report["figures"], **report["environment"]}


def test_smollm2_and_an_8b_model_in_4_bits_build_for_three_gpus(tmp_path: Path) -> None:
    tensorrt_rtx()
    figures = figures_of(tmp_path, "--only", "smollm2")
    assert figures["build_peak_rss_mb"] < 700
    assert figures["plan_mb"] < 60
    small, large = figures["shapes"]["smollm2"], figures["shapes"]["minicpm4_8b_w4a16"]
    assert (small["layers"], large["layers"], large["targets"]) == (30, 32, ["sm86", "sm89", "sm120"])
    assert small["plan_mb"] < 10
    # Activations of a step, not copies of weights: the tied table of SmolLM2 has 57 MB.
    assert small["activation_mb"]["decode"] < 30
    # 2048 tokens through a gate and up projection that were not fused would be 134 MB alone.
    assert large["activation_mb"]["prefill"] < 140


@pytest.mark.soak
def test_dense_and_ternary_plans_of_an_8b_model_stay_small(tmp_path: Path) -> None:
    tensorrt_rtx()
    shapes = figures_of(tmp_path, "--only", "minicpm4_8b", "minicpm4_8b_ternary")["shapes"]
    for each in shapes.values():
        assert (each["layers"], each["targets"]) == (32, ["sm86", "sm89", "sm120"])
        assert each["build_peak_rss_mb"] < 700
        assert each["plan_mb"] < 60
    # 2048 tokens through a gate and up projection of 2 x 16384, in bf16, are 134 MB.
    dense = shapes["minicpm4_8b"]["activation_mb"]["prefill"]
    assert 134 < dense < 450
    # Neither 4-bit nor ternary weights are wide anywhere in a step: gate and up come out as one activation.
    for name in ("minicpm4_8b_w4a16", "minicpm4_8b_ternary"):
        assert shapes[name]["activation_mb"]["prefill"] < dense
