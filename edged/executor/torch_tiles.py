"""Attention of many queries on the CPU by oneDNN's products of fp32, a tile of keys at a time.

torch's kernel multiplies by MKL, tile by tile. Where oneDNN is faster (:class:`edged.executor.torch_products.OneDnnProduct`),
scores and sums by it take half the time, softmax included. Both are measured when the model is loaded.
"""

from __future__ import annotations

import math
import time
from itertools import product
from typing import TYPE_CHECKING

import torch

from edged.executor.torch_products import OneDnnProduct
from edged.executor.torch_views import piece_places

if TYPE_CHECKING:
    from collections.abc import Callable

    Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

LEAST_QUERIES = 256
"""Of all heads that share their keys; fewer take torch's kernel, for whose calls less goes on around the products."""

LEAST_KEYS = 64
"""So do fewer of these."""

TILE_KEYS = (64, 256, 512)
"""Keys of a tile; oneDNN compiles a product for each shape, so there must be few."""

_TURNS = 3


class TileAttention:
    """Softmax attention over keys that every query sees, with the log-sum-exp of its scores.

    Args:
        linear: oneDNN's product.
    """

    def __init__(self, linear: OneDnnProduct) -> None:
        self._multiply = linear.multiply

    @classmethod
    def where_faster(
        cls, other: Attention, heads: int, head_dim: int, dtype: torch.dtype
    ) -> TileAttention | None:
        """This attention, if it is there and faster here than another, on one thread.

        Args:
            other: torch's kernel.
            heads: Of keys.
            head_dim: Elements of a head.
            dtype: Of what is attended.
        """
        linear = OneDnnProduct.find() if dtype in (torch.float32, torch.bfloat16) else None
        if linear is None:
            return None
        found = cls(linear)
        ways: tuple[Attention, Attention] = (found, other)
        best = [math.inf, math.inf]
        shape = (1, heads, TILE_KEYS[-1], head_dim)
        q, k, v = (torch.full(shape, value, dtype=dtype) for value in (0.5, 0.25, 1.0))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for _ in range(1 + _TURNS):  # the first compiles
                for index, way in enumerate(ways):
                    begin = time.thread_time()
                    way(q, k, v)
                    best[index] = min(best[index], time.thread_time() - begin)
        finally:
            torch.set_num_threads(threads)
        return found if best[0] < best[1] else None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            q: ``[B, N, T, D]``.
            k: ``[B, N, K, D]``; where all of N share their keys, their queries are multiplied together.
            v: The same.
            mask: fp32 ``[N T, M]``, added to the scores of the last M keys where N share theirs, which lie in one tile.

        Returns:
            fp32 outputs ``[B, N, T, D]`` and log-sum-exps ``[B, N, T]``.
        """
        shape = q.shape
        wide = (q.float() * shape[3] ** -0.5).contiguous()
        if shape[1] > 1 and k.stride(1) == 0:
            wide = wide.view(1, shape[0], -1, shape[3])
            k, v = k[:, 0].unsqueeze(0), v[:, 0].unsqueeze(0)
        out = lse = None
        for start in range(0, k.shape[2], TILE_KEYS[-1]):
            some = slice(start, start + TILE_KEYS[-1])
            seen = mask if start + TILE_KEYS[-1] >= k.shape[2] else None
            part, part_lse = self._tile(wide, k[:, :, some], v[:, :, some], seen)
            out, lse = (part, part_lse) if out is None or lse is None else merge(out, lse, part, part_lse)
        assert out is not None, "there are keys"  # noqa: S101
        assert lse is not None  # noqa: S101
        return out.view(shape), lse.view(shape[:3])

    def _tile(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled fp32 queries and the keys of one tile."""
        count, depth = k.shape[2:]
        size = next(size for size in TILE_KEYS if size >= count)
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:3])
        keys, values = torch.zeros(size, depth), torch.zeros(depth, size)
        places = piece_places(q.shape[2], q.shape[2])
        for index in product(range(q.shape[0]), range(q.shape[1])):
            keys[:count] = k[index]
            values[:, :count] = v[index].t()
            queries, results, sums = q[index], out[index], lse[index]
            for first, rows in places:
                some = slice(first, first + rows)
                scores = self._multiply(queries[some], keys)  # [n, size]
                if mask is not None:
                    scores[:, count - mask.shape[1] : count] += mask[some]
                if count < size:
                    scores[:, count:] = -math.inf
                chances = torch.softmax(scores, 1)
                results[some] = self._multiply(chances, values)
                # The chance of the largest score is 1 over the sum of all of them, of which its own is 1.
                torch.sub(scores.amax(1), chances.amax(1).log_(), out=sums[some])
        return out, lse


def causal_mask(rows: int, group: int) -> torch.Tensor:
    """Which of as many new keys the queries of a group's heads see, one head's after the other's: fp32 ``[group rows, rows]``."""
    return torch.full((rows, rows), -math.inf).triu_(1).repeat(group, 1)


def merge(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys: outputs ``[.., T, D]`` weighted by ``exp(lse)``, lse ``[.., T]``."""
    share = torch.sigmoid(second_lse - first_lse).unsqueeze(-1)
    merged = first.to(share.dtype)
    torch.lerp(merged, second.to(share.dtype), share, out=merged)
    return merged, torch.logaddexp(first_lse, second_lse)
