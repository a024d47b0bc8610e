"""Launches `ternary_linear` on raw pointers."""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div
from plugins_trt.packed.cut import Chooser, Cut, Wide
from plugins_trt.packed.product import OCTET
from plugins_trt.packed.wide import arguments_format, has_kernel, maps_of
from plugins_trt.registry import KernelsError
from plugins_trt.ternary_linear.contract import (
    BLOCK_TILES,
    FEW_BYTES,
    FEW_ROWS,
    MAX_SUM_BYTES,
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
_REDUCERS = 64
_OF_A_REDUCER = 4  # outputs
_FEW_THREADS = 32 * WARPS
_SCALE_COUNTS = (0, 1, 2, 4)
_FEW_STAGES = 3
_ROW_PAD = 64
_SMALL_MEMORY = 98 << 10  # that every device gives a thread block
_MANY = {8: (4, 3), 16: (2, 4), 32: (2, 3)}  # rows: blocks of inputs of a stage, stages
WIDE = (
    Wide(16, 4, 9),
    Wide(16, 3, 11),
    Wide(16, 2, 13),
    Wide(32, 4, 7),
    Wide(32, 3, 8),
    Wide(32, 2, 9),
    Wide(64, 4, 5),
    Wide(64, 3, 5),
    Wide(64, 2, 6),
)
_WIDE_FORMAT = arguments_format(_FORMAT, struct.calcsize(_FORMAT))
_WIDE_ROWS = 9
"""From here on, warpgroups pay where the device has them: of up to 16 rows where outputs are many."""


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


def wide_bytes(kind: Wide, *, fine: bool) -> int:
    """Shared memory of a kernel of packed/wide.cuh."""
    return kind.shared_bytes(BLOCK, 1, 32 * (max(_SCALE_COUNTS) if fine else 1))


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
        has_wide = has_kernel(function, f"ternary_wide_{suffix}_{WIDE[0].name}")
        self._wide = {
            (kind, fine): function(
                f"ternary_wide_{suffix}_{kind.name}{'_fine' if fine else ''}", wide_bytes(kind, fine=fine)
            ).prepare(_WIDE_FORMAT, overlaps=True, beside_others=True, aligned=True)
            for kind in WIDE
            for fine in (False, True)
            if has_wide
        }
        self._cut = {
            fine: Chooser(WIDE if has_wide else (), multiprocessors, partial(self._at_once, fine))
            for fine in (False, True)
        }

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
        wide = self.wide_of(args)
        if wide is not None:
            self._launch_wide(args, wide, stream)
            return
        block, tiles, splits = (_THREADS, 1, 1), args.tiles.shape[0], plan.splits
        rows = next((rows for rows in _MANY if args.rows <= rows), max(_MANY))
        kernel = self._many[rows, args.scale_count > 1]
        grid = (ceil_div(tiles, BLOCK_TILES) * ceil_div(args.rows, rows), splits, 1)
        shared = many_bytes(rows, args.scale_count)
        packed = _pack(args, splits)
        kernel.prepared_async_call(grid, block, stream, *packed, shared_size=shared)
        if splits > 1:
            self._add_up(args, packed, stream)

    def wide_of(self, args: TernaryLinear) -> Cut | None:
        """How a product is cut for the kernels of packed/wide.cuh, where they take it."""
        if not _WIDE_ROWS <= args.rows <= max(kind.rows for kind in WIDE):
            return None
        if args.rows <= WIDE[0].rows and (
            args.scale_count > 1 or args.tiles.shape[0] < 2 * self.multiprocessors
        ):
            return None
        return self._cut[args.scale_count > 1](args.rows, args.tiles.shape[0], args.tiles.shape[1])

    def _at_once(self, fine: bool, kind: Wide, size: int) -> int:
        """Clusters of so many thread blocks that run at the same time."""
        shared = wide_bytes(kind, fine=fine)
        found: int = self._wide[kind, fine].clusters_at_once(kind.threads, shared, size)
        return found

    def _launch_wide(self, args: TernaryLinear, cut: Cut, stream: Any) -> None:  # noqa: ANN401
        kind, fine = cut.kind, args.scale_count > 1
        maps = maps_of(kind, (args.x, args.row_stride), (args.tiles, args.scales), (1, 1))
        packed = _pack(args, cut.shares, in_clusters=cut.in_clusters)
        self._wide[kind, fine].prepared_async_call(
            (cut.blocks, cut.shares, 1),
            (kind.threads, 1, 1),
            stream,
            *maps,
            *packed,
            shared_size=wide_bytes(kind, fine=fine),
            cluster=(1, cut.cluster, 1),
        )
        if cut.is_added_up_after:
            self._add_up(args, packed, stream)

    def _add_up(self, args: TernaryLinear, packed: tuple[int, ...], stream: Any) -> None:  # noqa: ANN401
        """Enqueues the sum of the shares of the inputs that lie in the workspace."""
        grid = (ceil_div(args.out.shape[1], _OF_A_REDUCER * _REDUCERS), args.rows, 1)
        self._reduce.prepared_async_call(grid, (_REDUCERS, 1, 1), stream, *packed)

    def _find_few(self, find: Callable[[str, int], Any], suffix: str) -> dict[tuple[int, int], Any]:
        return {
            (count, rows): find(f"few_{suffix}_s{count}_n{rows}", self._few_memory)
            for count in _SCALE_COUNTS
            for rows in range(1, FEW_ROWS + 1)
        }


def _pack(args: TernaryLinear, splits: int, *, in_clusters: bool = False) -> tuple[int, ...]:
    """The kernels' `Linear` struct, in the order of `_FORMAT`; clusters that add up shares have no workspace."""
    return (
        *args.pointers(args.scales, in_clusters=in_clusters),
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
    first, gate = args.octets
    return (
        args.tiles.pointer,
        args.scales.pointer,
        args.out.pointer,
        args.inputs,
        args.tiles.shape[1],
        args.scale_count,
        first,
        args.rows,
        gate,
    )
