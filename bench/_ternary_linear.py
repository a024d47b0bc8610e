"""Linear layers with ternary weights on a GPU, for bench/linear.py.

The dense part of one decode step of MiniCPM4-8B's shape as BitCPM4 has it: every linear of 32 layers with one scale for 128
inputs, in one CUDA graph, and the same with the bf16 LM head behind it. `ternary_n1_bandwidth` is what the linears must read
(weights and scales) over their time and over the bandwidth of a device copy; `ternary_n1_vs_w4a16` compares the graphs
with the head. A chunk of 2048 rows is measured in both ways: by the kernel itself, and widened piecewise for cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from pycuda.driver import Stream

    from plugins_trt.registry import Kernels

    Timer = Callable[[Callable[[], None]], float]

ROWS = (1, 2, 4, 8, 16, 32, 64)
BOUNDS = {
    "ternary_n1_bandwidth": (">=", 0.50),
    **{f"ternary_n{rows}_vs_w4a16": ("<=", 1.0) for rows in ROWS},
}
LAYERS, HIDDEN, INTERMEDIATE, QKV, VOCABULARY, GROUP = 32, 4096, 16384, 4608, 73448, 128
CHUNK, PIECE = 2048, 4096
KINDS = {
    "qkv": (QKV, HIDDEN, False),
    "output": (HIDDEN, HIDDEN, False),
    "gate_up": (2 * INTERMEDIATE, HIDDEN, True),
    "down": (HIDDEN, INTERMEDIATE, False),
}
"""Outputs, inputs, and whether they are gated."""


@dataclass
class Weights:
    """Random ternary weights of one kind, of all layers."""

    tiles: torch.Tensor  # int32 [layers, tiles, K / 128, 32, 4]
    scales: torch.Tensor  # int32 [layers, tiles, K / 128, 8, 1]

    @classmethod
    def random(cls, outputs: int, inputs: int) -> Weights:
        """Weights that keep what goes through them at its size."""
        import torch

        shape = (LAYERS, outputs // 16, inputs // 128)
        tiles = torch.randint(-(1 << 31), 1 << 31, (*shape, 32, 4), dtype=torch.int32, device="cuda")
        scale = torch.full((1,), 1.2 * inputs**-0.5, dtype=torch.float16).view(torch.int16)
        word = int(scale.item()) * 0x10001
        return cls(tiles, torch.full((*shape, 8, 1), word, dtype=torch.int32, device="cuda"))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.tiles.nbytes + self.scales.nbytes


class Step:
    """The linears of a step of some rows."""

    def __init__(self, kernels: Kernels, stream: Stream, weights: Mapping[str, Weights], rows: int) -> None:
        import torch

        from plugins_trt.contract import DeviceArray
        from plugins_trt.ternary_linear.contract import LinearPlan, TernaryLinear
        from plugins_trt.ternary_linear.launch import TernaryMultiplier

        of = DeviceArray.of
        self._stream = stream
        self._multiply = TernaryMultiplier(
            kernels.operator("ternary_linear"), multiprocessors=kernels.multiprocessors, dtype="bfloat16"
        )

        def array(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda").bfloat16()

        self.hidden, qkv, activated = array(rows, HIDDEN), array(rows, QKV), array(rows, INTERMEDIATE)
        self.logits = array(rows, VOCABULARY)
        size = max(
            LinearPlan.of(
                rows=rows, outputs=outputs, inputs=inputs, multiprocessors=kernels.multiprocessors
            ).workspace_bytes
            for outputs, inputs, _ in KINDS.values()
        )
        workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
        self._keep = [qkv, activated, workspace]
        places = {
            "qkv": (self.hidden, qkv),
            "output": (qkv[:, :HIDDEN], self.hidden),
            "gate_up": (self.hidden, activated),
            "down": (activated, self.hidden),
        }
        self.products = {
            kind: [
                TernaryLinear(
                    x=of(x),
                    tiles=of(weights[kind].tiles[layer]),
                    scales=of(weights[kind].scales[layer]),
                    out=of(out),
                    residual=of(out) if out is self.hidden else None,
                    workspace=of(workspace),
                    gated=KINDS[kind][2],
                )
                for layer in range(LAYERS)
            ]
            for kind, (x, out) in places.items()
        }

    def run_kind(self, kind: str, layers: int = LAYERS) -> None:
        """Enqueues one kind of linear of some layers."""
        for product in self.products[kind][:layers]:
            self._multiply(product, self._stream)

    def run(self, head: torch.Tensor | None = None) -> None:
        """Enqueues everything, layer by layer, and the head."""
        import torch

        for layer in range(LAYERS):
            for products in self.products.values():
                self._multiply(products[layer], self._stream)
        if head is not None:
            torch.mm(self.hidden, head.t(), out=self.logits)


def measure(
    kernels: Kernels, stream: Stream, median_ms: Timer, ceilings: Mapping[str, float]
) -> dict[str, float]:
    """All figures; times in milliseconds, bandwidths and rates as shares of the ceilings.

    Args:
        kernels: Of the device.
        stream: PyCUDA's, that `median_ms` captures.
        median_ms: The median time of a graph of what it is given.
        ceilings: `copy_bytes_per_s` and `bf16_flop_per_s` and, to compare with, `w4a16_n1_ms` and so on.
    """
    import torch

    copy = ceilings["copy_bytes_per_s"]
    figures: dict[str, float] = {}
    weights = {kind: Weights.random(outputs, inputs) for kind, (outputs, inputs, _) in KINDS.items()}
    head = torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
    moved = sum(each.nbytes for each in weights.values())
    figures["ternary_bytes"] = moved
    for rows in ROWS:
        step = Step(kernels, stream, weights, rows)
        ms = median_ms(step.run)
        figures[f"ternary_n{rows}_ms"] = ms
        figures[f"ternary_n{rows}_bandwidth"] = moved / (ms * 1e-3) / copy
        figures[f"ternary_n{rows}_with_head_ms"] = median_ms(partial(step.run, head))
        if f"w4a16_n{rows}_ms" in ceilings:
            ratio = figures[f"ternary_n{rows}_with_head_ms"] / ceilings[f"w4a16_n{rows}_ms"]
            figures[f"ternary_n{rows}_vs_w4a16"] = ratio
        for kind in KINDS:
            of_kind = median_ms(partial(step.run_kind, kind))
            figures[f"ternary_n{rows}_{kind}_bandwidth"] = weights[kind].nbytes / (of_kind * 1e-3) / copy
    figures.update(_chunk(kernels, stream, median_ms, weights, ceilings["bf16_flop_per_s"]))
    return figures


def _chunk(
    kernels: Kernels, stream: Stream, median_ms: Timer, weights: Mapping[str, Weights], rate: float
) -> dict[str, float]:
    """A chunk of rows through one layer: the share of the bf16 rate, of the kernel and widened for cuBLAS."""
    import torch

    from plugins_trt.contract import DeviceArray
    from plugins_trt.ternary_linear.contract import TernaryWiden
    from plugins_trt.ternary_linear.launch import TernaryWidener

    step = Step(kernels, stream, weights, CHUNK)
    work = sum(2 * CHUNK * outputs * inputs for outputs, inputs, _ in KINDS.values())
    of_kernel = sum(median_ms(partial(step.run_kind, kind, 2)) / 2 for kind in KINDS)
    widen = TernaryWidener(kernels.operator("ternary_linear"), dtype="bfloat16")
    wide = torch.empty(PIECE * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")

    def widened(kind: str) -> None:
        outputs, inputs, gated = KINDS[kind]
        x, out = inputs_of[kind], outputs_of[kind]
        for first in range(0, outputs, PIECE):
            piece = wide[: min(PIECE, outputs - first) * inputs].view(-1, inputs)
            tiles, scales = DeviceArray.of(weights[kind].tiles[0]), DeviceArray.of(weights[kind].scales[0])
            widen(TernaryWiden(tiles, scales, DeviceArray.of(piece), outputs, first, gated=gated), stream)
            torch.mm(x, piece.t(), out=out[:, first : first + len(piece)])

    inputs_of = {kind: torch.randn(CHUNK, each[1], device="cuda").bfloat16() for kind, each in KINDS.items()}
    outputs_of = {
        kind: torch.empty(CHUNK, each[0], dtype=torch.bfloat16, device="cuda") for kind, each in KINDS.items()
    }
    of_widened = sum(median_ms(partial(widened, kind)) for kind in KINDS)
    return {
        "ternary_chunk_rate": work / (of_kernel * 1e-3) / rate,
        "ternary_chunk_widened_rate": work / (of_widened * 1e-3) / rate,
    }
