"""What requests say about single tokens, on its way to the device's sampler, and the log probabilities that come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.executor.host_sampler import HostSampler
from plugins_trt.sample.rows import LOGPROBS, RowWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edged.executor.base import Int32Array, SamplingRow
    from edged.executor.cuda_device import Words
    from edged.memory.specs import BufferSpec

NAMES = ("sample_rows", "sample_entries", "sample_masks")
"""The buffers that are written here and copied to the device, all of one step before its draw."""


class DeviceOptions:
    """Host memory for the options of a step's rows.

    Args:
        specs: The plan's buffers, among which are those of :func:`edged.memory.sample_buffers.sample_buffers`.
        host_words: Makes memory that the device's copies use directly.
    """

    def __init__(self, specs: Sequence[BufferSpec], host_words: Callable[[int], Words]) -> None:
        shapes = {spec.name: spec.shape for spec in specs}

        def words(name: str) -> Words:
            return host_words(int(np.prod(shapes[name]))).reshape(shapes[name])

        self._words = {name: words(name) for name in NAMES}
        self.logprobs = words("sample_logprobs").reshape(-1)
        """Where ``sample_logprobs`` is copied after a draw, int32, flat."""
        self._writer = RowWriter(*(self._words[name] for name in NAMES))
        self._taken: list[tuple[int, int, HostSampler]] = []

    def write(self, places: Int32Array, sampling: Sequence[SamplingRow]) -> bool:
        """Write the options of all rows that have some, as far as there is room.

        Masks are waited for: the device should be busy with the step by now.

        Args:
            places: Rows of logits.
            sampling: How each is drawn.

        Returns:
            Whether any row has options here.
        """
        self._taken = []
        self._writer.clear()
        for index, (place, row) in enumerate(zip(places.tolist(), sampling, strict=True)):
            if isinstance(row.host, HostSampler):
                terms = row.host.terms()
                if self._writer.room(terms):
                    self._writer.write(place, terms)
                    self._taken.append((index, place, row.host))
        return bool(self._taken)

    def parts(self) -> Iterator[tuple[str, Words]]:
        """The buffers' names, and what of them has to be copied to their starts."""
        used = {"sample_entries": self._writer.entries, "sample_masks": self._writer.masks}
        for name, words in self._words.items():
            part = words[: used.get(name, len(words))]
            if len(part):
                yield name, part.reshape(-1)

    def finish(self, drawn: Int32Array) -> set[int]:
        """Tell the samplers of the tokens that were drawn.

        Args:
            drawn: One a row of sampling.

        Returns:
            The rows that were drawn so; the host has to draw the others that are not simple.
        """
        records = self.logprobs.view(LOGPROBS)
        for index, place, sampler in self._taken:
            sampler.note(int(drawn[index]), records[place])
        return {index for index, _, _ in self._taken}
