"""The linears of one decode step of MiniCPM4-8B's shape with packed weights, on a GPU, for bench/linear.py.

A format says how weights lie and which kernels multiply with them; everything else is the same for all of them: random
weights of every linear of 32 layers, a step of some rows through them in one CUDA graph, with the bf16 LM head behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from pycuda.driver import Stream

    from plugins_trt.contract import DeviceArray
    from plugins_trt.registry import Kernels

    Piece = tuple[DeviceArray, DeviceArray, DeviceArray, int, int]  # tiles, scales, out, outputs, first

    class Widener(Protocol):
        """Writes weights of some outputs as 16-bit numbers."""

        def __call__(self, piece: Piece, *, gated: bool, stream: Stream) -> None: ...


LAYERS, HIDDEN, INTERMEDIATE, QKV, VOCABULARY, GROUP = 32, 4096, 16384, 4608, 73448, 128
ROWS = (1, 2, 4, 8, 16, 32, 64)
PIECE = 1 << 25
"""Elements of the weights that are widened at a time, as the executor does."""

KINDS = {
    "qkv": (QKV, HIDDEN, False),
    "output": (HIDDEN, HIDDEN, False),
    "gate_up": (2 * INTERMEDIATE, HIDDEN, True),
    "down": (HIDDEN, INTERMEDIATE, False),
}
"""Outputs, inputs, and whether they are gated."""


@dataclass
class Weights:
    """Random weights of one kind, of all layers."""

    tiles: torch.Tensor  # int32 [layers, tiles, ..]
    scales: torch.Tensor  # int32 [layers, tiles, ..], of W4A16 with the zero points

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.tiles.nbytes + self.scales.nbytes


class Format(Protocol):
    """Weights of one packed form and their kernels."""

    name: str

    def random(self, outputs: int, inputs: int) -> Weights:
        """Weights so small that the residual stream stays finite over all the runs."""

    def multiplier(self, kernels: Kernels) -> Callable[[Any, Stream], None]:
        """The kernels of bfloat16."""

    def workspace_bytes(self, kernels: Kernels, rows: int, outputs: int, inputs: int) -> int:
        """Scratch memory of a product."""

    def product(self, tiles: DeviceArray, scales: DeviceArray, **arguments: Any) -> Any:  # noqa: ANN401
        """What the multiplier takes."""

    def widener(self, kernels: Kernels) -> Widener:
        """Writes some of the weights as bfloat16."""


class W4A16:
    """Weights of 4 bits, a scale and a zero point for 128 inputs; the zero points are 8, whether the kernels know it or not.

    Args:
        symmetric: Whether they do.
    """

    name = "w4a16"

    def __init__(self, *, symmetric: bool = True) -> None:
        self._symmetric = symmetric

    def random(self, outputs: int, inputs: int) -> Weights:
        """Weights that make what goes through them small."""
        import torch

        shape = (LAYERS, outputs // 16, inputs // GROUP, 8, 2)
        word = _bits(0.02 * inputs**-0.5) | 8 << 16
        return Weights(
            _random_words(LAYERS, outputs // 16, inputs // 64, 32, 4),
            torch.full(shape, word, dtype=torch.int32, device="cuda"),
        )

    def multiplier(self, kernels: Kernels) -> Callable[[Any, Stream], None]:
        """The kernels of bfloat16."""
        from plugins_trt.w4a16_linear.launch import W4A16Multiplier

        return W4A16Multiplier(
            kernels.operator("w4a16_linear"),
            multiprocessors=kernels.multiprocessors,
            shared_bytes=kernels.shared_bytes,
            dtype="bfloat16",
        )

    def workspace_bytes(self, kernels: Kernels, rows: int, outputs: int, inputs: int) -> int:
        """Scratch memory of a product."""
        from plugins_trt.w4a16_linear.contract import LinearPlan

        return LinearPlan.of(
            rows=rows, outputs=outputs, inputs=inputs, multiprocessors=kernels.multiprocessors
        ).workspace_bytes

    def product(self, tiles: DeviceArray, scales: DeviceArray, **arguments: Any) -> Any:  # noqa: ANN401
        """What the multiplier takes."""
        from plugins_trt.w4a16_linear.contract import W4A16Linear

        return W4A16Linear(tiles=tiles, groups=scales, symmetric=self._symmetric, **arguments)

    def widener(self, kernels: Kernels) -> Widener:
        """Writes some of the weights as bfloat16."""
        from plugins_trt.w4a16_widen.contract import W4A16Widen
        from plugins_trt.w4a16_widen.launch import W4A16Widener

        return _Widener(W4A16Widener(kernels.operator("w4a16_widen"), dtype="bfloat16"), W4A16Widen)


class Ternary:
    """Ternary weights as BitCPM4 has them: one scale for 128 inputs."""

    name = "ternary"

    def random(self, outputs: int, inputs: int) -> Weights:
        """Weights that keep what goes through them at its size."""
        import torch

        shape = (LAYERS, outputs // 16, inputs // 128)
        word = _bits(1.2 * inputs**-0.5) * 0x10001
        return Weights(
            _random_words(*shape, 32, 4),
            torch.full((*shape, 8, 1), word, dtype=torch.int32, device="cuda"),
        )

    def multiplier(self, kernels: Kernels) -> Callable[[Any, Stream], None]:
        """The kernels of bfloat16."""
        from plugins_trt.ternary_linear.launch import TernaryMultiplier

        return TernaryMultiplier(
            kernels.operator("ternary_linear"), multiprocessors=kernels.multiprocessors, dtype="bfloat16"
        )

    def workspace_bytes(self, kernels: Kernels, rows: int, outputs: int, inputs: int) -> int:
        """Scratch memory of a product."""
        from plugins_trt.ternary_linear.contract import LinearPlan

        return LinearPlan.of(
            rows=rows, outputs=outputs, inputs=inputs, multiprocessors=kernels.multiprocessors
        ).workspace_bytes

    def product(self, tiles: DeviceArray, scales: DeviceArray, **arguments: Any) -> Any:  # noqa: ANN401
        """What the multiplier takes."""
        from plugins_trt.ternary_linear.contract import TernaryLinear

        return TernaryLinear(tiles=tiles, scales=scales, **arguments)

    def widener(self, kernels: Kernels) -> Widener:
        """Writes some of the weights as bfloat16."""
        from plugins_trt.ternary_linear.contract import TernaryWiden
        from plugins_trt.ternary_linear.launch import TernaryWidener

        return _Widener(TernaryWidener(kernels.operator("ternary_linear"), dtype="bfloat16"), TernaryWiden)


@dataclass(frozen=True)
class Linears:
    """Every linear of the model in one packed form, on a device."""

    packed: Format
    kernels: Kernels
    stream: Stream
    """PyCUDA's."""
    weights: Mapping[str, Weights]
    """Of every kind."""

    @classmethod
    def random(cls, packed: Format, kernels: Kernels, stream: Stream) -> Linears:
        """With random weights."""
        weights = {kind: packed.random(outputs, inputs) for kind, (outputs, inputs, _) in KINDS.items()}
        return cls(packed, kernels, stream, weights)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(each.nbytes for each in self.weights.values())


