"""Linear layers with 4-bit and with ternary weights on a GPU, beside torch's bf16 product and the ceilings of the same run.

    python bench/linear.py [--json FILE]

The dense part of one decode step of MiniCPM4-8B's shape: every linear of 32 layers and the bf16 LM head, in one CUDA graph,
for 1 to 64 rows, on random weights (group 128). `w4a16_n1_bandwidth` is what it must read (weights, scales, zero points,
the head) over its time and over the bandwidth of a device copy; `ternary_n1_bandwidth` is the same of the linears alone, and
`ternary_n1_vs_w4a16` compares the graphs with the head. `w4a16_linears_2048_rate` is the rate of the same linears for a
chunk of 2048 rows, widened piecewise for cuBLAS, over that of a bf16 product of 8192 x 8192 matrices;
`ternary_chunk_rate` is that of the ternary kernel itself, `ternary_chunk_widened_rate` of cuBLAS. Needs an NVIDIA GPU with
24 GiB, torch with CUDA, PyCUDA and nvcc, NVRTC or `make kernels`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from _gpu import ceilings, gpu_environment, graph_ms, opened_gpu
from _packed_step import (
    HIDDEN,
    KINDS,
    ROWS,
    VOCABULARY,
    W4A16,
    Chunk,
    Linears,
    Step,
    Ternary,
    flop,
)
from _report import add_json_option, report_against

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pycuda.driver import Stream

    from plugins_trt.registry import Kernels

    Timer = Callable[[Callable[[], None]], float]

BOUNDS = {
    "w4a16_n1_bandwidth": (">=", 0.70),
    "w4a16_n16_bandwidth": (">=", 0.60),
    "w4a16_n64_bandwidth": (">=", 0.40),
    "w4a16_linears_2048_rate": (">=", 0.60),
    "ternary_n1_bandwidth": (">=", 0.50),
    **{f"ternary_n{rows}_vs_w4a16": ("<=", 1.0) for rows in ROWS},
}
CHUNK = 2048
"""Rows of a chunk of a prompt."""


def measure_4_bits(
    kernels: Kernels, stream: Stream, timer: Timer, head: torch.Tensor, ceilings: Mapping[str, float]
) -> dict[str, float]:
    """The figures of 4-bit weights; times in milliseconds with the head, bandwidths and rates as shares of the ceilings."""
    linears = Linears.random(W4A16(), kernels, stream)
    copy = ceilings["copy_bytes_per_s"]
    moved = linears.nbytes + head.nbytes
    figures: dict[str, float] = {"w4a16_bytes": moved}
    for rows in ROWS:
        step = Step(linears, rows)
        ms = timer(partial(step.run, head))
        figures[f"w4a16_n{rows}_ms"] = ms
        figures[f"w4a16_n{rows}_bandwidth"] = moved / (ms * 1e-3) / copy
        figures.update(_of_kinds("w4a16", step, linears, timer, copy))
    step = Step(replace(linears, packed=W4A16(symmetric=False)), 64)
    ms = timer(partial(step.run, head))
    figures["w4a16_asymmetric_n64_ms"] = ms
    figures["w4a16_asymmetric_n64_bandwidth"] = moved / (ms * 1e-3) / copy
    chunk = Chunk(linears, CHUNK)
    rate = flop(CHUNK) / (timer(chunk.run) * 1e-3)
    figures["w4a16_linears_2048_rate"] = rate / ceilings["bf16_flop_per_s"]
    return figures


def measure_ternary(
    kernels: Kernels, stream: Stream, timer: Timer, head: torch.Tensor, ceilings: Mapping[str, float]
) -> dict[str, float]:
    """The figures of ternary weights: without the head, and with it beside those of 4 bits, which `ceilings` has too."""
    linears = Linears.random(Ternary(), kernels, stream)
    copy, rate = ceilings["copy_bytes_per_s"], ceilings["bf16_flop_per_s"]
    moved = linears.nbytes
    figures: dict[str, float] = {"ternary_bytes": moved}
    for rows in ROWS:
        step = Step(linears, rows)
        ms, with_head = timer(step.run), timer(partial(step.run, head))
        figures[f"ternary_n{rows}_ms"] = ms
        figures[f"ternary_n{rows}_bandwidth"] = moved / (ms * 1e-3) / copy
        figures[f"ternary_n{rows}_with_head_ms"] = with_head
        figures[f"ternary_n{rows}_vs_w4a16"] = with_head / ceilings[f"w4a16_n{rows}_ms"]
        figures.update(_of_kinds("ternary", step, linears, timer, copy))
    step = Step(linears, CHUNK)
    of_kernel = sum(timer(partial(step.run_kind, kind, 2)) for kind in KINDS)
    figures["ternary_chunk_rate"] = flop(CHUNK, 2) / (of_kernel * 1e-3) / rate
    chunk = Chunk(linears, CHUNK)
    figures["ternary_chunk_widened_rate"] = flop(CHUNK) / (timer(chunk.run) * 1e-3) / rate
    return figures


def _of_kinds(name: str, step: Step, linears: Linears, timer: Timer, copy: float) -> dict[str, float]:
    """The bandwidth of each kind of linear alone."""
    figures = {}
    for kind in KINDS:
        ms = timer(partial(step.run_kind, kind))
        figures[f"{name}_n{step.rows}_{kind}_bandwidth"] = linears.weights[kind].nbytes / (ms * 1e-3) / copy
    return figures


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    options = parser.parse_args()

    with opened_gpu() as gpu:
        surroundings = gpu_environment()
        figures = ceilings(gpu.torch_stream)
        timer = partial(graph_ms, gpu.torch_stream)
        head = torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
        figures.update(measure_4_bits(gpu.kernels, gpu.stream, timer, head, figures))
        torch.cuda.empty_cache()
        figures.update(measure_ternary(gpu.kernels, gpu.stream, timer, head, figures))
    return report_against(figures, surroundings, BOUNDS, file=options.json)


if __name__ == "__main__":
    sys.exit(main())
