"""Launches `verify_tree` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import MAX_TREE, Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.verify_tree.contract import VerifyTree


class TreeVerifier:
    """The kernel."""

    def __init__(self, function: Callable[[str, int], Any]) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function("verify_tree", 0).prepare(Batch.FORMAT + "PPPPP", overlaps=True)

    def __call__(self, args: VerifyTree, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        self._kernel.prepared_async_call(
            (args.batch.sequences, 1, 1),
            (MAX_TREE, 1, 1),
            stream,
            *args.batch.pack(),
            args.token_ids.pointer,
            args.targets.pointer,
            0 if args.given is None else args.given.pointer,
            args.paths.pointer,
            args.accepted.pointer,
        )
