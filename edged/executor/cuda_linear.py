"""Linear layers on a GPU: one row streams the weights through our kernel, more go to cuBLAS.

Where both were measured (docs/gpu_runs.md) they are equally fast for one row, and cuBLAS is faster for more; for one row
ours overlaps the launches around it, and takes the activation of the MLP along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugins_trt.contract import DeviceArray
from plugins_trt.skinny_linear.contract import MAX_ROWS, STEP, SkinnyGated, SkinnyLinear

if TYPE_CHECKING:
    from edged.executor.cuda_device import StepKernels
    from edged.models.operators import Linear

SKINNY_ROWS = 1
"""Up to here our kernel is taken."""

_of = DeviceArray.of


class CudaLinear:
    """``x @ weight.T + bias``.

    Args:
        kernels: The operators of the device.
    """

    def __init__(self, kernels: StepKernels) -> None:
        self._kernels = kernels
        # Half-precision operands with an fp32 result: torch has it on GPUs from 2.8 on.
        self._has_wide = torch.cuda.is_available() and "dtype_out" in torch.ops.aten.mm.overloads()

    def __call__(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """``[M, in]`` to ``[M, out]``."""
        if self.is_skinny(x):
            self._skinny(x, layer, out, 1.0)
        elif layer.bias is None:
            torch.mm(x, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)
        return out

    def gated(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor) -> None:
        """``silu(gate) * up`` of what ``layer`` gives, ``[M, in]`` to ``[M, out / 2]``; only where ``is_skinny``."""
        bias = None if layer.bias is None else _of(layer.bias)
        self._kernels.gated(SkinnyGated(_of(x), _of(layer.weight), _of(out), bias))

    def logits(
        self, x: torch.Tensor, head: Linear[torch.Tensor], out: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """``scale * x @ weight.T`` of ``[M, H]`` in fp32 ``[M, V]``, never rounded to half precision on the way."""
        if self._has_wide and x.is_cuda and not self.is_skinny(x):
            torch.ops.aten.mm.dtype_out(x, head.weight.t(), torch.float32, out=out)
            return out if scale == 1.0 else out.mul_(scale)
        for first in range(0, x.shape[0], MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            self._skinny(x[rows], head, out[rows], scale)
        return out

    @staticmethod
    def is_skinny(x: torch.Tensor) -> bool:
        """Whether our kernel takes this product."""
        return x.shape[0] <= SKINNY_ROWS and x.shape[1] % STEP == 0

    def _skinny(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        bias = None if layer.bias is None else _of(layer.bias)
        self._kernels.linear(SkinnyLinear(_of(x), _of(layer.weight), _of(out), bias, scale))
