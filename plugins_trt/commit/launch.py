"""Launches `commit` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.arena import Arena
from plugins_trt.contract import Batch, kernel_suffix

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.commit.contract import Commit

_THREADS = 128


class Committer:
    """The kernel of one dtype, one type of stored keys and values, and one head_dim."""

    def __init__(
        self, function: Callable[[str, int], Any], *, dtype: str, head_dim: int, kv_dtype: str | None = None
    ) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        arena, strides = (Arena.FORMAT, 4) if kv_dtype is None else (Arena.QUANTIZED_FORMAT, 6)
        self._kernel = function(f"commit_{kernel_suffix(dtype, kv_dtype)}_d{head_dim}", 0).prepare(
            Batch.FORMAT + arena + "PP" + strides * "q", overlaps=True
        )

    def __call__(self, args: Commit, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        arena = args.arena
        self._kernel.prepared_async_call(
            (arena.layers, arena.kv_heads, args.batch.sequences),
            (_THREADS, 1, 1),
            stream,
            *args.batch.pack(),
            *arena.pack_all(0),
            args.paths.pointer,
            args.accepted.pointer,
            arena.keys.layer_stride,
            arena.values.layer_stride,
            arena.fine.layer_stride,
            arena.coarse.layer_stride,
            *(pool.layer_stride for pool in arena.scales),
        )
