"""Prefill of a long prompt on a GPU: MiniCPM4-8B's shape, random weights, sparse attention, chunks of 2048 tokens.

    python bench/prefill.py [--weights bf16|w4a16|ternary] [--json FILE]

`prefill_128k_rate` counts the operations that have to be done (linears, attention over the visited keys, block selection)
over the time of the whole prompt, steps and host together, and over the rate of a bf16 matrix product in the same run.
`linears_2048_rate` is that of the linears of a chunk alone. Needs an NVIDIA GPU with 24 GiB, torch with CUDA and PyCUDA.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from _random_model import RandomModel, run

from edged.executor.cuda_operators import CudaOperators

if TYPE_CHECKING:
    import argparse

    from plugins_trt.contract import SelectionRule

PREFIXES = {"bf16": "", "w4a16": "w4a16_", "ternary": "ternary_"}
BOUNDS = {
    "bf16": {"prefill_128k_rate": (">=", 0.40)},
    "ternary": {},
    "w4a16": {"w4a16_linears_2048_rate": (">=", 0.60)},
}
CHUNK = 2048
ROWS = (128, 512, CHUNK)


def visited_keys(positions: np.ndarray, rule: SelectionRule) -> np.ndarray:
    """Keys that each query attends to."""
    dense = positions + 1
    full = (rule.total - 1) * 64 + positions % 64 + 1  # its own block up to itself, the others whole
    sparse = np.where(positions // 64 + 1 <= rule.total, dense, full)
    return np.where(positions + 1 < rule.dense_below, dense, sparse)


def scored_keys(positions: np.ndarray, rule: SelectionRule) -> np.ndarray:
    """Compressed keys that each query is multiplied with to choose its blocks: fine ones, and coarse ones for the sums."""
    fine = np.maximum(0, (positions - 31) // 16 + 1)
    coarse = np.maximum(0, (positions - 127) // 64 + 1)
    return np.where(positions + 1 < rule.dense_below, 0, fine + coarse)


def operations(model: RandomModel, tokens: int) -> dict[str, float]:
    """Floating-point operations of a prompt, by what they are for."""
    a, rule = model.plan.architecture, model.plan.selection
    assert rule is not None
    qkv, output = a.hidden * a.qkv_width, a.q_width * a.hidden
    mlp = 3 * a.hidden * a.intermediate
    # Of the last layer, all but keys and values is needed for the last token of a chunk alone.
    matrices = a.layers * (qkv + output + mlp) - (output + mlp)
    positions = np.arange(tokens)
    heads = 2 * a.q_width * a.layers
    return {
        "linears": 2.0 * matrices * tokens,
        "attention": 2.0 * heads * float(visited_keys(positions, rule).sum()),
        "selection": 1.0 * heads * float(scored_keys(positions, rule).sum()),
    }


def measure(model: RandomModel, options: argparse.Namespace, ceilings: dict[str, float]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    prefix = PREFIXES[options.weights]
    random = np.random.default_rng(1)
    for name, length in (("32k", 32768), ("128k", 131072)):
        prompt = random.integers(0, model.limits.vocabulary, length).astype(np.int32)
        begin = time.perf_counter()
        for start in range(0, length, CHUNK):
            model.step(model.batch(prompt[start : start + CHUNK], start))
        seconds = time.perf_counter() - begin
        work = operations(model, length)
        figures[f"{prefix}prefill_{name}_seconds"] = seconds
        figures[f"{prefix}prefill_{name}_tokens_per_second"] = length / seconds
        figures[f"{prefix}prefill_{name}_rate"] = sum(work.values()) / seconds / ceilings["bf16_flop_per_s"]
        for part, count in work.items():
            figures[f"{prefix}prefill_{name}_{part}_share"] = count / sum(work.values())
    for name, past in (("first", 0), ("last", 131072 - CHUNK)):
        figures[f"{prefix}chunk_{name}_ms"] = model.chunk_ms(CHUNK, past)
    for rows in ROWS:
        figures[f"{prefix}linears_{rows}_rate"] = _linears(model, rows) / ceilings["bf16_flop_per_s"]
    return figures


def _linears(model: RandomModel, rows: int) -> float:
    """Operations a second of all linears of all layers but the head, one after the other as a chunk runs them."""
    operators = CudaOperators(model.plan, model.buffers, model._kernels, rows)  # noqa: SLF001 - what a step runs
    layers = {kind: each for kind, each in model.linears.items() if kind != "head"}
    a = model.plan.architecture
    inputs = {
        kind: torch.randn(rows, width, device="cuda").bfloat16()
        for kind, width in (
            ("qkv", a.hidden),
            ("output", a.q_width),
            ("gate_up", a.hidden),
            ("down", a.intermediate),
        )
    }
    torch.cuda.synchronize()

    def work() -> None:
        with torch.inference_mode():
            for index in range(a.layers):
                for kind, x in inputs.items():
                    operators.linear(x, layers[kind][index])

    matrices = a.layers * (a.hidden * a.qkv_width + a.q_width * a.hidden + 3 * a.hidden * a.intermediate)
    return 2.0 * matrices * rows / (model.measured(work, 5) * 1e-3)


if __name__ == "__main__":
    sys.exit(run(__doc__, BOUNDS, measure))
