"""Linear layers with 4-bit weights on a GPU, beside torch's bf16 product and the ceilings of the same run.

    python bench/linear.py [--json FILE]

The dense part of one decode step of MiniCPM4-8B's shape: every linear of 32 layers and the bf16 LM head, in one CUDA graph,
for 1 to 64 rows, on random weights (group 128). `w4a16_n1_bandwidth` is what it must read (weights, scales, zero points,
the head) over its time and over the bandwidth of a device copy. `w4a16_linears_2048_rate` is the rate of the same linears for
a chunk of 2048 rows, widened piecewise for cuBLAS, over that of a bf16 product of 8192 x 8192 matrices. Needs an NVIDIA GPU
with 24 GiB, torch with CUDA, PyCUDA and nvcc, NVRTC or `make kernels`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from _report import add_json_option, environment, report  # noqa: E402 - the path is set above

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from pycuda.driver import Stream

    from plugins_trt.registry import Kernels

BOUNDS = {
    "w4a16_n1_bandwidth": (">=", 0.70),
    "w4a16_n16_bandwidth": (">=", 0.60),
    "w4a16_n64_bandwidth": (">=", 0.40),
    "w4a16_linears_2048_rate": (">=", 0.60),
}
LAYERS, HIDDEN, INTERMEDIATE, QKV, VOCABULARY, GROUP = 32, 4096, 16384, 4608, 73448, 128
ROWS = (1, 2, 4, 8, 16, 32, 64)
CHUNK, PIECE = 2048, 1 << 25  # rows of a chunk; elements that are widened at a time, as the executor does
KINDS = {
    "qkv": (QKV, HIDDEN, False),
    "output": (HIDDEN, HIDDEN, False),
    "gate_up": (2 * INTERMEDIATE, HIDDEN, True),
    "down": (HIDDEN, INTERMEDIATE, False),
}
"""Outputs, inputs, and whether they are gated."""


@dataclass
class Weights:
    """Random 4-bit weights of one kind, of all layers."""

    tiles: torch.Tensor  # int32 [layers, tiles, K / 64, 32, 4]
    groups: torch.Tensor  # int32 [layers, tiles, K / G, 8, 2]

    @classmethod
    def random(cls, outputs: int, inputs: int) -> Weights:
        """Weights so small that the residual stream stays finite over all the runs."""
        import torch

        tiles = torch.randint(
            -(1 << 31),
            1 << 31,
            (LAYERS, outputs // 16, inputs // 64, 32, 4),
            dtype=torch.int32,
            device="cuda",
        )
        scale = torch.full((1,), 0.02 * inputs**-0.5, dtype=torch.float16).view(torch.int16)
        word = int(scale.item()) | 8 << 16
        shape = (LAYERS, outputs // 16, inputs // GROUP, 8, 2)
        return cls(tiles, torch.full(shape, word, dtype=torch.int32, device="cuda"))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.tiles.nbytes + self.groups.nbytes


class Step:
    """The linears of a step of some rows."""

    def __init__(
        self, kernels: Kernels, stream: Stream, weights: dict[str, Weights], head: torch.Tensor, rows: int
    ) -> None:
        import torch

        from plugins_trt.contract import DeviceArray
        from plugins_trt.w4a16_linear.contract import LinearPlan, W4A16Linear
        from plugins_trt.w4a16_linear.launch import W4A16Multiplier

        of = DeviceArray.of
        self._stream, self._head = stream, head
        self._multiply = W4A16Multiplier(
            kernels.operator("w4a16_linear"),
            multiprocessors=kernels.multiprocessors,
            shared_bytes=kernels.shared_bytes,
            dtype="bfloat16",
        )

        def array(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda").bfloat16()

        self._hidden, qkv, activated = array(rows, HIDDEN), array(rows, QKV), array(rows, INTERMEDIATE)
        self._logits = array(rows, VOCABULARY)
        size = max(
            LinearPlan.of(
                rows=rows, outputs=outputs, inputs=inputs, multiprocessors=kernels.multiprocessors
            ).workspace_bytes
            for outputs, inputs, _ in KINDS.values()
        )
        workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
        self._keep = [qkv, activated, workspace]
        places = {
            "qkv": (self._hidden, qkv),
            "output": (qkv[:, :HIDDEN], self._hidden),
            "gate_up": (self._hidden, activated),
            "down": (activated, self._hidden),
        }
        self.products = {
            kind: [
                W4A16Linear(
                    x=of(x),
                    tiles=of(weights[kind].tiles[layer]),
                    groups=of(weights[kind].groups[layer]),
                    out=of(out),
                    residual=of(out) if out is self._hidden else None,
                    workspace=of(workspace),
                    gated=KINDS[kind][2],
                )
                for layer in range(LAYERS)
            ]
            for kind, (x, out) in places.items()
        }

    def run_kind(self, kind: str) -> None:
        """Enqueues one kind of linear of all layers."""
        for product in self.products[kind]:
            self._multiply(product, self._stream)

    def run(self) -> None:
        """Enqueues everything, layer by layer, and the head."""
        import torch

        for layer in range(LAYERS):
            for products in self.products.values():
                self._multiply(products[layer], self._stream)
        torch.mm(self._hidden, self._head.t(), out=self._logits)


def chunk(
    kernels: Kernels, stream: Stream, torch_stream: torch.cuda.Stream, weights: dict[str, Weights]
) -> float:
    """Operations a second of all linears of all layers on a chunk: widen a piece, multiply, go on."""
    import torch

    from plugins_trt.contract import DeviceArray
    from plugins_trt.w4a16_widen.contract import W4A16Widen
    from plugins_trt.w4a16_widen.launch import W4A16Widener

    widen = W4A16Widener(kernels.operator("w4a16_widen"), dtype="bfloat16")
    scratch = torch.empty(PIECE, dtype=torch.bfloat16, device="cuda")
    of = DeviceArray.of
    pairs = {
        kind: [torch.randn(CHUNK, size, device="cuda").bfloat16() for size in (inputs, outputs)]
        for kind, (outputs, inputs, _) in KINDS.items()
    }

    def run() -> None:
        for layer in range(LAYERS):
            for kind, (outputs, inputs, gated) in KINDS.items():
                x, out = pairs[kind]
                packed = weights[kind]
                step = PIECE // inputs
                for first in range(0, outputs, step):
                    count = min(step, outputs - first)
                    wide = scratch[: count * inputs].view(count, inputs)
                    tiles, groups = of(packed.tiles[layer]), of(packed.groups[layer])
                    widen(W4A16Widen(tiles, groups, of(wide), outputs, first, gated=gated), stream)
                    torch.mm(x, wide.t(), out=out[:, first : first + count])

    matrices = LAYERS * sum(outputs * inputs for outputs, inputs, _ in KINDS.values())
    return 2.0 * matrices * CHUNK / (median_ms(torch_stream, run, 5) * 1e-3)


def median_ms(stream: torch.cuda.Stream, run: Callable[[], None], times: int = 20) -> float:
    """Median time of a graph of `run`."""
    import torch

    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        for _ in range(3):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        for begin, end in events:
            begin.record(stream)
            graph.replay()
            end.record(stream)
        stream.synchronize()
    return float(sorted(begin.elapsed_time(end) for begin, end in events)[times // 2])


def measure(
    kernels: Kernels, torch_stream: torch.cuda.Stream, stream: Stream, ceilings: dict[str, float]
) -> dict[str, float]:
    """All figures; times in milliseconds, bandwidths as shares of the ceiling."""
    import torch

    figures: dict[str, float] = {}
    copy = ceilings["copy_bytes_per_s"]
    weights = {kind: Weights.random(outputs, inputs) for kind, (outputs, inputs, _) in KINDS.items()}
    head = torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
    moved = sum(each.nbytes for each in weights.values()) + head.nbytes
    figures["w4a16_bytes"] = moved
    for rows in ROWS:
        step = Step(kernels, stream, weights, head, rows)
        ms = median_ms(torch_stream, step.run)
        figures[f"w4a16_n{rows}_ms"] = ms
        figures[f"w4a16_n{rows}_bandwidth"] = moved / (ms * 1e-3) / copy
        for kind in KINDS:
            of_kind = median_ms(torch_stream, partial(step.run_kind, kind))
            figures[f"w4a16_n{rows}_{kind}_bandwidth"] = weights[kind].nbytes / (of_kind * 1e-3) / copy
    rate = chunk(kernels, stream, torch_stream, weights)
    figures["w4a16_linears_2048_rate"] = rate / ceilings["bf16_flop_per_s"]
    return figures


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    options = parser.parse_args()

    import _ternary_linear
    import torch
    from attention import ceilings
    from pycuda import driver

    from plugins_trt.registry import Kernels

    torch.zeros(1, device="cuda")
    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    try:
        stream = driver.Stream()
        torch_stream = torch.cuda.ExternalStream(stream.handle)
        kernels = Kernels.of_current_device()
        surroundings = environment(device=torch.cuda.get_device_name(), cuda=torch.version.cuda)
        figures: dict[str, float] = ceilings(torch_stream)
        figures.update(measure(kernels, torch_stream, stream, figures))
        timer = partial(median_ms, torch_stream)
        figures.update(_ternary_linear.measure(kernels, stream, timer, figures))
    finally:
        context.pop()
    bounds = {**BOUNDS, **_ternary_linear.BOUNDS}
    wanted = {name: f"{sign} {bound}" for name, (sign, bound) in bounds.items()}
    report(figures, surroundings, file=options.json, bounds=wanted, notes=[str(surroundings["device"])])
    missed = [
        name
        for name, (sign, bound) in bounds.items()
        if (figures[name] > bound if sign == "<=" else figures[name] < bound)
    ]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
