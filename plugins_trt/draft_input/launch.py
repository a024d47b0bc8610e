"""Launches `draft_input` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.draft_input.contract import DraftInput

_THREADS = 256


class DraftInputWriter:
    """The kernel of one dtype."""

    def __init__(self, function: Callable[[str, int], Any], *, dtype: str) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function(f"draft_input_{KERNEL_DTYPES[dtype]}", 0).prepare(
            "PPPPPPPPPPffiiii", overlaps=True
        )

    def __call__(self, args: DraftInput, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        rows, kv_heads, total = args.blocks.shape
        self._kernel.prepared_async_call(
            (rows, 1, 1),
            (_THREADS, 1, 1),
            stream,
            args.embedding.pointer,
            args.token_ids.pointer,
            args.hidden.pointer,
            args.hidden_rows.pointer,
            args.positions.pointer,
            args.out.pointer,
            args.blocks.pointer,
            args.counts.pointer,
            0 if args.embedding_norm is None else args.embedding_norm.pointer,
            0 if args.hidden_norm is None else args.hidden_norm.pointer,
            args.scale,
            args.epsilon,
            args.embedding.shape[1],
            kv_heads,
            total,
            0,
        )
