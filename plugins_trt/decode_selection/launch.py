"""Launches decode block selection on raw pointers: two kernels for one token, three for several or a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from plugins_trt.arena import Arena
from plugins_trt.contract import KERNEL_DTYPES, Batch, ceil_div, softmax_scale
from plugins_trt.decode_selection.contract import (
    GROUP_KEYS,
    GROUP_LSE_TILES,
    GROUP_SCORE_TILES,
    KEYS,
    MANY,
    TILES,
    WARPS,
    tile_of,
)
from plugins_trt.packed.wide import has_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.decode_selection.contract import DecodeSelection

_SELECT = "PPPPPPPPPPfiiiiiiiiiii"
LSE_FORMAT = Batch.FORMAT + Arena.FORMAT + _SELECT
CHOOSE_FORMAT = Batch.FORMAT + _SELECT
_HEADS = 16
_THREADS, _MANY_THREADS = 32 * WARPS, 256
_LOG2E = 1.4426950408889634


class _Form(NamedTuple):
    """How `lse` or `scores` of several tokens was written, and what suits that form."""

    kernel: Any
    tiles: tuple[int, ...] = TILES  # tokens that a thread block takes
    at_once: int = 1  # thread blocks that share a multiprocessor
    threads: int = _THREADS  # of a thread block
    token_threads: int = 0  # and for each of its tokens
    rows: int = 0  # in shared memory
    token_rows: int = 0  # and for each of its tokens


class DecodeSelector:
    """The kernels of one dtype and head_dim."""

    def __init__(
        self,
        function: Callable[[str, int], Any],
        *,
        dtype: str,
        head_dim: int,
        multiprocessors: int,
        groups: bool = True,
    ) -> None:
        """Finds the kernels.

        Args:
            function: See `registry.Kernels.operator`.
            dtype: Of queries and keys.
            head_dim: Their size.
            multiprocessors: Of the device.
            groups: Take trees by warpgroups where the device has them; tests of the other kernels do not.
        """
        self._multiprocessors = multiprocessors
        layout = f"{KERNEL_DTYPES[dtype]}_d{head_dim}"
        self._row = 2 * head_dim  # bytes of a row in shared memory

        def kernel(name: str, rows: int = 0, *, beside_others: bool = False) -> Any:  # noqa: ANN401
            found = function(f"{name}_{layout}", rows * self._row)
            return found.prepare(LSE_FORMAT, overlaps=True, beside_others=beside_others)

        self._few = _Form(kernel("lse")), _Form(kernel("scores"))
        # A thread block keeps a multiprocessor for itself; of many tokens two share one.
        lse, scores = kernel("lse_many", KEYS), kernel("scores_many", TILES[-1] * _HEADS)
        self._many = (
            _Form(lse, at_once=2, threads=_MANY_THREADS, rows=KEYS),
            _Form(scores, at_once=2, threads=_MANY_THREADS, token_rows=_HEADS),
        )
        self._groups = None
        if groups and has_kernel(function, f"lse_groups_{layout}"):
            lse = kernel("lse_groups", GROUP_KEYS + GROUP_LSE_TILES[-1] * _HEADS, beside_others=True)
            scores = kernel("scores_groups", KEYS + GROUP_SCORE_TILES[-1] * _HEADS, beside_others=True)
            self._groups = (
                _Form(lse, GROUP_LSE_TILES, 2, 0, token_threads=32, rows=GROUP_KEYS, token_rows=_HEADS),
                _Form(scores, GROUP_SCORE_TILES, rows=KEYS, token_rows=_HEADS),
            )
        self._one = kernel("lse_one"), kernel("scores_one")
        self._choose = function("choose_blocks", 0).prepare(CHOOSE_FORMAT, overlaps=True, beside_others=True)

    def __call__(self, args: DecodeSelection, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one selection."""
        plan, batch, tree = args.plan, args.batch, args.batch.tree_masks is not None
        kv_heads, block = args.arena.kv_heads, (_THREADS, 1, 1)
        packed = (*batch.pack(), *args.arena.pack(args.layer))
        if batch.tokens == 1 and not tree:
            for kernel, parts in zip(self._one, (plan.lse_parts, plan.score_parts), strict=True):
                select = pack_select(args, plan.lse_parts, 1)
                kernel.prepared_async_call(
                    (parts, kv_heads, batch.sequences), block, stream, *packed, *select
                )
            return
        forms, lse_parts = self._many if batch.tokens >= MANY else self._few, plan.lse_parts
        if tree and self._groups is not None:
            forms, lse_parts = self._groups, plan.group_lse_parts
        for form, parts in zip(forms, (lse_parts, plan.score_parts), strict=True):
            tile = tile_of(
                tokens=batch.tokens,
                parts=parts * batch.sequences,
                kv_heads=kv_heads,
                at_once=form.at_once * self._multiprocessors,
                tiles=form.tiles,
            )
            form.kernel.prepared_async_call(
                (parts * ceil_div(batch.tokens, tile), kv_heads, batch.sequences),
                (form.threads + form.token_threads * tile, 1, 1),
                stream,
                *packed,
                *pack_select(args, lse_parts, tile),
                shared_size=(form.rows + form.token_rows * tile) * self._row,
            )
        select = pack_select(args, lse_parts, 1)
        self._choose.prepared_async_call((batch.tokens, kv_heads, 1), block, stream, *batch.pack(), *select)


def pack_select(args: DecodeSelection, lse_parts: int, tile: int) -> tuple[float, ...]:
    """The kernels' `Select` struct, in the order of `_SELECT`."""
    plan = args.plan
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
        lse_parts + (0 if args.batch.tree_masks is None else 1),
        args.rule.init_blocks,
        args.rule.local,
        args.rule.total,
        args.rule.dense_below,
        1 if args.rule.lse == "exact" else 0,
        plan.score_stride,
        tile,
        0,
    )
