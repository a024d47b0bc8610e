"""Launches `ternary_linear` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div
from plugins_trt.registry import KernelsError
from plugins_trt.ternary_linear.contract import (
    BLOCK_TILES,
    FEW_BYTES,
    FEW_ROWS,
    MAX_SUM_BYTES,
    OCTET,
    WARPS,
    sum_bytes,
)
from plugins_trt.ternary_linear.layout import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.ternary_linear.contract import FewPlan, TernaryLinear, TernaryWiden

_FORMAT = "PPPPPPPqiiiiiiii"
_WIDEN_FORMAT = "PPPiiiiii"
_THREADS = 256
_FEW_THREADS = 32 * WARPS
_SCALE_COUNTS = (0, 1, 2, 4)
_FEW_STAGES = 3
_ROW_PAD = 64
_SMALL_MEMORY = 98 << 10  # that every device gives a thread block
_MANY = {8: (4, 3), 16: (2, 4), 32: (2, 3)}  # rows: blocks of inputs of a stage, stages


def few_bytes(plan: FewPlan, args: TernaryLinear) -> int:
    """Shared memory of a launch that keeps x whole."""
    tiles = ceil_div(args.tiles.shape[0], plan.thread_blocks)
    x = args.rows * (args.tiles.shape[1] * BLOCK * 2 + _ROW_PAD)
    return _ring_bytes(args.scale_count) + x + sum_bytes(tiles, plan.splits, args.rows)


def _ring_bytes(scale_count: int) -> int:
    return WARPS * _FEW_STAGES * 2 * (512 + 32 * scale_count)


def many_bytes(rows: int, scale_count: int) -> int:
    """Shared memory of a launch that streams x, of a kernel of so many rows."""
    blocks, stages = _MANY[rows]
    return stages * blocks * (rows * BLOCK * 2 + BLOCK_TILES * (512 + 32 * max(1, scale_count)))


class TernaryMultiplier:
    """The kernels of one dtype on one device."""

    def __init__(self, function: Callable[[str, int], Any], *, multiprocessors: int, dtype: str) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`).

        Args:
            function: the finder.
            multiprocessors: of the device.
            dtype: "float16" or "bfloat16".
        """
        self.multiprocessors = multiprocessors
        suffix = KERNEL_DTYPES[dtype]

        def find(name: str, shared: int) -> Any:  # noqa: ANN401 -- a kernel
            return function(f"ternary_{name}", shared).prepare(_FORMAT, overlaps=True, beside_others=True)

        self._few_memory = _ring_bytes(max(_SCALE_COUNTS)) + FEW_BYTES + FEW_ROWS * _ROW_PAD + MAX_SUM_BYTES
        try:
            self._few = self._find_few(find, suffix)
        except KernelsError:  # a small device: x must be smaller
            self._few_memory = _SMALL_MEMORY
            self._few = self._find_few(find, suffix)
        self._many = {
            (rows, fine): find(
                f"many_{suffix}_n{rows}{'_fine' if fine else ''}",
                many_bytes(rows, max(_SCALE_COUNTS) if fine else 1),
            )
            for rows in _MANY
            for fine in (False, True)
        }
        self._reduce = find(f"reduce_{suffix}", 0)

    def __call__(self, args: TernaryLinear, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one product.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        plan = args.plan(self.multiprocessors)
        few = plan.few
        shared = few_bytes(few, args) if few is not None else 0
        if few is not None and shared <= self._few_memory:
            self._few[args.scale_count, args.rows].prepared_async_call(
                (few.thread_blocks, 1, 1),
                (_FEW_THREADS, 1, 1),
                stream,
                *_pack(args, few.splits.bit_length() - 1),
                shared_size=shared,
            )
            return
        block, tiles, splits = (_THREADS, 1, 1), args.tiles.shape[0], plan.splits
        rows = next((rows for rows in _MANY if args.rows <= rows), max(_MANY))
        kernel = self._many[rows, args.scale_count > 1]
        grid = (ceil_div(tiles, BLOCK_TILES) * ceil_div(args.rows, rows), splits, 1)
        shared = many_bytes(rows, args.scale_count)
        packed = _pack(args, splits)
        kernel.prepared_async_call(grid, block, stream, *packed, shared_size=shared)
        if splits > 1:
            grid = (ceil_div(args.out.shape[1], _THREADS), args.rows, 1)
            self._reduce.prepared_async_call(grid, block, stream, *packed)

    def _find_few(self, find: Callable[[str, int], Any], suffix: str) -> dict[tuple[int, int], Any]:
        return {
            (count, rows): find(f"few_{suffix}_s{count}_n{rows}", self._few_memory)
            for count in _SCALE_COUNTS
            for rows in range(1, FEW_ROWS + 1)
        }


def _pack(args: TernaryLinear, splits: int) -> tuple[int, ...]:
    """The kernels' `Linear` struct, in the order of `_FORMAT`."""
    return (
        args.x.pointer,
        args.tiles.pointer,
        args.scales.pointer,
        args.out.pointer,
        0 if args.bias is None else args.bias.pointer,
        0 if args.residual is None else args.residual.pointer,
        0 if args.workspace is None else args.workspace.pointer,
        args.row_stride,
        args.rows,
        args.inputs,
        args.tiles.shape[1],
        args.tiles.shape[0],
        args.out.shape[1],
        args.scale_count,
        splits,
        int(args.gated),
    )


class TernaryWidener:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        name = f"ternary_widen_{KERNEL_DTYPES[dtype]}"
        self._kernel = function(name, 0).prepare(_WIDEN_FORMAT, overlaps=True)

    def __call__(self, args: TernaryWiden, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        grid = (ceil_div(args.tiles.shape[1], _THREADS // 32), ceil_div(args.rows, OCTET), 1)
        self._kernel.prepared_async_call(grid, (_THREADS, 1, 1), stream, *_pack_widen(args))


def _pack_widen(args: TernaryWiden) -> tuple[int, ...]:
    """The kernel's `Widen` struct, in the order of `_WIDEN_FORMAT`."""
    return (
        args.tiles.pointer,
        args.scales.pointer,
        args.out.pointer,
        args.inputs,
        args.tiles.shape[1],
        args.scale_count,
        args.first // OCTET,
        args.rows,
        args.outputs // 2 // OCTET if args.gated else 0,
    )