class Step:
    """The linears of a step of some rows."""

    def __init__(self, linears: Linears, rows: int) -> None:
        """Makes activations of some rows, and the arguments of every launch."""
        import torch

        from plugins_trt.contract import DeviceArray

        of = DeviceArray.of
        packed, weights = linears.packed, linears.weights
        self.rows = rows
        self._stream = linears.stream
        self._multiply = packed.multiplier(linears.kernels)

        def array(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda").bfloat16()

        self._hidden, qkv, activated = array(rows, HIDDEN), array(rows, QKV), array(rows, INTERMEDIATE)
        self._logits = array(rows, VOCABULARY)
        size = max(
            packed.workspace_bytes(linears.kernels, rows, outputs, inputs)
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
                packed.product(
                    of(weights[kind].tiles[layer]),
                    of(weights[kind].scales[layer]),
                    x=of(x),
                    out=of(out),
                    residual=of(out) if out is self._hidden else None,
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
            torch.mm(self._hidden, head.t(), out=self._logits)


class Chunk:
    """The linears of a chunk, layer by layer: a piece of the weights is widened and multiplied by cuBLAS, then the next."""

    def __init__(self, linears: Linears, rows: int) -> None:
        """Makes activations of some rows, and the memory of a piece."""
        import torch

        self._stream, self._weights = linears.stream, linears.weights
        self._widen = linears.packed.widener(linears.kernels)
        self._piece = torch.empty(PIECE, dtype=torch.bfloat16, device="cuda")
        self._pairs = {
            kind: [torch.randn(rows, size, device="cuda").bfloat16() for size in (inputs, outputs)]
            for kind, (outputs, inputs, _) in KINDS.items()
        }

    def run(self) -> None:
        """Enqueues everything."""
        import torch

        from plugins_trt.contract import DeviceArray

        of = DeviceArray.of
        for layer in range(LAYERS):
            for kind, (outputs, inputs, gated) in KINDS.items():
                x, out = self._pairs[kind]
                tiles, scales = of(self._weights[kind].tiles[layer]), of(self._weights[kind].scales[layer])
                step = PIECE // inputs
                for first in range(0, outputs, step):
                    count = min(step, outputs - first)
                    wide = self._piece[: count * inputs].view(count, inputs)
                    self._widen((tiles, scales, of(wide), outputs, first), gated=gated, stream=self._stream)
                    torch.mm(x, wide.t(), out=out[:, first : first + count])


def flop(rows: int, layers: int = LAYERS) -> float:
    """Operations of the linears of some layers."""
    return 2.0 * rows * layers * sum(outputs * inputs for outputs, inputs, _ in KINDS.values())


class _Widener:
    """Kernels that widen, with the arguments of their operator."""

    def __init__(self, launch: Callable[[Any, Stream], None], arguments: Callable[..., Any]) -> None:
        self._launch, self._arguments = launch, arguments

    def __call__(self, piece: Piece, *, gated: bool, stream: Stream) -> None:
        self._launch(self._arguments(*piece, gated=gated), stream)


def _random_words(*shape: int) -> torch.Tensor:
    import torch

    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device="cuda")


def _bits(value: float) -> int:
    """Of a float16."""
    import torch

    return int(torch.full((1,), value, dtype=torch.float16).view(torch.int16).item())
