"""Launches `rms_norm` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.rms_norm.contract import RmsNorm

_THREADS = 256


class RmsNormalizer:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"rms_norm_{KERNEL_DTYPES[dtype]}", 0).prepare("PPPPffii", overlaps=True)

    def __call__(self, args: RmsNorm, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        self._kernel.prepared_async_call(
            (args.residual.shape[0], 1, 1),
            (_THREADS, 1, 1),
            stream,
            0 if args.branch is None else args.branch.pointer,
            args.residual.pointer,
            args.weight.pointer,
            args.out.pointer,
            args.scale,
            args.epsilon,
            args.residual.shape[1],
            0,
        )
