"""Launches decode attention on raw pointers: the parts of the context, then their combination."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from plugins_trt.arena import Arena
from plugins_trt.contract import KERNEL_DTYPES, Batch, ceil_div, kernel_suffix, softmax_scale
from plugins_trt.decode_attention.wide import WideLauncher

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.decode_attention.contract import AttentionPlan, DecodeAttention

_ATTEND = "PPPPPPf" + 13 * "i"
_COMBINE_FORMAT = Batch.FORMAT + _ATTEND
_FEW_PARTS = 32
_COMBINE_THREADS = 256


class _Form(NamedTuple):
    """How the narrow kernel was instantiated in narrow.cu, and what suits that form."""

    warps: int  # of a thread block
    stages: int  # 16-key units that a warp has in shared memory
    least_units: int  # that a thread block takes at least before the context is cut further
    quantized: bool = False

    def shared_bytes(self, head_dim: int) -> int:
        """Of a thread block: keys and values of 16 tokens a stage, and the scales of those in eight bits."""
        row = head_dim + 2 if self.quantized else 2 * head_dim
        return self.warps * self.stages * 2 * 16 * row


_NARROW = {64: _Form(4, 4, 12), 128: _Form(4, 3, 12)}
_ONE = _Form(8, 2, 8)
_MANY = {64: _Form(4, 4, 12), 128: _Form(4, 2, 12)}
_MANY_TOKENS = 32
_MANY_BLOCKS = 3  # on a multiprocessor
_MANY_SHARED_BYTES = 200 << 10  # that a thread block may ask for, where a multiprocessor has room for those
_QUANTIZED = _Form(8, 3, 8, quantized=True)
_LOG2E = 1.4426950408889634


class DecodeAttender:
    """The kernels of one dtype and head_dim on one device."""

    def __init__(
        self,
        function: Callable[[str, int], Any],
        *,
        multiprocessors: int,
        shared_bytes: int,
        dtype: str,
        head_dim: int,
        kv_dtype: str | None = None,
    ) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`)."""
        self.multiprocessors = multiprocessors
        layout = f"{KERNEL_DTYPES[dtype]}_d{head_dim}"
        stored = f"{kernel_suffix(dtype, kv_dtype)}_d{head_dim}"
        quantized = kv_dtype is not None
        form = _QUANTIZED if quantized else _NARROW[head_dim]
        arguments = Batch.FORMAT + (Arena.QUANTIZED_FORMAT if quantized else Arena.FORMAT) + _ATTEND
        self._narrow = _Narrow(function, f"narrow_{stored}", head_dim, form, arguments)
        self._narrow_one = self._narrow
        if not quantized and _ONE.shared_bytes(head_dim) <= shared_bytes:
            self._narrow_one = _Narrow(function, f"narrow_one_{stored}", head_dim, _ONE, arguments)
        self._narrow_many: _Narrow | None = None
        if not quantized and shared_bytes >= _MANY_SHARED_BYTES:
            self._narrow_many = _Narrow(
                function, f"narrow_many_{stored}", head_dim, _MANY[head_dim], arguments
            )
        self._wide = WideLauncher(
            function, stored, arguments, head_dim=head_dim, quantized=quantized, shared_bytes=shared_bytes
        )
        self._combine_few = function(f"combine_few_{layout}", 0).prepare(_COMBINE_FORMAT, overlaps=True)
        self._combine_many = function(f"combine_many_{layout}", 0).prepare(_COMBINE_FORMAT, overlaps=True)

    def __call__(
        self,
        args: DecodeAttention,
        stream: Any = None,  # noqa: ANN401 -- PyCUDA is untyped
        *,
        least_units: int | None = None,
    ) -> None:
        """Enqueues one attention.

        Args:
            args: What to attend to.
            stream: None is the default stream.
            least_units: 16-key units that a thread block takes at least before the context is cut further, for
                measurements; None takes what suits the bucket.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        batch, kv_heads = args.batch, args.arena.kv_heads
        bucket = args.bucket(self.multiprocessors)
        wide, plan = self._wide.form_of(
            bucket,
            args.plan(self.multiprocessors),
            dense=args.blocks is None,
            shares=args.local_blocks > 0,
        )
        narrow = self._narrow_one if batch.tokens == 1 and args.blocks is not None else self._narrow
        if self._narrow_many is not None and batch.tokens >= _MANY_TOKENS and args.blocks is not None:
            narrow, plan = self._narrow_many, plan.of_many(bucket, _MANY_BLOCKS)
        if args.all_sparse and not plan.shared_parts:
            # (The kernels see it, too: `narrow` is then the launch behind that of the blocks, and waits before it reads them.)
            plan = replace(plan, wide_tiles=0, wide_parts=0)
        attend = _pack_attend(args, plan, least_units or narrow.least_units, wide.least_pages)
        packed = (*batch.pack(), *args.arena.pack_all(args.layer), *attend)
        if plan.wide_tiles:
            self._wide(wide, plan, kv_heads, stream, packed)
        if plan.narrow_parts:
            narrow((plan.narrow_parts, kv_heads, batch.tokens), stream, packed)
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


def _pack_attend(
    args: DecodeAttention, plan: AttentionPlan, least_units: int, least_pages: int
) -> tuple[float, ...]:
    """The kernels' `Attend` struct, in the order of `_ATTEND`."""
    return (
        args.q.pointer,
        args.out.pointer,
        0 if args.blocks is None else args.blocks.pointer,
        0 if args.counts is None else args.counts.pointer,
        args.workspace.pointer,
        args.workspace.pointer + plan.partial_bytes,
        softmax_scale(args.scale, args.arena.head_dim) * _LOG2E,
        args.heads,
        args.arena.kv_heads,
        0 if args.blocks is None else args.blocks.shape[2],
        args.dense_below,
        plan.parts,
        plan.narrow_parts,
        plan.wide_parts,
        least_units,
        args.init_blocks,
        args.local_blocks,
        plan.shared_parts,
        least_pages,
        0,
    )


class _Narrow:
    """A form of the narrow kernel."""

    def __init__(
        self, function: Callable[[str, int], Any], name: str, head_dim: int, form: _Form, layout: str
    ) -> None:
        self.least_units = form.least_units
        self._bytes = form.shared_bytes(head_dim)
        self._block = (32 * form.warps, 1, 1)
        self._kernel = function(name, self._bytes).prepare(layout, overlaps=True)

    def __call__(self, grid: tuple[int, int, int], stream: Any, packed: tuple[float, ...]) -> None:  # noqa: ANN401
        self._kernel.prepared_async_call(grid, self._block, stream, *packed, shared_size=self._bytes)
