"""Launches `w4a16_widen` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div
from plugins_trt.packed.product import OCTET
from plugins_trt.w4a16_linear.layout import STEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.w4a16_widen.contract import W4A16Widen

_FORMAT = "PPPiiiiii"
_THREADS = 256


class W4A16Widener:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"w4a16_widen_{KERNEL_DTYPES[dtype]}", 0).prepare(_FORMAT, overlaps=True)

    def __call__(self, args: W4A16Widen, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        steps = args.inputs // STEP
        self._kernel.prepared_async_call(
            (ceil_div(steps, _THREADS // 32), ceil_div(args.rows, OCTET), 1),
            (_THREADS, 1, 1),
            stream,
            *pack(args),
        )


def pack(args: W4A16Widen) -> tuple[int, ...]:
    """The kernel's `Widen` struct, in the order of `_FORMAT`."""
    first, gate = args.octets
    return (
        args.tiles.pointer,
        args.groups.pointer,
        args.out.pointer,
        args.inputs // STEP,
        (args.group // STEP).bit_length() - 1,
        first,
        args.rows,
        gate,
        0,
    )
