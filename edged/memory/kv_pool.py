"""Pages of the KV arena: which are free, and which belong to whom.

A page is a number; the keys and values behind it are the executor's. A sequence is given every page of its worst case
when it is admitted, so that it can never run out later, and its table grows over them as its tokens come. The pages of
one table are consecutive wherever the pool can manage it, because an executor reads consecutive pages as one piece.

A page has as many owners as tables and sessions hold it: a shared prefix is one set of pages. A page without an owner
is free. It is *vacant*, or it is *idle*: its content is still known to the prefix cache and may find a new owner, until
the pool needs the page and takes the one that has been idle for longest.

The pool keeps its vacant pages as runs under both their ends, so that freed neighbours join at once. Allocating looks
at the runs, of which there are at most one more than live tables hold pieces; nothing is done a page at a time in
Python but what concerns the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

PageIds = npt.NDArray[np.int32]

NO_PAGES: PageIds = np.empty(0, np.int32)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_tokens)


class PageTable:
    """The pages of one sequence, in the order of its tokens.

    Attributes:
        promised: Every page the sequence may ever use, int32 [pages of the worst case]; shared ones come first.
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

    Args:
        pages: Pages in the arena; their ids are 0 to ``pages - 1``.
        on_reclaim: Called with an idle page whose content is about to be lost.
    """

    def __init__(self, pages: int, on_reclaim: Callable[[int], None] | None = None) -> None:
        if pages < 1:
            raise ValueError(f"a pool has at least one page, not {pages}")
        self.pages = pages
        self.pages_free = pages
        """Pages that have no owner, idle ones included."""
        self._on_reclaim = on_reclaim
        self._owners = np.zeros(pages, np.int32)
        self._kept = np.zeros(pages, np.bool_)  # the cache knows the page's content
        self._idle: dict[int, None] = {}  # kept pages without an owner, the one idle for longest first
        self._length_at: dict[int, int] = {0: pages}  # first page of a vacant run -> its length
        self._start_before: dict[int, int] = {pages: 0}  # page after a vacant run -> its first page

    @property
    def pages_used(self) -> int:
        """Pages that have an owner."""
        return self.pages - self.pages_free

    @property
    def pages_idle(self) -> int:
        """Free pages whose content the cache still knows."""
        return len(self._idle)

    def can_allocate(self, count: int, shared: PageIds = NO_PAGES) -> bool:
        """Whether a sequence of at most ``count`` pages, ``shared`` among them, can be admitted."""
        if count <= self.pages_free:
            return True  # the shared ones are free or need no room
        free_among_shared = int((self._owners[shared] == 0).sum()) if len(shared) else 0
        return count - len(shared) <= self.pages_free - free_among_shared

    def allocate(self, count: int, shared: PageIds = NO_PAGES) -> PageTable:
        """Promise ``count`` pages to a new sequence; its table is empty until :meth:`append`.

        New pages come from the shortest vacant run that holds them all, else from the longest runs, so that a table is
        made of as few consecutive pieces as there can be.

        Args:
            count: Pages of the worst case.
            shared: Kept pages that the table begins with, which get an owner more.

        Raises:
            ValueError: Fewer pages are free, or ``count`` is below 1; ask :meth:`can_allocate` first.
        """
        if count < 1 or not self.can_allocate(count, shared):
            raise ValueError(f"{count} pages asked for, {self.pages_free} of {self.pages} are free")
        self.share(shared)
        fresh = count - len(shared)
        self._reclaim(fresh - (self.pages_free - len(self._idle)))
        promised = np.empty(count, np.int32)
        promised[: len(shared)] = shared
        done = len(shared)
        while done < count:
            start, length = self._best_run(count - done)
            taken = min(length, count - done)
            self._take_run(start, length, taken)
            promised[done : done + taken] = np.arange(start, start + taken, dtype=np.int32)
            done += taken
        new = promised[len(shared) :]
        assert not self._owners[new].any(), "a vacant run held a page that has an owner"  # noqa: S101
        self._owners[new] = 1
        self.pages_free -= fresh
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
        self.release(table.promised)
        table.promised = table.pages = NO_PAGES

    def keep(self, page: int) -> None:
        """The cache knows the content of ``page`` from now on; the page has an owner."""
        assert self._owners[page], "a page without an owner has no content to keep"  # noqa: S101
        self._kept[page] = True

    def share(self, pages: PageIds) -> None:
        """Give each of ``pages``, whose content the cache knows, an owner more."""
        if not len(pages):
            return
        woken = pages[self._owners[pages] == 0]
        for page in woken.tolist():
            del self._idle[page]
        self._owners[pages] += 1
        self.pages_free -= len(woken)

    def release(self, pages: PageIds) -> None:
        """Take an owner from each of ``pages``; those left without one are idle if the cache knows them, else vacant.

        Args:
            pages: In the order of a sequence: its last page is the first that the pool takes when it needs one,
                because a prefix is of no use without what comes before it.

        Raises:
            ValueError: A page of it is free already.
        """
        if not len(pages):
            return
        owners = self._owners[pages] - 1
        if owners.min() < 0:
            raise ValueError(f"page {pages[int(owners.argmin())]} is freed twice")
        self._owners[pages] = owners
        left = pages[owners == 0]
        kept = self._kept[left]
        for page in reversed(left[kept].tolist()):
            self._idle[page] = None
        self._vacate(left[~kept])
        self.pages_free += len(left)

    def forget_idle(self) -> None:
        """Make every idle page vacant: the cache is emptied."""
        self._reclaim(len(self._idle))

    def owners(self) -> PageIds:
        """How many owners each page has, int32 [pages]."""
        owners: PageIds = self._owners.copy()
        return owners

    def kept(self) -> npt.NDArray[np.bool_]:
        """Whether the cache knows the content of each page, bool [pages]."""
        kept: npt.NDArray[np.bool_] = self._kept.copy()
        return kept

    def check(self) -> None:
        """Hold the pool against its own invariants; for tests and the engine's idle self-check.

        Raises:
            AssertionError: Runs, counts and owners disagree.
        """
        free = np.zeros(self.pages, np.int32)
        for start, length in self._length_at.items():
            if self._start_before.get(start + length) != start:
                raise AssertionError(f"free run {start}+{length} is known by one end only")
            free[start : start + length] += 1
        if len(self._length_at) != len(self._start_before):
            raise AssertionError("a free run is known by one end only")
        idle = np.fromiter(self._idle, np.int32, len(self._idle))
        free[idle] += 1
        if not np.array_equal(free, (self._owners == 0).astype(np.int32)):
            raise AssertionError("free runs, idle pages and owners disagree")
        if not self._kept[idle].all() or self._kept[free.astype(bool)].sum() != len(idle):
            raise AssertionError("a vacant page is kept, or an idle one is not")
        if int(free.sum()) != self.pages_free:
            raise AssertionError(f"pages_free is {self.pages_free}, the owners say otherwise")

    def _reclaim(self, count: int) -> None:
        """Make the ``count`` pages vacant that have been idle for longest."""
        if count <= 0:
            return
        pages: list[int] = []
        while len(pages) < count:
            page = next(iter(self._idle))
            del self._idle[page]
            if self._on_reclaim is not None:
                self._on_reclaim(page)
            pages.append(page)
        lost = np.array(sorted(pages), np.int32)
        self._kept[lost] = False
        self._vacate(lost)

    def _vacate(self, pages: PageIds) -> None:
        """Add pages without owner to the vacant runs."""
        if not len(pages):
            return
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        for piece in np.split(pages, breaks):
            self._give_run(int(piece[0]), len(piece))

    def _best_run(self, count: int) -> tuple[int, int]:
        """Shortest vacant run of at least ``count`` pages, else the longest run: (first page, length)."""
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
        """Cut the first ``taken`` pages off the vacant run that begins at ``start``."""
        del self._length_at[start]
        end = start + length
        if taken < length:
            self._length_at[start + taken] = length - taken
            self._start_before[end] = start + taken
        else:
            del self._start_before[end]

    def _give_run(self, start: int, length: int) -> None:
        """Add a vacant run and join it with its vacant neighbours."""
        end = start + length
        before = self._start_before.pop(start, None)
        if before is not None:
            start = before
        after = self._length_at.pop(end, None)
        if after is not None:
            end += after
        self._length_at[start] = end - start
        self._start_before[end] = start
