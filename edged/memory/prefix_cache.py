"""Which page holds which tokens after which others: prompts with one beginning share the pages of that beginning.

A full page is known by a digest of its tokens *and of every page before it*, so one look-up tells that a whole prefix is
there. Because a compressed key belongs to the page of its last token and nothing depends on how a prompt was cut
(docs/design.md, decision 3), a page is the same whatever comes after it, and whoever computed it.

The chain starts from the model, the adapter and the tenant, and the hash is keyed with a secret of this process: nobody
can look for what another tenant has asked, or make two prefixes that collide.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

import numpy as np

from edged.memory.kv_pool import PageIds, PagePool

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_BYTES = 16
"""128 bits, keyed: no two prefixes of a pool's life have one digest."""


class PrefixCache:
    """The known pages of one model, and the pool they lie in.

    Args:
        pages: Pages of the pool.
        model: Name of the model.
    """

    def __init__(self, pages: int, model: str = "") -> None:
        self.pool = PagePool(pages, on_reclaim=self._forget)
        self._model = model
        self._secret = secrets.token_bytes(32)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def root(self, tenant: str = "", adapter: str = "") -> bytes:
        """Digest that the chain of a tenant's sequences starts from."""
        parts = [part.encode("utf-8", "surrogatepass") for part in (self._model, adapter, tenant)]
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return self._digest(text)

    def follow(self, parent: bytes, token_ids: PageIds) -> bytes:
        """Digest of a page.

        Args:
            parent: Of the page before it, or the root.
            token_ids: Its tokens, int32 [64].
        """
        return self._digest(parent + token_ids.tobytes())

    def find(self, digests: Sequence[bytes]) -> PageIds:
        """The pages of the longest known prefix of a chain, int32 [n]."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return np.array(pages, np.int32)

    def insert(self, digest: bytes, page: int) -> bool:
        """Remember what ``page`` holds; False if another page is known for it, and ``page`` stays its owner's alone."""
        if digest in self._page_of:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self.pool.keep(page)
        return True

    def clear(self) -> None:
        """Forget what nobody holds."""
        self.pool.forget_idle()

    def check(self) -> None:
        """Hold the cache and the pool against their invariants.

        Raises:
            AssertionError: They disagree.
        """
        self.pool.check()
        if len(self._page_of) != len(self._digest_of):
            raise AssertionError("a page is known by two digests, or two pages by one")
        if any(self._page_of[digest] != page for page, digest in self._digest_of.items()):
            raise AssertionError("a digest leads to another page than the one it was made of")
        kept = np.flatnonzero(self.pool.kept())
        if set(kept.tolist()) != set(self._digest_of):
            raise AssertionError("the pool keeps other pages than the cache knows")

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._secret).digest()
