"""Whole decode steps on a GPU: MiniCPM4-8B's shape, random weights, batch 1, beside the ceilings of the same run.

    python bench/decode.py [--weights bf16|w4a16|ternary] [--parts] [--json FILE]

Steps run one after the other, as an engine makes them, through all places of a page. The floor of a step is what it must
read (weights, scales, and the KV that it visits) over the bandwidth of a device copy: `..._4k_vs_floor` is the time of its
graph over that, `bf16_step_4k_bandwidth` the inverse; `..._drawn_...` is the same with a token drawn by temperature and top_p
instead of the largest logit. `host_vs_step` is how much longer a whole step of the executor takes
than its graph, over the graph: what the host does between two launches. `--parts` measures where a step's time goes: by how
much its graph is faster when the launches of one kind are left out of it.

Needs an NVIDIA GPU with 24 GiB, torch with CUDA and PyCUDA.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from _parts import without_any, without_one_kind
from _random_model import RandomModel, median_ms, run

from edged.executor.cuda_operators import CudaOperators
from plugins_trt.contract import DeviceArray
from plugins_trt.skinny_linear.contract import SkinnyLinear

if TYPE_CHECKING:
    import argparse

    from edged.executor.cuda_device import StepKernels

BOUNDS = {
    "bf16": {
        "bf16_step_4k_bandwidth": (">=", 0.70),
        "bf16_step_128k_vs_4k": ("<=", 1.25),
        "host_vs_step": ("<=", 0.08),
    },
    "ternary": {},
    "w4a16": {"w4a16_step_4k_vs_floor": ("<=", 1.75), "w4a16_step_128k_vs_4k": ("<=", 1.35)},
}
LENGTHS = {"4k": 4096, "32k": 32768, "128k": 131072}


def measure(model: RandomModel, options: argparse.Namespace, ceilings: dict[str, float]) -> dict[str, float]:
    """All figures; times in milliseconds, bandwidths as shares of the ceiling."""
    copy, weights = ceilings["copy_bytes_per_s"], options.weights
    figures: dict[str, float] = {}
    for name, length in LENGTHS.items():
        graph, whole = model.decode_ms(length)
        floor = (model.weight_bytes + model.visited_bytes(length)) / copy * 1e3
        figures[f"{weights}_step_{name}_ms"] = graph
        figures[f"{weights}_step_{name}_with_host_ms"] = whole
        figures[f"{weights}_step_{name}_floor_ms"] = floor
        figures[f"{weights}_step_{name}_vs_floor"] = graph / floor
    drawn, _ = model.decode_ms(LENGTHS["4k"], greedy=False)
    figures[f"{weights}_step_4k_drawn_ms"] = drawn
    figures[f"{weights}_step_4k_drawn_vs_floor"] = drawn / figures[f"{weights}_step_4k_floor_ms"]
    figures[f"{weights}_step_4k_bandwidth"] = 1.0 / figures[f"{weights}_step_4k_vs_floor"]
    figures[f"{weights}_step_128k_vs_4k"] = (
        figures[f"{weights}_step_128k_ms"] / figures[f"{weights}_step_4k_ms"]
    )
    figures["host_vs_step"] = (
        figures[f"{weights}_step_4k_with_host_ms"] / figures[f"{weights}_step_4k_ms"] - 1.0
    )
    if options.parts:
        figures.update(_parts(model))
    if weights == "bf16":
        figures.update(_linears(model, copy))
    return figures


def _parts(model: RandomModel) -> dict[str, float]:
    """By how much a step of one token is faster without the launches of one kind, in milliseconds."""
    gpu = model.gpu
    figures: dict[str, float] = {}
    for name, length in (("4k", 4096), ("128k", 131072)):
        batch = model.batch(np.array([5], np.int32), length - 20)  # completes no compressed key
        model.step(batch)
        dense = length < 8192
        for part, variant in without_one_kind(model).items():
            if part == "selection" and dense:
                continue
            operators = CudaOperators(model.plan, model.buffers, variant, 1, dense=dense)
            ms = median_ms(gpu.torch_stream, gpu.capture(partial(_forward, model, variant, operators)), 20)
            figures[f"{name}_{part}_ms"] = ms if part == "whole" else figures[f"{name}_whole_ms"] - ms
        nothing = without_any(model)
        operators = CudaOperators(model.plan, model.buffers, nothing, 1, dense=dense)
        replay = gpu.capture(partial(_forward, model, nothing, operators))
        figures[f"{name}_no_kernel_ms"] = median_ms(gpu.torch_stream, replay, 20)
    return figures


def _forward(model: RandomModel, kernels: StepKernels, operators: CudaOperators) -> None:
    kept, model._kernels = model._kernels, kernels  # noqa: SLF001 - argmax is launched by the executor
    with torch.inference_mode():
        model._forward(operators)  # noqa: SLF001
    model._kernels = kept  # noqa: SLF001


def _linears(model: RandomModel, copy: float) -> dict[str, float]:
    """Each kind of linear in a graph of its own over all layers, by our kernel and by cuBLAS."""
    of = DeviceArray.of
    multiply = model._kernels.linear  # noqa: SLF001 - what a step runs
    figures: dict[str, float] = {}
    for rows in (1, 2, 4, 16):
        total = {"ours": 0.0, "cublas": 0.0}
        for kind, layers in model.linears.items():
            outputs, width = layers[0].weight.shape
            x = torch.randn(rows, width, device="cuda").bfloat16()
            out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
            torch.cuda.synchronize()
            weights = [layer.weight for layer in layers]

            def ours(
                weights: list[torch.Tensor] = weights, x: torch.Tensor = x, out: torch.Tensor = out
            ) -> None:
                for weight in weights:
                    multiply(SkinnyLinear(of(x), of(weight), of(out)))

            def cublas(
                weights: list[torch.Tensor] = weights, x: torch.Tensor = x, out: torch.Tensor = out
            ) -> None:
                for weight in weights:
                    torch.mm(x, weight.t(), out=out)

            size = sum(weight.nbytes for weight in weights)
            for name, work in (("ours", ours), ("cublas", cublas)):
                ms = model.measured(work)
                total[name] += ms
                figures[f"{kind}_{rows}_{name}_bandwidth"] = size / (ms * 1e-3) / copy
        for name, ms in total.items():
            figures[f"linears_{rows}_{name}_ms"] = ms
    return figures


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", action="store_true", help="also measure where a step's time goes")


if __name__ == "__main__":
    sys.exit(run(__doc__, BOUNDS, measure, _add_options))
