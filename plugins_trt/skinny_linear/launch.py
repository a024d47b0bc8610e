"""Launches `skinny_linear` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES
from plugins_trt.skinny_linear.contract import grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.skinny_linear.contract import SkinnyLinear

_FORMAT = "PPPPqfiiiii"
_THREADS = 256
_STAGES = 8
_STAGE_BYTES = _THREADS * 32
_BLOCKS = 2
_BLOCK_BYTES = _STAGES * _STAGE_BYTES + 17 * 1024  # with what is static, and a reserve of the system


class SkinnyLinearMultiplier:
    """The kernels of one dtype on one device."""

    def __init__(
        self,
        function: Callable[[str, int], Any],
        *,
        multiprocessors: int,
        shared_bytes: int,
        dtype: str,
        blocks: int = _BLOCKS,
    ) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`).

        Args:
            function: the finder.
            multiprocessors: of the device.
            shared_bytes: shared memory that one block may ask for, nearly all that a multiprocessor has.
            dtype: "float16" or "bfloat16".
            blocks: thread blocks that share a multiprocessor, where their memory allows it.
        """
        self._thread_blocks = max(1, min(blocks, shared_bytes // _BLOCK_BYTES)) * multiprocessors
        self._shared = _STAGES * _STAGE_BYTES
        name = KERNEL_DTYPES[dtype]
        self._kernels = {
            (tiles, wide): function(
                f"skinny_linear_{name}_{'f32' if wide else name}_n{8 * tiles}", self._shared
            ).prepare(_FORMAT, overlaps=True)
            for tiles in (1, 2)
            for wide in (False, True)
        }

    def __call__(self, args: SkinnyLinear, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        rows, inputs = args.x.shape
        outputs = args.weight.shape[0]
        self._kernels[1 if rows <= 8 else 2, args.wide].prepared_async_call(
            (grid(outputs, self._thread_blocks), 1, 1),
            (_THREADS, 1, 1),
            stream,
            args.x.pointer,
            args.weight.pointer,
            args.out.pointer,
            0 if args.bias is None else args.bias.pointer,
            args.row_stride,
            args.scale,
            rows,
            inputs,
            outputs,
            0,
            0,
            shared_size=self._shared,
        )
