"""Launches `silu_mul` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.silu_mul.contract import SiluMul

_THREADS = 256


class SiluMultiplier:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"silu_mul_{KERNEL_DTYPES[dtype]}", 0).prepare("PPPqii", overlaps=True)

    def __call__(self, args: SiluMul, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        rows, size = args.out.shape
        self._kernel.prepared_async_call(
            (ceil_div(size, 8 * _THREADS), rows, 1),
            (_THREADS, 1, 1),
            stream,
            args.gate.pointer,
            args.up.pointer,
            args.out.pointer,
            args.row_stride,
            size,
            0,
        )
