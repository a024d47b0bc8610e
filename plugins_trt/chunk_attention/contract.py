"""What chunk attention takes, the sizes it derives from it, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.chunk_selection.contract import bitmap_words
from plugins_trt.contract import (
    Bucket,
    DeviceArray,
    LaunchError,
    QueryArguments,
    ceil_div,
    check_array,
    check_at_least,
    check_workspace,
    round_up,
)

ALWAYS = (1 << 31) - 1
"""A `dense_below` that no position reaches."""

DENSE_ROWS = 128
"""(token, head) pairs of a tile of dense attention."""

_MAX_SPLITS = 16
_SPLIT_PAGES = 8  # pages that make a split worth its part


@dataclass(frozen=True)
class DensePlan:
    """How one bucket of dense attention is cut, and its device memory. Depends on sizes alone."""

    tiles: int  # thread blocks along the tokens
    splits: int  # shares of the context
    parts_bytes: int  # [splits, T, H, D] float32
    logs_bytes: int  # [splits, T, H] float32

    @property
    def workspace_bytes(self) -> int:
        """Bytes of both arrays, the parts first; 0 without splits."""
        return self.parts_bytes + self.logs_bytes

    @classmethod
    def of(cls, bucket: Bucket) -> DensePlan:
        """Cuts a bucket; two thread blocks fit a multiprocessor."""
        tile_tokens = DENSE_ROWS // (bucket.heads // bucket.kv_heads)
        full = ceil_div(bucket.tokens, tile_tokens) * bucket.kv_heads
        splits = max(
            1, min(_MAX_SPLITS, 2 * bucket.multiprocessors // full, bucket.max_pages // _SPLIT_PAGES)
        )
        rows = splits * bucket.tokens * bucket.heads if splits > 1 else 0
        return cls(
            tiles=bucket.tokens // tile_tokens + bucket.sequences + 1,
            splits=splits,
            parts_bytes=round_up(rows * bucket.head_dim * 4, 256),
            logs_bytes=round_up(rows * 4, 256),
        )


def workspace_bytes(bucket: Bucket) -> int:
    """Bytes that dense attention over a bucket needs while it runs; sparse attention needs none."""
    return DensePlan.of(bucket).workspace_bytes


@dataclass(frozen=True)
class ChunkAttention(QueryArguments):
    """The arguments of one attention, dense, sparse or both.

    A query at position i attends to everything before it while i + 1 < `dense_below`, and to the blocks that
    `chosen` names from there on. Each kind writes its own rows; both write zeros to padding.
    """

    out: DeviceArray  # [T, H, D]
    dense_below: int = ALWAYS
    chosen: DeviceArray | None = None  # int32 or uint32 [kv_heads, T, ceil(max_pages / 32)]
    workspace: DeviceArray | None = None  # for dense attention, at least workspace_bytes
    scale: float | None = None  # of the scores; 1 / sqrt(D) when None

    def __post_init__(self) -> None:
        """Checks everything that sizes and dtypes can tell."""
        self.check_chain()
        self.check_queries(rows_apart=True)
        self.check_rows_of_queries("out", self.out, rows_apart=True)
        if self.out.shape != self.q.shape:
            raise LaunchError(f"out: shape {self.out.shape}, must be that of q {self.q.shape}")
        check_at_least("dense_below", self.dense_below, 0)
        if self.dense_below > ALWAYS:
            raise LaunchError(f"dense_below: {self.dense_below}, must be at most {ALWAYS}")
        if self.chosen is not None:
            shape = (self.arena.kv_heads, self.batch.tokens, bitmap_words(self.batch.max_pages))
            check_array("chosen", self.chosen, ("int32", "uint32"), shape, alignment=4)
        self.check_scale(self.scale)

    def dense_plan(self, multiprocessors: int) -> DensePlan:
        """How dense attention over this bucket is cut on a device of `multiprocessors`.

        Raises:
            LaunchError: naming `workspace` when it is missing or too small.
        """
        plan = DensePlan.of(self.bucket(multiprocessors))
        if plan.workspace_bytes == 0:
            return plan
        if self.workspace is None:
            raise LaunchError(f"workspace: missing, this bucket needs {plan.workspace_bytes} bytes")
        check_workspace("workspace", self.workspace, plan.workspace_bytes)
        return plan
