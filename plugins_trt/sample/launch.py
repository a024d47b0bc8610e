"""Launches `sample` on raw pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.contract import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.sample.contract import Sample

_THREADS = 256
_SHARED = 13 * 1024
_RESIDENT = {9: 3}
"""Thread blocks that a multiprocessor holds at once, by the major compute capability: 2 where it does not say."""
_MOST_BLOCKS = 32
_LEAST_TOKENS = 1024
"""Of a thread block: for fewer, meeting the others costs more than it saves."""


def row_blocks(rows: int, vocabulary: int, resident: int) -> int:
    """Thread blocks of a row. Where there are several, all of the launch must be resident: they wait for each other.

    Args:
        rows: Of the launch.
        vocabulary: Tokens of a row.
        resident: Thread blocks that the device holds at once.
    """
    return max(1, min(_MOST_BLOCKS, resident // rows, ceil_div(vocabulary, _LEAST_TOKENS)))


class Sampler:
    """The kernel."""

    def __init__(
        self, function: Callable[[str, int], Any], *, multiprocessors: int, capability: tuple[int, int]
    ) -> None:
        """Finds the kernel with `function` (see `registry.Kernels.operator`), for a device of so many multiprocessors."""
        self._kernel = function("sample_f32", _SHARED).prepare("PPPPPPPPPPPPqiiii", overlaps=True)
        self._resident = _RESIDENT.get(capability[0], 2) * multiprocessors

    def __call__(self, args: Sample, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one launch."""
        rows, vocabulary = args.logits.shape
        options = args.options
        extra = (0, 0, 0, 0, 0)
        if options is not None:
            extra = (
                options.rows.pointer,
                options.entries.pointer,
                options.raw.pointer,
                options.masks.pointer,
                options.logprobs.pointer,
            )
        self._kernel.prepared_async_call(
            (row_blocks(rows, vocabulary, self._resident), rows, 1),
            (_THREADS, 1, 1),
            stream,
            args.logits.pointer,
            args.temperatures.pointer,
            args.top_ks.pointer,
            args.top_ps.pointer,
            args.numbers.pointer,
            args.ids.pointer,
            args.workspace.pointer,
            *extra,
            vocabulary,
            vocabulary,
            0 if options is None else options.masks.shape[1],
            args.largest_known,
            0,
            shared_size=_SHARED,
        )
