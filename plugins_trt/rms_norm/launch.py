"""Launches `rms_norm` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.rms_norm.contract import RmsNorm

_PIECE = 8  # elements that a thread takes at a time
_FEWEST, _MOST = 64, 512
_FEW_ROWS = 64
_MANY_THREADS = 256


def threads(hidden: int) -> int:
    """Of a thread block when rows are few, in whole warps: one piece each, as far as that goes."""
    return min(max(ceil_div(hidden, 32 * _PIECE) * 32, _FEWEST), _MOST)


class RmsNormalizer:
    """The kernels of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`)."""
        suffix = KERNEL_DTYPES[dtype]
        self._few, self._many = (
            function(f"{name}_{suffix}", 0).prepare("PPPPffii", overlaps=True)
            for name in ("rms_norm", "rms_norm_many")
        )

    def __call__(self, args: RmsNorm, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        rows, hidden = args.residual.shape
        few = rows <= _FEW_ROWS
        (self._few if few else self._many).prepared_async_call(
            (rows, 1, 1),
            (threads(hidden) if few else _MANY_THREADS, 1, 1),
            stream,
            0 if args.branch is None else args.branch.pointer,
            args.residual.pointer,
            args.weight.pointer,
            args.out.pointer,
            args.scale,
            args.epsilon,
            hidden,
            0,
        )
