"""Launches `sample` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.sample.contract import Sample

_THREADS = 1024
_SHARED = 58 * 1024


class Sampler:
    """The kernel."""

    def __init__(self, function: Callable[[str, int], Any]) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`)."""
        self._kernel = function("sample_f32", _SHARED).prepare("PPPPPPqii", overlaps=True)

    def __call__(self, args: Sample, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        rows, vocabulary = args.logits.shape
        self._kernel.prepared_async_call(
            (rows, 1, 1),
            (_THREADS, 1, 1),
            stream,
            args.logits.pointer,
            args.temperatures.pointer,
            args.top_ks.pointer,
            args.top_ps.pointer,
            args.numbers.pointer,
            args.ids.pointer,
            vocabulary,
            vocabulary,
            0,
            shared_size=_SHARED,
        )
