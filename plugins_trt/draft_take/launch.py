"""Launches `draft_take` on raw pointers."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from plugins_trt.draft_take.contract import ROWS, DraftTake

if TYPE_CHECKING:
    from collections.abc import Callable


class DraftTaker:
    """The kernel."""

    def __init__(self, function: Callable[[str, int], Any]) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function("draft_take", 0).prepare(len(fields(DraftTake)) * "P", overlaps=True)

    def __call__(self, args: DraftTake, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        pointers = (getattr(args, each.name).pointer for each in fields(args))
        self._kernel.prepared_async_call((1, 1, 1), (ROWS, 1, 1), stream, *pointers)
