"""Prefill of a long prompt on a GPU: MiniCPM4-8B's shape, random bf16 weights, sparse attention, chunks of 2048 tokens.

    python bench/prefill.py [--json FILE]

`prefill_128k_rate` counts the operations that have to be done (linears, attention over the visited keys, block selection)
over the time of the whole prompt, steps and host together, and over the rate of a bf16 matrix product in the same run.
Needs an NVIDIA GPU with 24 GiB, torch with CUDA and PyCUDA.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from _report import add_json_option, environment
from decode import finish  # sets the path, too

if TYPE_CHECKING:
    from _random_model import RandomModel

    from plugins_trt.contract import SelectionRule

BOUNDS = {"prefill_128k_rate": (">=", 0.40)}
CHUNK = 2048


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


def measure(model: RandomModel, ceilings: dict[str, float]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    random = np.random.default_rng(1)
    for name, length in (("32k", 32768), ("128k", 131072)):
        prompt = random.integers(0, model.limits.vocabulary, length).astype(np.int32)
        begin = time.perf_counter()
        for start in range(0, length, CHUNK):
            model.step(model.batch(prompt[start : start + CHUNK], start))
        seconds = time.perf_counter() - begin
        work = operations(model, length)
        figures[f"prefill_{name}_seconds"] = seconds
        figures[f"prefill_{name}_tokens_per_second"] = length / seconds
        figures[f"prefill_{name}_rate"] = sum(work.values()) / seconds / ceilings["bf16_flop_per_s"]
        for part, count in work.items():
            figures[f"prefill_{name}_{part}_share"] = count / sum(work.values())
    for name, past in (("first", 0), ("last", 131072 - CHUNK)):
        figures[f"chunk_{name}_ms"] = model.chunk_ms(CHUNK, past)
    return figures


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    options = parser.parse_args()

    import torch
    from _random_model import open_model
    from attention import ceilings

    model = open_model()
    surroundings = environment(device=torch.cuda.get_device_name(), cuda=torch.version.cuda)
    figures = ceilings(model.gpu.torch_stream)
    figures.update(measure(model, figures))
    model.close()
    return finish(figures, surroundings, BOUNDS, options.json)


if __name__ == "__main__":
    sys.exit(main())
