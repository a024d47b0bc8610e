"""Launches chunk block selection on raw pointers: three kernels on one stream, no host round trip between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.arena import Pool
from plugins_trt.chunk_selection.contract import (
    SHARE_PAGES,
    ChunkSelection,
    SelectionPlan,
    bitmap_words,
    row_stride,
)
from plugins_trt.contract import KERNEL_DTYPES, Batch, ceil_div, softmax_scale

if TYPE_CHECKING:
    from collections.abc import Callable

_FORMAT = Batch.FORMAT + 2 * Pool.FORMAT + "PPPPq" + 10 * "i" + "fi"
_STAGES, _STAGE_KEYS = 4, 64
_ADDRESS_BYTES = 8  # of a page's compressed keys, in shared memory
_THREADS, _CHOOSE_THREADS = 256, 128
_LOG2E = 1.4426950408889634


class ChunkSelector:
    """The kernels of one layout: dtype, head_dim and query heads a KV head.

    Args:
        function: finds a compiled kernel of this package by name and raises its limit of dynamic shared memory
            to the bytes given; what it returns launches as PyCUDA's functions do.
        multiprocessors: of the device.
        dtype: "float16" or "bfloat16".
        head_dim: 64 or 128.
        group: query heads a KV head, 1 to 16.
    """

    def __init__(
        self,
        function: Callable[[str, int], Any],
        *,
        multiprocessors: int,
        dtype: str,
        head_dim: int,
        group: int,
    ) -> None:
        self.multiprocessors = multiprocessors
        self.stage_bytes = _STAGES * _STAGE_KEYS * head_dim * 2
        layout = f"{KERNEL_DTYPES[dtype]}_{head_dim}_{8 if group <= 8 else 16}"
        most = self.stage_bytes + _ADDRESS_BYTES * (SHARE_PAGES + _STAGE_KEYS)
        self._statistics = {
            lse: function(f"chunk_statistics_{keys}_{layout}", most).prepare(_FORMAT)
            for lse, keys in (("approximate", "coarse"), ("exact", "fine"))
        }
        self._scores = function(f"chunk_scores_{layout}", most).prepare(_FORMAT)
        self._choose = {
            each: function(f"chunk_choose_{each}", 0).prepare(_FORMAT) for each in (4, 16, 32, 64)
        }

    def __call__(self, args: ChunkSelection, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one selection.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        plan = args.plan(self.multiprocessors)
        packed = _pack(args, plan)
        self.enqueue_statistics(args, plan, packed, stream)
        self.enqueue_scores(args, plan, packed, stream)
        self.enqueue_choose(args, packed, stream)

    def enqueue_statistics(
        self,
        args: ChunkSelection,
        plan: SelectionPlan,
        packed: tuple[float, ...],
        stream: Any,  # noqa: ANN401
    ) -> None:
        """First pass: maximum and sum of each softmax."""
        stage_pages = _STAGE_KEYS if args.rule.lse == "approximate" else _STAGE_KEYS // 4
        share = ceil_div(ceil_div(args.batch.max_pages, stage_pages), plan.splits) * stage_pages
        self._statistics[args.rule.lse].prepared_async_call(
            (plan.tiles, args.arena.kv_heads, plan.splits),
            (_THREADS, 1, 1),
            stream,
            *packed,
            shared_size=self.stage_bytes + _ADDRESS_BYTES * min(share, args.batch.max_pages),
        )

    def enqueue_scores(
        self,
        args: ChunkSelection,
        plan: SelectionPlan,
        packed: tuple[float, ...],
        stream: Any,  # noqa: ANN401
    ) -> None:
        """Second pass: the scores of blocks."""
        self._scores.prepared_async_call(
            (plan.tiles, args.arena.kv_heads, plan.page_splits),
            (_THREADS, 1, 1),
            stream,
            *packed,
            shared_size=self.stage_bytes + _ADDRESS_BYTES * (plan.split_pages + _STAGE_KEYS // 4),
        )

    def enqueue_choose(self, args: ChunkSelection, packed: tuple[float, ...], stream: Any) -> None:  # noqa: ANN401
        """Third pass: the best blocks."""
        each = next(each for each in self._choose if each * _CHOOSE_THREADS >= args.batch.max_pages)
        self._choose[each].prepared_async_call(
            (args.batch.tokens, args.arena.kv_heads, 1), (_CHOOSE_THREADS, 1, 1), stream, *packed
        )


def _pack(args: ChunkSelection, plan: SelectionPlan) -> tuple[float, ...]:
    """The kernels' `SelectionArguments`, in the order of `_FORMAT`."""
    return (
        *args.batch.pack(),
        *args.arena.pack(args.layer)[6:12],
        args.q.pointer,
        args.workspace.pointer,
        args.workspace.pointer + plan.sums_bytes,
        args.chosen.pointer,
        row_stride(args.q),
        args.heads,
        args.arena.kv_heads,
        plan.score_stride,
        bitmap_words(args.batch.max_pages),
        plan.splits,
        plan.split_pages,
        args.rule.init_blocks,
        args.rule.local,
        args.rule.total,
        args.rule.dense_below,
        softmax_scale(args.scale, args.arena.head_dim) * _LOG2E,
        0,
    )
