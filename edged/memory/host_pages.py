"""Host memory for the pages of suspended sequences: fixed at load, copied bit by bit, both ways."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edged.memory.kv_pool import PagePool, PageTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.memory.kv_pool import PageIds

PageBytes = npt.NDArray[np.uint8]


class HostPages:
    """Slots of host memory, each as large as a page of the arena.

    Args:
        slots: How many there are; 0 holds nothing.
        page_bytes: Size of a page, everything that belongs to it included.
        read: Copies pages of the arena to host memory: (page ids int32 [n], uint8 [n, page_bytes]).
        write: Copies them back: (page ids int32 [n], uint8 [n, page_bytes]).
    """

    def __init__(
        self,
        slots: int,
        page_bytes: int,
        read: Callable[[PageIds, PageBytes], None],
        write: Callable[[PageIds, PageBytes], None],
    ) -> None:
        self.slots = slots
        self._read = read
        self._write = write
        self._pool = PagePool(slots) if slots else None
        self._memory: PageBytes = np.empty((slots, page_bytes), np.uint8)
        self._memory.fill(0)  # so that it is really there: nothing is taken from the system later

    @property
    def slots_free(self) -> int:
        """Slots that hold nothing."""
        return 0 if self._pool is None else self._pool.pages_free

    def save(self, pages: PageIds) -> PageTable:
        """Copy pages of the arena here.

        Raises:
            ValueError: Fewer slots are free; ask ``slots_free`` first.
        """
        if self._pool is None:
            raise ValueError("there is no host memory for suspended sequences")
        saved = self._pool.allocate(len(pages))
        for slots, span in _runs(saved.promised):
            self._read(pages[span], self._memory[slots])
        return saved

    def restore(self, saved: PageTable, pages: PageIds) -> None:
        """Copy what was saved into ``pages`` of the arena, as many as were saved, and free the slots."""
        for slots, span in _runs(saved.promised):
            self._write(pages[span], self._memory[slots])
        self.discard(saved)

    def discard(self, saved: PageTable) -> None:
        """Free the slots."""
        assert self._pool is not None, "what was saved lies in the pool"  # noqa: S101
        self._pool.free(saved)

    def check(self) -> None:
        """Hold the slots against their invariants.

        Raises:
            AssertionError: Slots are lost or owned twice.
        """
        if self._pool is not None:
            self._pool.check()


def _runs(slots: PageIds) -> list[tuple[slice, slice]]:
    """Consecutive slots as slices of the memory, each with the slice of the table that it is."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [
        (slice(int(slots[first]), int(slots[first]) + end - first), slice(first, end))
        for first, end in pairwise(cuts)
    ]
