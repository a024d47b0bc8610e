"""Linear layers on a GPU: the kernel for each form of weight and number of rows.

Weights of 16 bits: one row streams them through our kernel, more go to cuBLAS. Where both were measured
(docs/gpu_runs.md) they are equally fast for one row, and cuBLAS is faster for more; for one row ours overlaps the launches
around it, and takes the activation of the MLP along.

Packed weights: up to 128 rows (ternary: 64) multiply them as they are. For more, some outputs at a time are widened into a
buffer of the plan and multiplied by cuBLAS. On an H200 (docs/gpu_runs.md) 128 rows run at 192 TFLOP/s in 4 bits as they are
and at 166 widened, ternary at 172 and 191; 256 rows at 192 and 298.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from edged.memory.cuda_buffers import wide_rows
from plugins_trt.contract import DeviceArray
from plugins_trt.skinny_linear.contract import MAX_ROWS, STEP, SkinnyGated, SkinnyLinear
from plugins_trt.ternary_linear.contract import TernaryLinear, TernaryWiden
from plugins_trt.w4a16_linear.contract import MAX_ROWS as MAX_PACKED_ROWS
from plugins_trt.w4a16_linear.contract import W4A16Linear
from plugins_trt.w4a16_widen.contract import W4A16Widen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edged.executor.cuda_device import StepKernels
    from edged.executor.cuda_packed import PackedTensors
    from edged.models.operators import Linear

SKINNY_ROWS = 1
"""Up to here our kernel is taken for weights of 16 bits."""

_of = DeviceArray.of


class CudaLinear:
    """``x @ weight.T + bias``.

    Args:
        kernels: The operators of the device.
        packed: The weights that are packed, by the linear's name.
        buffers: Where their scratch memory is: ``packed_workspace`` and ``packed_wide``, where they are needed.
    """

    def __init__(
        self, kernels: StepKernels, packed: Mapping[str, PackedTensors], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._kernels = kernels
        self._packed = packed
        self._workspace = buffers.get("packed_workspace")
        self._wide = buffers.get("packed_wide")
        # Half-precision operands with an fp32 result: torch has it on GPUs from 2.8 on.
        self._has_wide = torch.cuda.is_available() and "dtype_out" in torch.ops.aten.mm.overloads()

    def __call__(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """``[M, in]`` to ``[M, out]``."""
        packed = self._packed.get(layer.name)
        if packed is not None:
            if x.shape[0] <= packed.form.kernel_rows:
                self._packed_product(x, packed, layer, out)
            else:
                self._widened_product(x, packed, layer, out)
        elif _is_skinny(x):
            self._skinny(x, layer, out, 1.0)
        else:
            _product(x, layer.weight, layer.bias, out)
        return out

    def fuses(self, x: torch.Tensor, layer: Linear[torch.Tensor]) -> bool:
        """Whether one kernel goes on from ``layer``, which is gate and up, to the activation."""
        packed = self._packed.get(layer.name)
        return _is_skinny(x) if packed is None else x.shape[0] <= packed.form.kernel_rows

    def gated(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor) -> None:
        """``silu(gate) * up`` of what ``layer`` gives, ``[M, in]`` to ``[M, out / 2]``; only where it :meth:`fuses`."""
        packed = self._packed.get(layer.name)
        if packed is not None:
            self._packed_product(x, packed, layer, out, gated=True)
            return
        bias = None if layer.bias is None else _of(layer.bias)
        self._kernels.gated(SkinnyGated(_of(x), _of(layer.weight), _of(out), bias))

    def logits(
        self, x: torch.Tensor, head: Linear[torch.Tensor], out: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """``scale * x @ weight.T`` of ``[M, H]`` in fp32 ``[M, V]``, never rounded to half precision on the way."""
        if self._has_wide and x.is_cuda and not _is_skinny(x):
            torch.ops.aten.mm.dtype_out(x, head.weight.t(), torch.float32, out=out)
            return out if scale == 1.0 else out.mul_(scale)
        for first in range(0, x.shape[0], MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            self._skinny(x[rows], head, out[rows], scale)
        return out

    def _skinny(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        bias = None if layer.bias is None else _of(layer.bias)
        self._kernels.linear(SkinnyLinear(_of(x), _of(layer.weight), _of(out), bias, scale))

    def _packed_product(
        self,
        x: torch.Tensor,
        packed: PackedTensors,
        layer: Linear[torch.Tensor],
        out: torch.Tensor,
        *,
        gated: bool = False,
    ) -> None:
        product: Callable[..., TernaryLinear | W4A16Linear] = TernaryLinear
        if not packed.form.ternary:
            product = partial(W4A16Linear, symmetric=bool(packed.symmetric))
        tiles, groups = _of(packed.tiles), _of(packed.groups)
        bias = None if layer.bias is None else _of(layer.bias)
        workspace = None if self._workspace is None else _of(self._workspace)
        for first in range(0, x.shape[0], MAX_PACKED_ROWS):
            rows = slice(first, first + MAX_PACKED_ROWS)
            self._kernels.packed(
                product(_of(x[rows]), tiles, groups, _of(out[rows]), bias, workspace=workspace, gated=gated)
            )

    def _widened_product(
        self, x: torch.Tensor, packed: PackedTensors, layer: Linear[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Some outputs at a time: widen, multiply, go on."""
        form = packed.form
        assert self._wide is not None  # noqa: S101 - the plan has it where a step has so many tokens
        step = wide_rows(form)
        for first in range(0, form.outputs, step):
            rows = slice(first, min(first + step, form.outputs))
            count = rows.stop - rows.start
            wide = self._wide[: count * form.inputs].view(count, form.inputs)
            widen = TernaryWiden if form.ternary else W4A16Widen
            self._kernels.widen(
                widen(_of(packed.tiles), _of(packed.groups), _of(wide), form.outputs, first, gated=form.gated)
            )
            bias = None if layer.bias is None else layer.bias[rows]
            _product(x, wide, bias, out[:, rows])


def _is_skinny(x: torch.Tensor) -> bool:
    """Whether our kernel takes a product with a weight of 16 bits."""
    return x.shape[0] <= SKINNY_ROWS and x.shape[1] % STEP == 0


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
