"""Launches decode attention on raw pointers: the parts of the context, then their combination."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from plugins_trt.arena import Arena
from plugins_trt.contract import KERNEL_DTYPES, Batch, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.decode_attention.contract import AttentionPlan, DecodeAttention

_ATTEND = "PPPPPPPfiiiiiiiii"
_FORMAT = Batch.FORMAT + Arena.FORMAT + _ATTEND
_COMBINE_FORMAT = Batch.FORMAT + _ATTEND
_FEW_PARTS = 32
_THREADS, _COMBINE_THREADS = 128, 256
_NARROW_BYTES = {64: 4 * 4 * 2 * 16 * 64 * 2, 128: 4 * 3 * 2 * 16 * 128 * 2}
_LEAST_UNITS = 3
_LOG2E = 1.4426950408889634


class DecodeAttender:
    """The kernels of one dtype and head_dim on one device."""

    def __init__(
        self, function: Callable[[str, int], Any], *, multiprocessors: int, dtype: str, head_dim: int
    ) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`)."""
        self.multiprocessors = multiprocessors
        layout = f"{KERNEL_DTYPES[dtype]}_d{head_dim}"
        self._narrow_bytes = _NARROW_BYTES[head_dim]
        self._wide_bytes = (128 + 4 * 64) * head_dim * 2
        self._narrow = function(f"narrow_{layout}", self._narrow_bytes).prepare(_FORMAT, overlaps=True)
        self._wide = function(f"wide_{layout}", self._wide_bytes).prepare(_FORMAT, overlaps=True)
        self._combine_few = function(f"combine_few_{layout}", 0).prepare(_COMBINE_FORMAT, overlaps=True)
        self._combine_many = function(f"combine_many_{layout}", 0).prepare(_COMBINE_FORMAT, overlaps=True)

    def __call__(
        self,
        args: DecodeAttention,
        stream: Any = None,  # noqa: ANN401 -- PyCUDA is untyped
        *,
        least_units: int = _LEAST_UNITS,
    ) -> None:
        """Enqueues one attention.

        Args:
            args: What to attend to.
            stream: None is the default stream.
            least_units: 16-key units that a warp takes at least before the context is cut further.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        plan, batch = args.plan(self.multiprocessors), args.batch
        attend = _pack_attend(args, plan, least_units)
        packed = (*batch.pack(), *args.arena.pack(args.layer), *attend)
        block = (_THREADS, 1, 1)
        if plan.narrow_parts:
            grid = (plan.narrow_parts, args.arena.kv_heads, batch.tokens)
            self._narrow.prepared_async_call(grid, block, stream, *packed, shared_size=self._narrow_bytes)
        if plan.wide_tiles:
            grid = (plan.wide_parts, plan.wide_tiles, args.arena.kv_heads)
            self._wide.prepared_async_call(grid, block, stream, *packed, shared_size=self._wide_bytes)
        self._combine(args, plan, attend, stream)

    def _combine(
        self,
        args: DecodeAttention,
        plan: AttentionPlan,
        attend: tuple[float, ...],
        stream: Any,  # noqa: ANN401
    ) -> None:
        block = (_COMBINE_THREADS, 1, 1)
        if plan.parts > _FEW_PARTS:
            grid = (args.heads, args.batch.tokens, 1)
            self._combine_many.prepared_async_call(grid, block, stream, *args.batch.pack(), *attend)
        elif plan.parts > 1 or not plan.narrow_parts:  # (which zeroes padding, too)
            rows = _COMBINE_THREADS // (args.arena.head_dim // 4)
            grid = (ceil_div(args.heads, rows), args.batch.tokens, 1)
            self._combine_few.prepared_async_call(grid, block, stream, *args.batch.pack(), *attend)


def _pack_attend(args: DecodeAttention, plan: AttentionPlan, least_units: int) -> tuple[float, ...]:
    """The kernels' `Attend` struct, in the order of `_ATTEND`."""
    return (
        args.q.pointer,
        args.out.pointer,
        0 if args.blocks is None else args.blocks.pointer,
        0 if args.counts is None else args.counts.pointer,
        args.workspace.pointer,
        args.workspace.pointer + plan.partial_bytes,
        args.workspace.pointer + plan.partial_bytes + plan.statistics_bytes,
        (1.0 / math.sqrt(args.arena.head_dim) if args.scale is None else args.scale) * _LOG2E,
        args.heads,
        args.arena.kv_heads,
        0 if args.blocks is None else args.blocks.shape[2],
        args.dense_below,
        plan.parts,
        plan.narrow_parts,
        plan.wide_parts,
        least_units,
        0,
    )
