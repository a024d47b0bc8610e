"""Which blocks a query attends to: the scalars of block selection."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract.arrays import LaunchError, check_at_least
from plugins_trt.contract.sizes import BLOCK


@dataclass(frozen=True)
class SelectionRule:
    """Which blocks a query attends to (InfLLM-v2, arXiv 2509.24663).

    The first `init_blocks` blocks, the query's own block and the `window / 64` blocks before it always win;
    the best `top_k + window / 64` in all are attended. `local_blocks`, when given, is the number of winning
    blocks that end with the own one (so `window / 64` itself gives the paper's rule, the default one more).
    A query at position i is dense while i + 1 < `dense_below`. `lse` says where the softmax over compressed
    keys takes its maximum and sum: "approximate" from the coarse keys, "exact" from the fine ones.
    """

    init_blocks: int = 1
    window: int = 2048
    top_k: int = 64
    dense_below: int = 8192
    lse: str = "approximate"
    local_blocks: int | None = None

    def __post_init__(self) -> None:
        """Checks that the blocks that always win fit among the attended ones."""
        check_at_least("init_blocks", self.init_blocks, 0)
        check_at_least("window", self.window, 0)
        check_at_least("top_k", self.top_k, 0)
        check_at_least("dense_below", self.dense_below, 0)
        if self.window % BLOCK:
            raise LaunchError(f"window: {self.window}, must be a multiple of {BLOCK} tokens")
        if self.lse not in ("approximate", "exact"):
            raise LaunchError(f"lse: {self.lse!r}, must be 'approximate' or 'exact'")
        if self.local_blocks is not None:
            check_at_least("local_blocks", self.local_blocks, 1)
        if self.init_blocks + self.local > self.total:
            raise LaunchError(
                f"top_k: {self.top_k} leaves {self.total} blocks, fewer than the {self.init_blocks} first and "
                f"{self.local} local ones that always win; raise top_k to at least "
                f"{self.init_blocks + self.local - self.window // BLOCK}"
            )

    @property
    def local(self) -> int:
        """Blocks, the query's own the last of them, that always win."""
        return self.window // BLOCK + 1 if self.local_blocks is None else self.local_blocks

    @property
    def total(self) -> int:
        """Blocks attended in all, when the context has as many."""
        return self.top_k + self.window // BLOCK
