"""Linear layers on a GPU: few rows stream the weights through our kernel, many go to cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from plugins_trt.contract import DeviceArray
from plugins_trt.skinny_linear.contract import MAX_ROWS, STEP, SkinnyLinear

if TYPE_CHECKING:
    from edged.models.operators import Linear

SkinnyMultiply = Callable[[SkinnyLinear], None]


class CudaLinear:
    """``x @ weight.T + bias``.

    Args:
        multiply: Enqueues our kernel.
    """

    def __init__(self, multiply: SkinnyMultiply) -> None:
        self._multiply = multiply

    def __call__(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """``[M, in]`` to ``[M, out]``."""
        if _is_skinny(x):
            self._skinny(x, layer, out, 1.0)
        elif layer.bias is None:
            torch.mm(x, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)
        return out

    def logits(
        self, x: torch.Tensor, head: Linear[torch.Tensor], out: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """``scale * x @ weight.T`` of ``[M, H]`` in fp32 ``[M, V]``, never rounded to half precision on the way."""
        for first in range(0, x.shape[0], MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            self._skinny(x[rows], head, out[rows], scale)
        return out

    def _skinny(self, x: torch.Tensor, layer: Linear[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        of = DeviceArray.of
        bias = None if layer.bias is None else of(layer.bias)
        self._multiply(SkinnyLinear(of(x), of(layer.weight), of(out), bias, scale))


def _is_skinny(x: torch.Tensor) -> bool:
    return x.shape[0] <= MAX_ROWS and x.shape[1] % STEP == 0
