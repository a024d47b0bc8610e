"""What a model's requests may hold, from its configuration and its executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.errors import UnsupportedError
from edged.memory.host_pages import HostPages
from edged.scheduler.holdings import Holdings

if TYPE_CHECKING:
    from edged.config import ModelConfig
    from edged.executor.base import Executor


def make_holdings(config: ModelConfig, executor: Executor) -> Holdings:
    """Pages, cache, sessions and host memory as a model's configuration has them.

    Raises:
        UnsupportedError: Requests are to be suspended and the executor cannot copy pages.
    """
    host = None
    if config.host_kv:
        if not executor.page_bytes:
            raise UnsupportedError(
                f"model {config.name}: its executor does not copy pages, so nothing can be suspended: remove host_kv",
                field="host_kv",
            )
        slots = config.host_kv // executor.page_bytes
        host = HostPages(slots, executor.page_bytes, executor.read_pages, executor.write_pages)
    pages = executor.limits.pages
    return Holdings(
        pages,
        caches=config.prefix_cache,
        session_pages=int(pages * config.session_share) if config.prefix_cache else 0,
        host=host,
        model=config.name,
        extra_tokens=config.speculation.most_nodes - 1,
    )
