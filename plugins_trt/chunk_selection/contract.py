"""What chunk block selection takes, the sizes it derives from it, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import (
    BLOCK,
    Bucket,
    DeviceArray,
    LaunchError,
    QueryArguments,
    SelectionRule,
    ceil_div,
    check_array,
    check_workspace,
    round_up,
)

MAX_PAGES = 8192
"""Pages of the longest table that is compared: 524 288 tokens."""

TILE_TOKENS = 16
"""Neighbouring tokens of one sequence that a thread block takes."""

SHARE_PAGES = 2048
"""Pages that a thread block of the first pass takes at most."""

_STAGE_PAGES = 16


def bitmap_words(max_pages: int) -> int:
    """32-bit words of one query's bitmap of blocks."""
    return ceil_div(max_pages, 32)


def row_stride(array: DeviceArray) -> int:
    """Elements from a token's row to the next."""
    return array.contiguous_strides[0] if array.strides is None else array.strides[0]


@dataclass(frozen=True)
class SelectionPlan:
    """How one bucket is cut, and the device memory that its passes hand on. Depends on sizes alone."""

    tiles: int  # thread blocks along the tokens
    splits: int  # shares of the keys in the first pass
    split_pages: int  # pages of a thread block in the second pass
    page_splits: int  # thread blocks along the pages in the second pass
    score_stride: int  # blocks of a row of scores
    sums_bytes: int  # [splits, T, H, 2] float32
    scores_bytes: int  # [kv_heads, T, score_stride] float32

    @property
    def workspace_bytes(self) -> int:
        """Bytes of both arrays, the sums first."""
        return self.sums_bytes + self.scores_bytes

    @classmethod
    def of(cls, bucket: Bucket) -> SelectionPlan:
        """Cuts a bucket; two thread blocks fit a multiprocessor.

        Raises:
            LaunchError: naming `max_pages`, when it is over `MAX_PAGES`.
        """
        tokens, kv_heads, max_pages = bucket.tokens, bucket.kv_heads, bucket.max_pages
        multiprocessors = bucket.multiprocessors
        if max_pages > MAX_PAGES:
            raise LaunchError(
                f"max_pages: {max_pages}, block selection compares at most {MAX_PAGES} "
                f"({MAX_PAGES * BLOCK} tokens of context)"
            )
        full = max(1, ceil_div(tokens, TILE_TOKENS) * kv_heads)
        splits = max(1, min(8, 2 * multiprocessors // full, max_pages // _STAGE_PAGES))
        splits = max(splits, ceil_div(max_pages, SHARE_PAGES))
        share = ceil_div(max_pages * full, 16 * multiprocessors)
        split_pages = min(512, max(32, round_up(share, _STAGE_PAGES)))
        score_stride = round_up(max_pages, 8)
        return cls(
            tiles=tokens // TILE_TOKENS + bucket.sequences + 1,
            splits=splits,
            split_pages=split_pages,
            page_splits=ceil_div(max_pages, split_pages),
            score_stride=score_stride,
            sums_bytes=round_up(splits * tokens * bucket.heads * 8, 256),
            scores_bytes=round_up(kv_heads * tokens * score_stride * 4, 256),
        )


def workspace_bytes(bucket: Bucket) -> int:
    """Bytes that a selection over a bucket needs while it runs."""
    return SelectionPlan.of(bucket).workspace_bytes


@dataclass(frozen=True)
class ChunkSelection(QueryArguments):
    """The arguments of one selection.

    The step's own keys and compressed keys are in the arena already. Bit b % 32 of word b / 32 of
    `chosen[g, t]` says that query t attends to block b for the heads of KV head g. A dense query and padding
    choose nothing.
    """

    chosen: DeviceArray  # int32 or uint32 [kv_heads, T, ceil(max_pages / 32)]
    workspace: DeviceArray  # uint8 or any, at least workspace_bytes
    rule: SelectionRule
    scale: float | None = None  # of the scores; 1 / sqrt(D) when None

    def __post_init__(self) -> None:
        """Checks everything that sizes and dtypes can tell."""
        self.check_chain()
        self.check_queries(rows_apart=True)
        words = bitmap_words(self.batch.max_pages)
        shape = (self.arena.kv_heads, self.batch.tokens, words)
        check_array("chosen", self.chosen, ("int32", "uint32"), shape, alignment=4)
        self.check_scale(self.scale)

    def plan(self, multiprocessors: int) -> SelectionPlan:
        """How this bucket is cut on a device of `multiprocessors`.

        Raises:
            LaunchError: naming `workspace` when it is too small.
        """
        plan = SelectionPlan.of(self.bucket(multiprocessors))
        check_workspace("workspace", self.workspace, plan.workspace_bytes)
        return plan
