"""What requests hold: pages of their own, shared pages of a known prefix, host memory while they are suspended.

Everything that gives a page to a request or takes one from it is here, so that page counts can be held to one sum: the
tables of running requests and the pins of sessions are all owners there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.executor.base import PAGE_TOKENS
from edged.memory.kv_pool import NO_PAGES, pages_for
from edged.memory.prefix_cache import PrefixCache
from edged.memory.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edged.memory.host_pages import HostPages
    from edged.memory.kv_pool import PageIds
    from edged.scheduler.request import Request


class Holdings:
    """The pages of one model's requests.

    Args:
        pages: KV pages in the pool.
        caches: Whether prefixes are remembered and shared.
        session_pages: Most pages that sessions may keep.
        host: Host memory for suspended requests; none are suspended without it.
        model: Name of the model.
        extra_tokens: Tokens beyond its worst case that a sequence's pages must hold for a moment: a tree to verify.
    """

    def __init__(
        self,
        pages: int,
        *,
        caches: bool = True,
        session_pages: int = 0,
        host: HostPages | None = None,
        model: str = "",
        extra_tokens: int = 0,
    ) -> None:
        self.cache = PrefixCache(pages, model)
        self.pool = self.cache.pool
        self.sessions = Sessions(self.pool, session_pages)
        self.host = host
        self.cached_tokens = 0
        """Prompt tokens that were found and not computed."""
        self._caches = caches
        self._extra = extra_tokens
        self._roots: dict[str, bytes] = {}

    def pages_of(self, request: Request) -> int:
        """Pages of a request's worst case."""
        return pages_for(request.most_tokens + self._extra, PAGE_TOKENS)

    def cached_prefix(self, request: Request) -> PageIds:
        """The known pages that a request's prompt begins with; its last token is never among them, int32 [n]."""
        if not self._caches or request.suspended or not request.reads_cache:
            return NO_PAGES
        self._digest(request, (len(request.prompt) - 1) // PAGE_TOKENS)
        return self.cache.find(request.digests)

    def make_room(self, request: Request, copies: int = 1, together: int = 1) -> bool:
        """Whether the pages of a request are there now.

        Pins yield to a request that could not run beside them however long it waited, the quietest session first.

        Args:
            request: It.
            copies: How many of its like are to start at once; what is known of their prompt they share.
            together: The fewest of them that may start at once, however long they waited.
        """
        count = self.pages_of(request)
        if count * copies <= self.pool.pages_free:
            return True
        known = len(request.prompt) // PAGE_TOKENS
        if not len(self.sessions) and (count - known) * copies > self.pool.pages_free:
            return False  # not even if all of its prompt were known
        shared = self.cached_prefix(request)
        while len(self.sessions) and (
            (count - len(shared)) * together > self.pool.pages - self.sessions.pages_with(shared)
        ):
            self.sessions.drop_quietest()
            shared = self.cached_prefix(request)
        return self.pool.can_allocate(count + (count - len(shared)) * (copies - 1), shared)

    def start(self, request: Request) -> None:
        """Give a request its pages, and what it had in them when it was suspended."""
        shared = self.cached_prefix(request)
        table = self.pool.allocate(self.pages_of(request), shared)
        request.table = table
        request.pages, request.room = NO_PAGES, 0
        if request.suspended:
            self._resume(request)
        elif len(shared):
            request.known_pages = len(shared)
            request.stored = request.cached_tokens = len(shared) * PAGE_TOKENS
            self.cached_tokens += request.cached_tokens
        if request.stored:
            self.grow(request, request.stored)
        if request.session:
            self.sessions.touch((request.tenant, request.session))

    def grow(self, request: Request, tokens: int) -> None:
        """Bring pages for ``tokens`` tokens into use."""
        table = request.table
        assert table is not None, "a running request has a table"  # noqa: S101
        self.pool.append(table, pages_for(tokens, PAGE_TOKENS))
        request.pages = table.pages
        request.room = len(table) * PAGE_TOKENS

    def complete(self, request: Request) -> None:
        """Let the cache know the pages that have become full."""
        table = request.table
        if not self._caches or table is None:
            return
        full = request.stored // PAGE_TOKENS
        known = request.known_pages
        if known >= full:
            return
        self._digest(request, full)
        for index in range(known, full):
            self.cache.insert(request.digests[index], int(table.promised[index]))
        request.known_pages = full

    def adopt(self, request: Request) -> None:
        """Take over the next pages of a prompt if another request has computed them meanwhile."""
        table = request.table
        if not self._caches or table is None or request.stored % PAGE_TOKENS or not request.reads_cache:
            return
        first = request.stored // PAGE_TOKENS
        last = (len(request.prompt) - 1) // PAGE_TOKENS
        if first >= last:
            return
        self._digest(request, last)
        found = self.cache.find(request.digests[first:last])
        if not len(found):
            return
        end = first + len(found)
        self.pool.share(found)
        self.pool.release(table.promised[first:end].copy())
        table.promised[first:end] = found
        request.stored = end * PAGE_TOKENS
        request.known_pages = end
        gained = len(found) * PAGE_TOKENS
        request.cached_tokens += gained
        self.cached_tokens += gained
        self.grow(request, request.stored)

    def next_digest(self, request: Request) -> bytes | None:
        """What names the page that a prompt's next piece begins; None if it begins within a page or ends in it."""
        page, rest = divmod(request.stored, PAGE_TOKENS)
        if (
            not self._caches
            or not request.reads_cache
            or rest
            or page >= (len(request.prompt) - 1) // PAGE_TOKENS
        ):
            return None
        self._digest(request, page + 1)
        return request.digests[page]

    def end(self, request: Request, now: float) -> None:
        """Take a request's pages; its session keeps those that are known."""
        if request.table is None:
            self._discard(request)
            return
        if request.session and self._caches:
            pages = self.cache.find(request.digests[: request.stored // PAGE_TOKENS])
            self.sessions.pin((request.tenant, request.session), pages, now)
        self._free(request)

    def can_suspend(self, requests: Iterable[Request]) -> bool:
        """Whether host memory holds all of ``requests``."""
        if self.host is None:
            return False
        return sum(pages_for(r.stored, PAGE_TOKENS) for r in requests) <= self.host.slots_free

    def pages_freed_by(self, requests: Iterable[Request]) -> int:
        """Pages that have no owner once ``requests`` have given up theirs."""
        tables = [r.table.promised for r in requests if r.table is not None]
        if not tables:
            return 0
        counts = np.bincount(np.concatenate(tables), minlength=self.pool.pages)
        return int((counts[counts > 0] == self.pool.owners()[counts > 0]).sum())

    def suspend(self, request: Request) -> None:
        """Copy what a running request has stored to host memory and take its pages."""
        assert self.host is not None, "there is host memory"  # noqa: S101
        assert request.table is not None, "a running request has a table"  # noqa: S101
        if request.stored:
            request.saved = self.host.save(request.table.promised[: pages_for(request.stored, PAGE_TOKENS)])
        self._free(request)

    def drop_session(self, tenant: str, name: str) -> bool:
        """Let a session's pages go; False if there is none of that name."""
        return self.sessions.drop((tenant, name))

    def check(self, running: Iterable[Request]) -> None:
        """Hold pages, pins and host memory against what ``running`` requests hold.

        Raises:
            AssertionError: Something is lost or owned by nobody.
        """
        self.cache.check()
        if self.host is not None:
            self.host.check()
        owners = self.sessions.owners()
        for request in running:
            if request.table is not None:
                owners[request.table.promised] += 1
        if not np.array_equal(owners, self.pool.owners()):
            lost = np.flatnonzero(owners != self.pool.owners())
            raise AssertionError(f"running requests and sessions are not the owners of pages {lost.tolist()}")

    def _resume(self, request: Request) -> None:
        request.suspended = False
        request.known_pages = 0
        if request.saved is None:
            return
        assert self.host is not None, "what was saved lies in host memory"  # noqa: S101
        assert request.table is not None, "it has just got its table"  # noqa: S101
        self.host.restore(request.saved, request.table.promised[: len(request.saved.promised)])
        request.saved = None
        self.complete(request)

    def _free(self, request: Request) -> None:
        assert request.table is not None, "a running request has a table"  # noqa: S101
        self.pool.free(request.table)
        request.table = None
        request.pages, request.room = NO_PAGES, 0

    def _discard(self, request: Request) -> None:
        if request.saved is not None and self.host is not None:
            self.host.discard(request.saved)
            request.saved = None

    def _digest(self, request: Request, pages: int) -> None:
        """Name the first ``pages`` full pages of a request."""
        digests = request.digests
        while len(digests) < pages:
            index = len(digests)
            parent = digests[-1] if digests else self._root(request.tenant)
            tokens = request.tokens(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
            digests.append(self.cache.follow(parent, tokens))

    def _root(self, tenant: str) -> bytes:
        root = self._roots.get(tenant)
        if root is None:
            if len(self._roots) >= 1024:  # tenants come and go; a root is made again in a microsecond
                self._roots.clear()
            root = self._roots[tenant] = self.cache.root(tenant)
        return root
