"""Launches `rms_norm` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.rms_norm.contract import RmsNorm

_PIECE = 8  # elements that a thread takes at a time
_FEWEST, _MOST = 64, 512


def threads(hidden: int) -> int:
    """Of a thread block, in whole warps: one piece each, as far as that goes."""
    return min(max(ceil_div(hidden, 32 * _PIECE) * 32, _FEWEST), _MOST)


class RmsNormalizer:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"rms_norm_{KERNEL_DTYPES[dtype]}", 0).prepare("PPPPffii", overlaps=True)

    def __call__(self, args: RmsNorm, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        self._kernel.prepared_async_call(
            (args.residual.shape[0], 1, 1),
            (threads(args.residual.shape[1]), 1, 1),
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
