"""Launches decode block selection on raw pointers: two kernels for one token, three for several or a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.arena import Arena
from plugins_trt.contract import KERNEL_DTYPES, Batch, ceil_div, softmax_scale
from plugins_trt.decode_selection.contract import KEYS, MANY, TILES, WARPS, tile_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.decode_selection.contract import DecodeSelection, SelectionPlan

_SELECT = "PPPPPPPPPPfiiiiiiiiiii"
_LSE_FORMAT = Batch.FORMAT + Arena.FORMAT + _SELECT
_CHOOSE_FORMAT = Batch.FORMAT + _SELECT
_HEADS = 16
_THREADS, _MANY_THREADS = 32 * WARPS, 256
_LOG2E = 1.4426950408889634


class DecodeSelector:
    """The kernels of one dtype and head_dim."""

    def __init__(
        self,
        function: Callable[[str, int], Any],
        *,
        dtype: str,
        head_dim: int,
        multiprocessors: int,
    ) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`), for a device of so many multiprocessors."""
        self._multiprocessors = multiprocessors
        layout = f"{KERNEL_DTYPES[dtype]}_d{head_dim}"
        self._lse = function(f"lse_{layout}", 0).prepare(_LSE_FORMAT, overlaps=True)
        self._scores = function(f"scores_{layout}", 0).prepare(_LSE_FORMAT, overlaps=True)
        self._row = 2 * head_dim  # bytes of a row in shared memory
        self._lse_many = function(f"lse_many_{layout}", KEYS * self._row).prepare(_LSE_FORMAT, overlaps=True)
        self._scores_many = function(f"scores_many_{layout}", TILES[-1] * _HEADS * self._row).prepare(
            _LSE_FORMAT, overlaps=True
        )
        self._lse_one = function(f"lse_one_{layout}", 0).prepare(_LSE_FORMAT, overlaps=True)
        self._scores_one = function(f"scores_one_{layout}", 0).prepare(_LSE_FORMAT, overlaps=True)
        self._choose = function("choose_blocks", 0).prepare(_CHOOSE_FORMAT, overlaps=True)

    def __call__(self, args: DecodeSelection, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one selection."""
        plan, batch = args.plan, args.batch
        kv_heads, block = args.arena.kv_heads, (_THREADS, 1, 1)
        select = _pack_select(args, plan, 0)
        packed = (*batch.pack(), *args.arena.pack(args.layer), *select)
        if batch.tokens == 1 and batch.tree_masks is None:
            for kernel, parts in ((self._lse_one, plan.lse_parts), (self._scores_one, plan.score_parts)):
                kernel.prepared_async_call((parts, kv_heads, batch.sequences), block, stream, *packed)
            return
        many = batch.tokens >= MANY
        for kernel, parts in (
            (self._lse_many if many else self._lse, plan.lse_parts),
            (self._scores_many if many else self._scores, plan.score_parts),
        ):
            # A thread block keeps a multiprocessor for itself; of many tokens two share one.
            tile = tile_of(
                tokens=batch.tokens,
                parts=parts * batch.sequences,
                kv_heads=kv_heads,
                at_once=(2 if many else 1) * self._multiprocessors,
            )
            grid = (parts * ceil_div(batch.tokens, tile), kv_heads, batch.sequences)
            arguments = (*batch.pack(), *args.arena.pack(args.layer), *_pack_select(args, plan, tile))
            if many:
                rows = KEYS if kernel is self._lse_many else tile * _HEADS
                block = (_MANY_THREADS, 1, 1)
                kernel.prepared_async_call(grid, block, stream, *arguments, shared_size=rows * self._row)
            else:
                kernel.prepared_async_call(grid, block, stream, *arguments)
        block = (_THREADS, 1, 1)
        self._choose.prepared_async_call((batch.tokens, kv_heads, 1), block, stream, *batch.pack(), *select)


def _pack_select(args: DecodeSelection, plan: SelectionPlan, tile: int) -> tuple[float, ...]:
    """The kernels' `Select` struct, in the order of `_SELECT`."""
    return (
        args.q.pointer,
        0 if args.node_fine is None else args.node_fine.pointer,
        0 if args.node_coarse is None else args.node_coarse.pointer,
        args.workspace.pointer,
        args.workspace.pointer + plan.lse_bytes,
        args.workspace.pointer + plan.lse_bytes + plan.scores_bytes,
        args.workspace.pointer + plan.lse_bytes + plan.scores_bytes + plan.first_bytes,
        args.arrived.pointer,
        args.blocks.pointer,
        args.counts.pointer,
        softmax_scale(args.scale, args.arena.head_dim) * _LOG2E,
        args.q.shape[1],
        args.arena.kv_heads,
        plan.lse_parts + (0 if args.batch.tree_masks is None else 1),
        args.rule.init_blocks,
        args.rule.local,
        args.rule.total,
        args.rule.dense_below,
        1 if args.rule.lse == "exact" else 0,
        plan.score_stride,
        tile,
        0,
    )
