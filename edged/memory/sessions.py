"""Conversations whose pages are pinned: their next turn finds its prefix however busy the cache was meanwhile.

A session owns pages as a sequence does. Together sessions own at most a configured share of the pool; past it the one
that has been quiet for longest is dropped, and its pages are ordinary cached ones again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edged.memory.kv_pool import PageIds, PagePool

SessionKey = tuple[str, str]
"""Tenant and name: a session's name means nothing to another tenant."""


@dataclass(frozen=True)
class Session:
    """The pinned pages of one conversation.

    Attributes:
        pages: int32 [n], in the order of its tokens.
        used: When its last request ended, seconds of ``time.monotonic()``.
        requests: Requests that have named it.
    """

    pages: PageIds
    used: float
    requests: int


class Sessions:
    """The sessions of one model.

    Args:
        pool: The pages.
        most_pages: Most pages that all sessions may own together.
    """

    def __init__(self, pool: PagePool, most_pages: int) -> None:
        self.most_pages = most_pages
        self.pages_pinned = 0
        """Pages that at least one session owns."""
        self._pool = pool
        self._pins = np.zeros(pool.pages, np.int32)
        self._sessions: dict[SessionKey, Session] = {}  # the one quiet for longest first

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> list[tuple[SessionKey, Session]]:
        """Every session, the one used last first."""
        return list(reversed(self._sessions.items()))

    def touch(self, key: SessionKey) -> None:
        """A request of this session begins: drop the others first."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._sessions[key] = session

    def pin(self, key: SessionKey, pages: PageIds, now: float) -> None:
        """Own ``pages``, which the cache knows, instead of what the session owned; what is over the share is not pinned.

        Args:
            key: Tenant and name.
            pages: From the first token on, int32 [n].
            now: Seconds of ``time.monotonic()``.
        """
        pages = pages[: self.most_pages]
        old = self._sessions.pop(key, None)
        self._add(pages)
        requests = 1
        if old is not None:
            self._remove(old.pages)
            requests += old.requests
        if not len(pages):
            return
        self._sessions[key] = Session(pages, now, requests)
        while self.pages_pinned > self.most_pages:
            self.drop_quietest()

    def drop(self, key: SessionKey) -> bool:
        """Let a session's pages go; False if there is none of that key."""
        session = self._sessions.pop(key, None)
        if session is None:
            return False
        self._remove(session.pages)
        return True

    def drop_quietest(self) -> None:
        """Let the pages of the session go that has been quiet for longest."""
        self.drop(next(iter(self._sessions)))

    def pages_with(self, pages: PageIds) -> int:
        """Pages that are pinned or among ``pages``."""
        return self.pages_pinned + int((self._pins[pages] == 0).sum())

    def owners(self) -> PageIds:
        """How many sessions own each page, int32 [pages]."""
        owners: PageIds = self._pins.copy()
        return owners

    def _add(self, pages: PageIds) -> None:
        self._pool.share(pages)
        self._pins[pages] += 1
        self.pages_pinned += int((self._pins[pages] == 1).sum())

    def _remove(self, pages: PageIds) -> None:
        self._pins[pages] -= 1
        self.pages_pinned -= int((self._pins[pages] == 0).sum())
        self._pool.release(pages)
