"""Launches `w4a16_linear` on raw pointers: one kernel for up to 16 rows, one or two for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div
from plugins_trt.w4a16_linear.contract import BLOCK_TILES, FEW_ROWS
from plugins_trt.w4a16_linear.layout import STEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.w4a16_linear.contract import LinearPlan, W4A16Linear

_FORMAT = "PPPPPPPqiiiiii"
_THREADS = 256
_FEW_BYTES = 4 * _THREADS * (32 + 16)  # stages of words and of scales
_FEW_STATIC = 2 * 8 * FEW_ROWS * 16 * 4
_RESERVED = 1024  # of each thread block, by the system
_MANY_BYTES = {
    32: 4 * (32 * 256 + _THREADS * (32 + 16)),  # stages of x, words and scales
    64: 3 * (64 * 256 + _THREADS * (32 + 16)),
}


class W4A16Multiplier:
    """The kernels of one dtype on one device."""

    def __init__(
        self, function: Callable[[str, int], Any], *, multiprocessors: int, shared_bytes: int, dtype: str
    ) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`).

        Args:
            function: the finder.
            multiprocessors: of the device.
            shared_bytes: shared memory that one block may ask for, nearly all that a multiprocessor has.
            dtype: "float16" or "bfloat16".
        """
        self.multiprocessors = multiprocessors
        blocks = shared_bytes // (_FEW_BYTES + _FEW_STATIC + _RESERVED)
        self._few_blocks = multiprocessors * max(1, min(2, blocks))
        suffix = KERNEL_DTYPES[dtype]

        def find(name: str, shared: int) -> Any:  # noqa: ANN401 -- a kernel
            return function(name, shared).prepare(_FORMAT, overlaps=True)

        self._few, self._many, self._reduce = {}, {}, {}
        for gated in (False, True):
            name = "w4a16_gated" if gated else "w4a16"
            for rows in (8, 16):
                self._few[rows, gated] = find(f"{name}_few_{suffix}_n{rows}", _FEW_BYTES)
            for rows, shared in _MANY_BYTES.items():
                self._many[rows, gated] = find(f"{name}_many_{suffix}_n{rows}", shared)
            self._reduce[gated] = find(f"{name}_reduce_{suffix}", 0)

    def __call__(self, args: W4A16Linear, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one product.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        plan = args.plan(self.multiprocessors)
        packed, block = _pack(args, plan), (_THREADS, 1, 1)
        tiles = args.tiles.shape[0]
        if args.rows <= FEW_ROWS:
            kernel = self._few[8 if args.rows <= 8 else 16, args.gated]
            # As many thread blocks as there are rounds of tiles for all of them.
            blocks = ceil_div(tiles, ceil_div(tiles, self._few_blocks))
            kernel.prepared_async_call((blocks, 1, 1), block, stream, *packed, shared_size=_FEW_BYTES)
            return
        rows = 32 if args.rows <= 32 else 64
        grid = (ceil_div(tiles, BLOCK_TILES), plan.splits, 1)
        kernel = self._many[rows, args.gated]
        kernel.prepared_async_call(grid, block, stream, *packed, shared_size=_MANY_BYTES[rows])
        if plan.splits > 1:
            grid = (ceil_div(args.out.shape[1], _THREADS), args.rows, 1)
            self._reduce[args.gated].prepared_async_call(grid, block, stream, *packed)


def _pack(args: W4A16Linear, plan: LinearPlan) -> tuple[int, ...]:
    """The kernels' `Linear` struct, in the order of `_FORMAT`."""
    return (
        args.x.pointer,
        args.tiles.pointer,
        args.groups.pointer,
        args.out.pointer,
        0 if args.bias is None else args.bias.pointer,
        0 if args.residual is None else args.residual.pointer,
        0 if args.workspace is None else args.workspace.pointer,
        args.row_stride,
        args.rows,
        args.inputs // STEP,
        args.tiles.shape[0],
        args.out.shape[1],
        (args.group // STEP).bit_length() - 1,
        plan.splits,
    )
