"""Nodes with packed weights on a GPU, made by their creators from TensorRT's registry: what they enqueue through TensorRT's
base classes, also inside a captured graph, equals the reference, and launches of the kernels alone to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_case import bindings, created, descriptions, first_gpu

from plugins_trt.contract import DeviceArray
from plugins_trt.tensorrt.device_session import DeviceSession
from plugins_trt.tensorrt.linear_plugins import TernaryLinearOperator, W4A16LinearOperator
from plugins_trt.ternary_linear import layout as ternary_layout
from plugins_trt.w4a16_linear import layout as w4a16_layout

pytestmark = pytest.mark.gpu

OUTPUTS, INPUTS = 1056, 640
CASES = {
    "w4a16, group 128": (W4A16LinearOperator, 128, 0, 0),
    "w4a16, group 64, bias": (W4A16LinearOperator, 64, 0, 1),
    "w4a16, gated, bias": (W4A16LinearOperator, 128, 1, 1),
    "w4a16, symmetric": (W4A16LinearOperator, 128, 0, 0),
    "w4a16, symmetric, group 64, gated": (W4A16LinearOperator, 64, 1, 0),
    "ternary, group 128": (TernaryLinearOperator, 128, 0, 0),
    "ternary, group 32, bias": (TernaryLinearOperator, 32, 0, 1),
    "ternary, a group a row, gated": (TernaryLinearOperator, INPUTS, 1, 0),
}
ERROR = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Of a rounding to the type, relative."""


@pytest.fixture(scope="module")
def trt() -> Any:
    return bindings()


@pytest.fixture(scope="module")
def gpu() -> Any:
    return first_gpu()


class Case:
    """A weight on the GPU."""

    def __init__(self, gpu: Any, name: str, dtype: str) -> None:
        torch, random = gpu.torch, np.random.default_rng(7)
        kind, group, gated, bias = CASES[name]
        self.symmetric = "symmetric" in name
        self.operator = kind(
            weight="layers.0.test",
            outputs_of_row=OUTPUTS,
            inputs_of_row=INPUTS,
            group=group,
            gated=gated,
            bias=bias,
        )
        scales = (0.5 + random.random((OUTPUTS, INPUTS // group))).astype(np.float16)
        if kind is W4A16LinearOperator:
            packed = random.integers(0, 2**32, (OUTPUTS, INPUTS // 8), np.uint32)
            tiles = w4a16_layout.pack_tiles(packed, gated=bool(gated))
            zeros = random.integers(0, 16, scales.shape, np.uint8)
            if self.symmetric:
                zeros[:] = 8
            scaled = w4a16_layout.pack_groups(scales, zeros, gated=bool(gated))
        else:
            codes = random.integers(0, 3, (OUTPUTS, INPUTS)).astype(np.uint32)
            packed = np.zeros((OUTPUTS, INPUTS // 16), np.uint32)
            for place in range(16):
                packed |= codes[:, place::16] << np.uint32(2 * place)
            tiles = ternary_layout.pack_tiles(packed, gated=bool(gated))
            scaled = ternary_layout.pack_scales(scales, INPUTS, gated=bool(gated))
        self.torch, self.dtype = torch, getattr(torch, dtype)
        self.tiles, self.scales = (torch.from_numpy(each.view(np.int32)).cuda() for each in (tiles, scaled))
        self.bias = torch.randn(OUTPUTS, device="cuda").to(self.dtype) if bias else None
        self.width = OUTPUTS // 2 if gated else OUTPUTS

    def inputs(self, rows: int) -> list[Any]:
        x = (self.torch.randn(rows, INPUTS, device="cuda") / INPUTS**0.5).to(self.dtype)
        return [x, self.tiles, self.scales, *([] if self.bias is None else [self.bias])]

    def empty(self, rows: int) -> Any:
        return self.torch.full((rows, self.width), float("nan"), dtype=self.dtype, device="cuda")

    def multiplier(self, gpu: Any) -> Any:
        from plugins_trt.ternary_linear.launch import TernaryMultiplier
        from plugins_trt.w4a16_linear.launch import W4A16Multiplier

        name = str(self.dtype).removeprefix("torch.")
        options = {"multiprocessors": gpu.kernels.multiprocessors, "dtype": name}
        if isinstance(self.operator, TernaryLinearOperator):
            return TernaryMultiplier(gpu.kernels.operator("ternary_linear"), **options)
        return W4A16Multiplier(
            gpu.kernels.operator("w4a16_linear"), shared_bytes=gpu.kernels.shared_bytes, **options
        )

    def expected(self, inputs: list[Any]) -> Any:
        from plugins_trt.ternary_linear.reference import ternary_linear
        from plugins_trt.w4a16_linear.reference import w4a16_linear

        reference = ternary_linear if isinstance(self.operator, TernaryLinearOperator) else w4a16_linear
        host = [each.cpu() for each in inputs[:3]]
        bias = None if self.bias is None else self.bias.cpu()
        return reference(*host, outputs=self.width, bias=bias, gated=bool(self.operator.gated)).cuda()


@pytest.mark.parametrize("rows", [1, 9, 64, 150])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_a_node_equals_the_reference_and_the_kernels_alone_also_in_a_captured_graph(
    name: str, dtype: str, rows: int, trt: Any, gpu: Any
) -> None:
    torch, case = gpu.torch, Case(gpu, name, dtype)
    torch.manual_seed(rows)
    inputs, out = case.inputs(rows), case.empty(rows)
    node = created(trt, case.operator, "layers.0.test")
    ins, outs = descriptions(trt, inputs), descriptions(trt, [out])
    node.on_shape_change(ins, outs)
    needed = case.operator.workspace_bytes({"M": rows})
    # Behind what the node said it needs lies what nobody may touch.
    workspace = torch.full((needed + 256,), 0xEE, dtype=torch.uint8, device="cuda")
    multiply = case.multiplier(gpu)
    session = DeviceSession(
        lambda *_: pytest.fail("there is no attention"),
        stream=gpu.stream,
        arena=None,  # type: ignore[arg-type]
        workspace=DeviceArray.of(workspace),
        arrived=None,
        multiply=multiply,
        symmetric={case.operator.weight} if case.symmetric else frozenset(),
    )

    def run() -> None:
        node.enqueue(
            ins,
            outs,
            [each.data_ptr() for each in inputs],
            [out.data_ptr()],
            workspace.data_ptr() if needed else 0,
            gpu.stream.handle,
        )

    alone, scratch = case.empty(rows), torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    step = case.operator.LAUNCH_ROWS
    for first in range(0, rows, step):
        part = slice(first, first + step)
        multiply(
            case.operator.product(
                DeviceArray.of(inputs[0][part]),
                [DeviceArray.of(each) for each in inputs[1:3]],
                DeviceArray.of(alone[part]),
                None if case.bias is None else DeviceArray.of(case.bias),
                DeviceArray.of(scratch),
                symmetric=case.symmetric,
            ),
            gpu.stream,
        )
    wanted = case.expected(inputs)
    with session:
        run()
        torch.cuda.synchronize()
        assert torch.equal(out, alone)
        # Of the output itself, and of the weights, which some kernels round to its type.
        allowed = 8 * ERROR[dtype] * (wanted.std() + wanted.abs())
        assert bool(((out.float() - wanted).abs() <= allowed).all())
        assert bool((workspace[needed:] == 0xEE).all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, alone)
