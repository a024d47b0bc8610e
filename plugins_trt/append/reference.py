"""`append` in plain torch, in fp32 but for the rounding of what is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins_trt.contract import BLOCK, COARSE_KERNEL, COARSE_STRIDE, KERNEL, STRIDE
from plugins_trt.quantized.reference import dequantize, format_of, quantize


@dataclass
class Pages:
    """One layer of an arena as tensors."""

    keys: torch.Tensor  # [pages, Hkv, 64, D]
    values: torch.Tensor  # [pages, Hkv, 64, D]
    fine: torch.Tensor  # [pages, Hkv, 4, D]
    coarse: torch.Tensor  # [pages, Hkv, 1, D]

    def read(self, kind: str, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The "keys" or "values" in `slots` of a sequence as they are stored, float32 [n, Hkv, D]."""
        return gather(getattr(self, kind), table, slots).float()

    def write(self, kind: str, table: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores rows, float32 [n, Hkv, D]."""
        pool = getattr(self, kind)
        pool[table[slots // BLOCK].long(), :, slots % BLOCK] = rows.to(pool.dtype)


@dataclass
class QuantizedPages(Pages):
    """Keys and values in eight bits, as :mod:`plugins_trt.quantized.reference` holds them, with their scales."""

    key_scales: torch.Tensor  # float16 [pages, Hkv, 64]
    value_scales: torch.Tensor  # float16 [pages, Hkv, 64]

    @property
    def kv_dtype(self) -> str:
        """Which of the formats."""
        return format_of(self.keys.dtype)

    def read(self, kind: str, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The "keys" or "values" in `slots` of a sequence as they are stored, float32 [n, Hkv, D]."""
        return dequantize(*(gather(pool, table, slots) for pool in self._pools(kind)))

    def write(self, kind: str, table: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores rows, float32 [n, Hkv, D]."""
        where = table[slots // BLOCK].long()
        for pool, part in zip(self._pools(kind), quantize(rows, self.kv_dtype), strict=True):
            pool[where, :, slots % BLOCK] = part

    def _pools(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(self, kind), getattr(self, f"{kind[:-1]}_scales")


@dataclass
class Appended:
    """What `append` gives beside the pages."""

    q: torch.Tensor  # [T, H, D]
    node_fine: torch.Tensor  # [T, Hkv, D], zeros where no node completes one
    node_coarse: torch.Tensor  # [T, Hkv, D]


def rotate(
    x: torch.Tensor,  # [T, H, D]
    positions: torch.Tensor,  # [T]
    *,
    cosine: torch.Tensor,  # [max_positions, D / 2]
    sine: torch.Tensor,
    norm: torch.Tensor | None,  # [D]
    epsilon: float,
) -> torch.Tensor:
    """Norm and RoPE in fp32, which the caller rounds once."""
    y = x.float()
    if norm is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon) * norm.float()
    cos, sin = cosine[positions.long(), None], sine[positions.long(), None]
    first, second = y.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def gather(pool: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows `slots` of a sequence: [len(slots), Hkv, ..]."""
    slots = slots.long()
    return pool[table[slots // BLOCK].long(), :, slots % BLOCK]


def path_slots(length: int, position: int, mask: int | None, device: torch.device) -> torch.Tensor:
    """The slot that holds each position 0 .. `position` of a query: its ancestors' behind `length` in a tree."""
    if mask is None:
        return torch.arange(position + 1, device=device)
    nodes = [length + node for node in range(64) if mask >> node & 1]
    return torch.cat([torch.arange(length, device=device), torch.tensor(nodes, device=device)])


def append(
    pages: Pages,
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [T, Hkv, D]
    v: torch.Tensor,  # [T, Hkv, D]
    *,
    sequence_starts: list[int],
    lengths: list[int],
    page_tables: torch.Tensor,  # [S, max_pages]
    positions: torch.Tensor,  # [T]
    cosine: torch.Tensor,
    sine: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    tree_masks: list[int] | None = None,
) -> Appended:
    """Writes keys, values and compressed keys into `pages` and returns the queries."""
    roped_q = rotate(q, positions, cosine=cosine, sine=sine, norm=q_norm, epsilon=epsilon).to(q.dtype)
    roped_q[sequence_starts[-1] :] = 0
    roped_k = rotate(k, positions, cosine=cosine, sine=sine, norm=k_norm, epsilon=epsilon)
    nodes_fine, nodes_coarse = torch.zeros_like(k), torch.zeros_like(k)
    for sequence, length in enumerate(lengths):
        start, end = sequence_starts[sequence], sequence_starts[sequence + 1]
        table = page_tables[sequence]
        slots = torch.arange(length, length + end - start, device=k.device)
        pages.write("keys", table, slots, roped_k[start:end])
        pages.write("values", table, slots, v[start:end])
        for token in range(start, end):
            position = int(positions[token])
            kinds = (
                (KERNEL, STRIDE, pages.fine, nodes_fine),
                (COARSE_KERNEL, COARSE_STRIDE, pages.coarse, nodes_coarse),
            )
            for kernel, stride, pool, nodes in kinds:
                if position % stride != stride - 1 or position < kernel - 1:
                    continue
                mask = None if tree_masks is None else tree_masks[token]
                path = path_slots(length, position, mask, k.device)[-kernel:]
                mean = pages.read("keys", table, path).sum(0) / kernel
                if tree_masks is None:
                    pool[int(table[position // BLOCK]), :, position % BLOCK // stride] = mean.to(k.dtype)
                else:
                    nodes[token] = mean.to(k.dtype)
    return Appended(roped_q, nodes_fine, nodes_coarse)
