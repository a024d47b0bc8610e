"""Launches `skinny_linear` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES
from plugins_trt.skinny_linear.contract import TILE, grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.skinny_linear.contract import SkinnyGated, SkinnyLinear

_FORMAT = "PPPPqfiiiii"
_THREADS = 256
_STAGES = 6
_STAGE_BYTES = _THREADS * 32
_BLOCKS = 3
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

        def find(kernel: str) -> Any:  # noqa: ANN401 -- a kernel
            return function(kernel, self._shared).prepare(_FORMAT, overlaps=True)

        self._kernels = {
            (tiles, wide): find(f"skinny_linear_{name}_{'f32' if wide else name}_n{8 * tiles}")
            for tiles in (1, 2)
            for wide in (False, True)
        }
        self._gated = {tiles: find(f"skinny_gated_{name}_n{8 * tiles}") for tiles in (1, 2)}

    def __call__(self, args: SkinnyLinear, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        outputs = args.weight.shape[0]
        kernel = self._kernels[1 if args.x.shape[0] <= 8 else 2, args.wide]
        self._launch(kernel, args, stream, outputs=outputs, tile=TILE, scale=args.scale)

    def gated(self, args: SkinnyGated, stream: Any = None) -> None:  # noqa: ANN401
        """Enqueues one launch."""
        kernel = self._gated[1 if args.x.shape[0] <= 8 else 2]
        self._launch(kernel, args, stream, outputs=args.weight.shape[0] // 2, tile=TILE // 2, scale=1.0)

    def _launch(
        self,
        kernel: Any,  # noqa: ANN401
        args: SkinnyLinear | SkinnyGated,
        stream: Any,  # noqa: ANN401
        *,
        outputs: int,
        tile: int,
        scale: float,
    ) -> None:
        rows, inputs = args.x.shape
        kernel.prepared_async_call(
            (grid(outputs, self._thread_blocks, tile), 1, 1),
            (_THREADS, 1, 1),
            stream,
            args.x.pointer,
            args.weight.pointer,
            args.out.pointer,
            0 if args.bias is None else args.bias.pointer,
            args.row_stride,
            scale,
            rows,
            inputs,
            outputs,
            0,
            0,
            shared_size=self._shared,
        )
