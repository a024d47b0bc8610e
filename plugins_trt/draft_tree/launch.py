"""Launches `draft_top` and `draft_grow` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.draft_tree.contract import DraftGrow, DraftTop

_THREADS = 256


class TreeGrower:
    """Both kernels."""

    def __init__(self, function: Callable[[str, int], Any]) -> None:
        """Finds them with `function` (see `registry.Kernels.operator`)."""
        self._top = function("draft_top", 0).prepare("PPPiiii", overlaps=True)
        self._grow = function("draft_grow", 0).prepare(14 * "P" + "iiiiii", overlaps=True)

    def top(self, args: DraftTop, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues the search for the likeliest tokens."""
        rows, parts, width = args.candidates.shape
        self._top.prepared_async_call(
            (parts, rows, 1),
            (_THREADS, 1, 1),
            stream,
            args.logits.pointer,
            args.candidates.pointer,
            args.statistics.pointer,
            args.logits.shape[1],
            parts,
            width,
            0,
        )

    def grow(self, args: DraftGrow, stream: Any = None) -> None:  # noqa: ANN401
        """Enqueues the growth of one level."""
        rows, parts, width = args.candidates.shape
        self._grow.prepared_async_call(
            (1, 1, 1),
            (32 * rows, 1, 1),
            stream,
            args.candidates.pointer,
            args.statistics.pointer,
            0 if args.token_map is None else args.token_map.pointer,
            args.lengths.pointer,
            args.root_row.pointer,
            args.tokens.pointer,
            args.parents.pointer,
            args.chances.pointer,
            args.joint.pointer,
            args.nodes.pointer,
            args.token_ids.pointer,
            args.hidden_rows.pointer,
            args.positions.pointer,
            args.masks.pointer,
            parts,
            width,
            args.level,
            args.levels,
            args.first_row,
            0,
        )
