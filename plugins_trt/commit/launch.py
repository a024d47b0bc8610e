"""Launches `commit` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.arena import Arena
from plugins_trt.contract import KERNEL_DTYPES, Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.commit.contract import Commit

_FORMAT = Batch.FORMAT + Arena.FORMAT + "PPqqqq"
_THREADS = 128


class Committer:
    """The kernel of one dtype and head_dim."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str, head_dim: int) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"commit_{KERNEL_DTYPES[dtype]}_d{head_dim}", 0).prepare(
            _FORMAT, overlaps=True
        )

    def __call__(self, args: Commit, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        arena = args.arena
        self._kernel.prepared_async_call(
            (arena.layers, arena.kv_heads, args.batch.sequences),
            (_THREADS, 1, 1),
            stream,
            *args.batch.pack(),
            *arena.pack(0),
            args.paths.pointer,
            args.accepted.pointer,
            arena.keys.layer_stride,
            arena.values.layer_stride,
            arena.fine.layer_stride,
            arena.coarse.layer_stride,
        )
