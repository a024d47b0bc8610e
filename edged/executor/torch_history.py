"""The stored tokens of a sequence on the CPU, cut into pieces that attention looks at in one call each.

A run of consecutive pages is one view, and nothing is copied; short runs are gathered into a scratch tile. What torch's
attention does not multiply (numbers in eight bits), or multiplies slowly (float16), is widened in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.memory.buffers import HISTORY_TILE, PAGE_TOKENS
from plugins_trt.quantized.reference import widen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.executor.base import Int32Array
    from edged.models.architecture import Architecture

LONG_RUN = HISTORY_TILE // 2
"""A run of consecutive pages of at least this many tokens is attended where it lies instead of being gathered."""


@dataclass(frozen=True)
class Piece:
    """A part of a sequence's history that is attended in one call.

    ``pages`` is given when the part is gathered from scattered pages first. ``k`` and ``v`` are given when the part
    is read from scratch; they are the same for every layer.
    """

    first_slot: int
    tokens: int
    pages: torch.Tensor | None = None  # int64 [n]
    gathered: torch.Tensor | None = None  # [2 kv_heads, n, 64 D]
    scales: torch.Tensor | None = None  # [2 kv_heads, n, 64], where keys and values are quantized
    widened: torch.Tensor | None = None  # [2 kv_heads, tokens, D], and what it is widened from
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


class History:
    """What is stored of earlier tokens.

    Args:
        architecture: The model's sizes.
        buffers: The flat buffers, by name: ``kv`` ``[layers, 2 kv_heads, pages * 64, D]``, ``kv_scales`` without D where
            keys and values are quantized, and the tiles.
    """

    def __init__(self, architecture: Architecture, buffers: Mapping[str, torch.Tensor]) -> None:
        a = architecture
        self._a = a
        self._buffers = buffers
        self._kv = buffers["kv"]
        self._scales = buffers.get("kv_scales")
        self._layers = tuple(self._kv)
        self._paged = tuple(self._kv.view(a.layers, 2 * a.kv_heads, -1, PAGE_TOKENS * a.head_dim))
        self._layer_stride, self._head_stride = self._kv.stride(0), self._kv.stride(1)
        self.widens = self._kv.dtype == torch.float16 or self._scales is not None
        """Whether attention multiplies something wider than what is stored."""

    @property
    def head_stride(self) -> int:
        """Elements from a head to the next."""
        return self._head_stride

    def cut(
        self, table: Int32Array, tokens: int, shape: tuple[int, int], stride: tuple[int, int]
    ) -> tuple[Piece, ...]:
        """Cut the first ``tokens`` tokens of a table into pieces."""
        if tokens == 0:
            return ()
        pages = table[: -(-tokens // PAGE_TOKENS)]
        bounds = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
        pieces: list[Piece] = []
        loose: list[int] = []  # pages of short runs, to be gathered together
        last = len(bounds) - 2
        for run, (first, end) in enumerate(pairwise(bounds)):
            ends_sequence = run == last
            size = (tokens if ends_sequence else end * PAGE_TOKENS) - first * PAGE_TOKENS
            if size >= LONG_RUN or len(bounds) == 2:
                pieces.extend(self._gather(loose, len(loose) * PAGE_TOKENS, shape, stride))
                loose = []
                pieces.extend(self._in_place(int(pages[first]) * PAGE_TOKENS, size, shape, stride))
            else:
                loose.extend(pages[first:end].tolist())
        missing = len(pages) * PAGE_TOKENS - tokens if loose and loose[-1] == int(pages[-1]) else 0
        pieces.extend(self._gather(loose, len(loose) * PAGE_TOKENS - missing, shape, stride))
        return tuple(pieces)

    def _in_place(
        self, slot: int, tokens: int, shape: tuple[int, int], stride: tuple[int, int]
    ) -> list[Piece]:
        """Pieces of a run of consecutive slots: one view, or tiles where they must be widened."""
        if not self.widens:
            return [Piece(slot, tokens)]
        pieces = []
        for start in range(0, tokens, HISTORY_TILE):
            count = min(HISTORY_TILE, tokens - start)
            wide = self._tile("wide_history", count)
            k, v = self._keys_values(wide, count, shape, stride)
            pieces.append(Piece(slot + start, count, widened=wide, k=k, v=v))
        return pieces

    def _gather(
        self, pages: list[int], tokens: int, shape: tuple[int, int], stride: tuple[int, int]
    ) -> list[Piece]:
        """Pieces of scattered pages, a tile each."""
        pieces = []
        for start in range(0, tokens, HISTORY_TILE):
            count = min(HISTORY_TILE, tokens - start)
            part = pages[start // PAGE_TOKENS : -(-(start + count) // PAGE_TOKENS)]
            # Indices are few; a tensor of their own keeps the pieces of all sequences apart.
            index = torch.tensor(part, dtype=torch.int64, device=self._kv.device)
            gathered = self._tile("history", len(part) * PAGE_TOKENS)
            wide = self._tile("wide_history", len(part) * PAGE_TOKENS) if self.widens else None
            k, v = self._keys_values(gathered if wide is None else wide, count, shape, stride)
            heads = 2 * self._a.kv_heads
            flat = gathered.view(heads, len(part), PAGE_TOKENS * self._a.head_dim)
            scales = None
            if self._scales is not None:
                size = heads * len(part) * PAGE_TOKENS
                scales = self._buffers["history_scales"][:size].view(heads, len(part), PAGE_TOKENS)
            pieces.append(Piece(0, count, index, flat, scales, wide, k, v))
        return pieces

    def _tile(self, name: str, tokens: int) -> torch.Tensor:
        """Scratch as ``[2 kv_heads, tokens, D]``."""
        width = 2 * self._a.kv_width
        return self._buffers[name][: tokens * width].view(2 * self._a.kv_heads, tokens, self._a.head_dim)

    def _keys_values(
        self, tile: torch.Tensor, tokens: int, shape: tuple[int, int], stride: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a tile in the shape that the queries want."""
        head = tile.stride(0)
        sizes = (*shape, tokens, self._a.head_dim)
        strides = (*(head if step else 0 for step in stride), self._a.head_dim, 1)
        offset = tile.storage_offset()
        return (
            tile.as_strided(sizes, strides, offset),
            tile.as_strided(sizes, strides, offset + self._a.kv_heads * head),
        )

    def load(
        self, piece: Piece, shape: tuple[int, int], stride: tuple[int, int], layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a piece in one layer, in the shape that its queries want."""
        if piece.pages is not None and piece.gathered is not None:
            torch.index_select(self._paged[layer], 1, piece.pages, out=piece.gathered)
            if self._scales is not None and piece.scales is not None and piece.widened is not None:
                paged = self._scales[layer].view(2 * self._a.kv_heads, -1, PAGE_TOKENS)
                torch.index_select(paged, 1, piece.pages, out=piece.scales)
                widen(piece.gathered.view_as(piece.widened), piece.scales.flatten(1), piece.widened)
            elif piece.widened is not None:
                piece.widened.view_as(piece.gathered).copy_(piece.gathered)
        elif piece.widened is not None:
            slots = slice(piece.first_slot, piece.first_slot + piece.tokens)
            if self._scales is not None:
                widen(self._layers[layer][:, slots], self._scales[layer][:, slots], piece.widened)
            else:
                piece.widened.copy_(self._layers[layer][:, slots])
        if piece.k is not None and piece.v is not None:
            return piece.k, piece.v
        sizes = (*shape, piece.tokens, self._a.head_dim)
        strides = (*stride, self._a.head_dim, 1)
        offset = layer * self._layer_stride + piece.first_slot * self._a.head_dim
        return (
            self._kv.as_strided(sizes, strides, offset),
            self._kv.as_strided(sizes, strides, offset + self._a.kv_heads * self._head_stride),
        )
