"""Pages of the KV arena: which are free, and which belong to whom.

A page is a number; the keys and values behind it are the executor's. A sequence is given every page of its worst case
when it is admitted, so that it can never run out later, and its table grows over them as its tokens come. The pages of
one table are consecutive wherever the pool can manage it, because an executor reads consecutive pages as one piece.

The pool keeps its free pages as runs under both their ends, so that freed neighbours join at once. Allocating looks at
the runs, of which there are at most one more than live tables hold pieces; nothing is ever done a page at a time in
Python.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int32]


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_tokens)


class PageTable:
    """The pages of one sequence, in the order of its tokens.

    Attributes:
        promised: Every page the sequence may ever use, int32 [pages of the worst case].
        pages: The part in use, a view of ``promised``.
    """

    __slots__ = ("pages", "promised")

    def __init__(self, promised: PageIds) -> None:
        self.promised = promised
        self.pages = promised[:0]

    def __len__(self) -> int:
        return len(self.pages)


class PagePool:
    """All pages of one model.

    A page is free or has one owner. Ownership is a count, so that pages of a shared prefix can get a second owner:
    a page returns to the free runs when its count falls to zero.

    Args:
        pages: Pages in the arena; their ids are 0 to ``pages - 1``.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a pool has at least one page, not {pages}")
        self.pages = pages
        self.pages_free = pages
        self._owners = np.zeros(pages, np.int32)
        self._length_at: dict[int, int] = {0: pages}  # first page of a free run -> its length
        self._start_before: dict[int, int] = {pages: 0}  # page after a free run -> its first page

    @property
    def pages_used(self) -> int:
        """Pages that are promised to a sequence."""
        return self.pages - self.pages_free

    def can_allocate(self, count: int) -> bool:
        """Whether a sequence of at most ``count`` pages can be admitted."""
        return count <= self.pages_free

    def allocate(self, count: int) -> PageTable:
        """Promise ``count`` pages to a new sequence; its table is empty until :meth:`append`.

        They come from the shortest free run that holds them all, else from the longest runs, so that a table is made of
        as few consecutive pieces as there can be.

        Raises:
            ValueError: Fewer pages are free, or ``count`` is below 1; ask :meth:`can_allocate` first.
        """
        if not 1 <= count <= self.pages_free:
            raise ValueError(f"{count} pages asked for, {self.pages_free} of {self.pages} are free")
        promised = np.empty(count, np.int32)
        done = 0
        while done < count:
            start, length = self._best_run(count - done)
            taken = min(length, count - done)
            self._take_run(start, length, taken)
            promised[done : done + taken] = np.arange(start, start + taken, dtype=np.int32)
            done += taken
        assert not self._owners[promised].any(), "a free run held a page that has an owner"  # noqa: S101
        self._owners[promised] = 1
        self.pages_free -= count
        return PageTable(promised)

    def append(self, table: PageTable, count: int) -> None:
        """Grow ``table`` to ``count`` pages in use, out of what was promised to it.

        Raises:
            ValueError: The table was promised fewer pages.
        """
        if count > len(table.promised):
            raise ValueError(f"{count} pages needed, the sequence was promised {len(table.promised)}")
        if count > len(table.pages):
            table.pages = table.promised[:count]

    def free(self, table: PageTable) -> None:
        """Take back every page promised to ``table``; it is empty afterwards.

        Raises:
            ValueError: A page of it is free already.
        """
        promised = table.promised
        if not len(promised):
            return
        owners = self._owners[promised] - 1
        if owners.min() < 0:
            raise ValueError(f"page {promised[int(owners.argmin())]} is freed twice")
        self._owners[promised] = owners
        breaks = np.flatnonzero(np.diff(promised) != 1) + 1
        for piece in np.split(promised, breaks):
            self._give_run(int(piece[0]), len(piece))
        self.pages_free += len(promised)
        table.promised = table.pages = promised[:0]

    def check(self) -> None:
        """Hold the pool against its own invariants; for tests and the engine's idle self-check.

        Raises:
            AssertionError: Runs, counts and owners disagree.
        """
        free = np.ones(self.pages, np.int32)
        for start, length in self._length_at.items():
            if self._start_before.get(start + length) != start:
                raise AssertionError(f"free run {start}+{length} is known by one end only")
            free[start : start + length] -= 1
        if len(self._length_at) != len(self._start_before):
            raise AssertionError("a free run is known by one end only")
        if not np.array_equal(free, (self._owners > 0).astype(np.int32)):
            raise AssertionError("free runs and owners disagree")
        if int((self._owners == 0).sum()) != self.pages_free:
            raise AssertionError(f"pages_free is {self.pages_free}, the owners say otherwise")

    def _best_run(self, count: int) -> tuple[int, int]:
        """Shortest free run of at least ``count`` pages, else the longest run: (first page, length)."""
        best = (-1, 0)
        for run in self._length_at.items():
            length, found = run[1], best[1]
            better = length > found if found < count else count <= length < found
            if better:
                best = run
                if length == count:
                    break
        return best

    def _take_run(self, start: int, length: int, taken: int) -> None:
        """Cut the first ``taken`` pages off the free run that begins at ``start``."""
        del self._length_at[start]
        end = start + length
        if taken < length:
            self._length_at[start + taken] = length - taken
            self._start_before[end] = start + taken
        else:
            del self._start_before[end]

    def _give_run(self, start: int, length: int) -> None:
        """Add a free run and join it with its free neighbours."""
        end = start + length
        before = self._start_before.pop(start, None)
        if before is not None:
            start = before
        after = self._length_at.pop(end, None)
        if after is not None:
            end += after
        self._length_at[start] = end - start
        self._start_before[end] = start
