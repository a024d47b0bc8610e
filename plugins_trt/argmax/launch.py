"""Launches `argmax` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.argmax.contract import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.argmax.contract import Argmax

_THREADS = 1024


class Argmaxer:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"argmax_{DTYPES[dtype]}", 0).prepare("PPqii", overlaps=True)

    def __call__(self, args: Argmax, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        rows, size = args.logits.shape
        self._kernel.prepared_async_call(
            (rows, 1, 1),
            (_THREADS, 1, 1),
            stream,
            args.logits.pointer,
            args.ids.pointer,
            args.row_stride,
            size,
            0,
        )
