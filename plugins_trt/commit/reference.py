"""`commit` in plain torch, for one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugins_trt.contract import BLOCK, COARSE_KERNEL, COARSE_STRIDE, KERNEL, STRIDE

if TYPE_CHECKING:
    from plugins_trt.append.reference import Pages


def commit(
    pages: Pages,
    *,
    lengths: list[int],
    page_tables: torch.Tensor,  # [S, max_pages]
    paths: list[list[int]],
) -> None:
    """Moves each sequence's accepted nodes behind its earlier tokens and writes the compressed keys they complete."""
    for sequence, path in enumerate(paths):
        length, table = lengths[sequence], [int(page) for page in page_tables[sequence]]

        def place(slot: int, table: list[int] = table) -> tuple[int, slice, int]:
            return table[slot // BLOCK], slice(None), slot % BLOCK

        pools = [pool for name, pool in vars(pages).items() if name not in ("fine", "coarse")]
        for pool in pools:
            rows = [pool[place(length + node)].clone() for node in path]
            for depth, row in enumerate(rows):
                pool[place(length + depth)] = row
        for position in range(length, length + len(path)):
            for kernel, stride, pool in (
                (KERNEL, STRIDE, pages.fine),
                (COARSE_KERNEL, COARSE_STRIDE, pages.coarse),
            ):
                if position % stride == stride - 1 and position >= kernel - 1:
                    over = torch.arange(position - kernel + 1, position + 1, device=page_tables.device)
                    window = list(pages.read("keys", page_tables[sequence], over))
                    mean = sum(window[1:], window[0]) / kernel
                    pool[table[position // BLOCK], :, position % BLOCK // stride] = mean.to(pool.dtype)
