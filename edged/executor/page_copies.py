"""Copies KV pages between the arena and host memory, bit by bit, with everything that belongs to a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.executor.base import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.executor.base import ByteArray, Int32Array

_BY_PAGE = ("keys", "values", "key_scales", "value_scales", "fine", "coarse")
"""Buffers of shape ``[layers, pages, ...]``."""


class PageCopies:
    """Sees a model's buffers page by page.

    Args:
        buffers: The executor's buffers, by name: ``kv`` of ``[layers, 2 kv_heads, pages * 64, D]``, or ``keys`` and
            ``values`` of ``[layers, pages, kv_heads, 64, D]``; their scales, where they have some; and the compressed
            keys, where there are any.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._arenas: list[torch.Tensor] = []  # [pages, layers, ...]
        if "kv" in buffers:
            kv = buffers["kv"]
            by_page = kv.view(*kv.shape[:2], -1, PAGE_TOKENS, kv.shape[3])
            self._arenas.append(by_page.permute(2, 0, 1, 3, 4))
        if "kv_scales" in buffers:
            scales = buffers["kv_scales"]
            self._arenas.append(scales.view(*scales.shape[:2], -1, PAGE_TOKENS).permute(2, 0, 1, 3))
        self._arenas += [buffers[name].transpose(0, 1) for name in _BY_PAGE if name in buffers]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all buffers."""
        return sum(arena[0].numel() * arena.element_size() for arena in self._arenas)

    def read(self, pages: Int32Array, out: ByteArray) -> None:
        """Copy ``pages`` to ``out``, uint8 [n, page_bytes]."""
        for row, page in zip(torch.from_numpy(out), pages.tolist(), strict=True):
            for part, stored in self._parts(row, page):
                part.copy_(stored)

    def write(self, pages: Int32Array, data: ByteArray) -> None:
        """Copy ``data``, uint8 [n, page_bytes], into ``pages``."""
        for row, page in zip(torch.from_numpy(data), pages.tolist(), strict=True):
            for part, stored in self._parts(row, page):
                stored.copy_(part)

    def _parts(self, row: torch.Tensor, page: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One page's bytes on the host, cut and typed as its parts in the arena are, beside these."""
        parts = []
        start = 0
        for arena in self._arenas:
            stored = arena[page]
            size = stored.numel() * stored.element_size()
            parts.append((row[start : start + size].view(stored.dtype).view(stored.shape), stored))
            start += size
        return parts
