"""Launches `embedding` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.embedding.contract import Embedding

_THREADS = 128


class Embedder:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"embedding_{KERNEL_DTYPES[dtype]}", 0).prepare("PPPfiii", overlaps=True)

    def __call__(self, args: Embedding, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        vocabulary, size = args.table.shape
        self._kernel.prepared_async_call(
            (ceil_div(size, 8 * _THREADS), args.ids.shape[0], 1),
            (_THREADS, 1, 1),
            stream,
            args.ids.pointer,
            args.table.pointer,
            args.out.pointer,
            args.scale,
            vocabulary,
            size,
            0,
        )
