"""Launches `append` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.arena import Arena
from plugins_trt.contract import Batch, ceil_div, check_rows, kernel_suffix

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.append.contract import Append

_ARGUMENTS = "PPPPPPPPPPqqqfiii"
_WARPS = 4


class Appender:
    """The kernel of one dtype, one type of stored keys and values, and one head_dim."""

    def __init__(
        self, function: Callable[[str, int], Any], *, dtype: str, head_dim: int, kv_dtype: str | None = None
    ) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        arena = Arena.FORMAT if kv_dtype is None else Arena.QUANTIZED_FORMAT
        self._kernel = function(f"append_{kernel_suffix(dtype, kv_dtype)}_d{head_dim}", 0).prepare(
            Batch.FORMAT + arena + _ARGUMENTS, overlaps=True
        )

    def __call__(self, args: Append, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        rows = args.heads + 4 * args.arena.kv_heads
        dtype, tokens = args.arena.dtype, args.batch.tokens
        self._kernel.prepared_async_call(
            (ceil_div(rows, _WARPS), tokens, 1),
            (32 * _WARPS, 1, 1),
            stream,
            *args.batch.pack(),
            *args.arena.pack_all(args.layer),
            args.q.pointer,
            args.k.pointer,
            args.v.pointer,
            args.q_out.pointer,
            0 if args.q_norm is None else args.q_norm.pointer,
            0 if args.k_norm is None else args.k_norm.pointer,
            args.cosine.pointer,
            args.sine.pointer,
            0 if args.node_fine is None else args.node_fine.pointer,
            0 if args.node_coarse is None else args.node_coarse.pointer,
            check_rows("q", args.q, dtype, args.q.shape),
            check_rows("k", args.k, dtype, args.k.shape),
            check_rows("v", args.v, dtype, args.v.shape),
            args.epsilon,
            args.heads,
            args.arena.kv_heads,
            0,
        )
