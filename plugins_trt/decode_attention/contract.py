"""What decode attention takes, how a bucket is cut, the scratch memory it needs, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

WIDE_ROWS = 128
"""Rows (tokens x heads of a group) of a wide tile."""

_HEADS = 16
_MAX_PARTS = 512
_SPARSE_WIDE_PARTS = 16
_LEAST_SHARED = 8  # tokens of a bucket whose sparse queries may share blocks
_SHARED_PARTS = 8
_WIDE_A_MULTIPROCESSOR = 2  # thread blocks of `wide` that share a multiprocessor


@dataclass(frozen=True)
class AttentionPlan:
    """How one bucket is cut and where its scratch memory lies; depends on sizes alone."""

    narrow_parts: int  # parts of the context in `narrow`, 0: it is not launched
    wide_tiles: int  # tiles of 128 rows, 0: `wide` is not launched
    wide_parts: int
    shared_parts: int  # parts of the blocks that sparse queries share, which `wide` takes
    partial_bytes: int  # float32 [T, Hkv, parts, 16, D]
    statistics_bytes: int  # float32 [T, Hkv, parts, 16, 2]

    @property
    def parts(self) -> int:
        """Parts that the scratch memory has room for."""
        return max(self.narrow_parts + self.shared_parts, self.wide_parts)

    @property
    def workspace_bytes(self) -> int:
        """Bytes in all, the partial sums first."""
        return self.partial_bytes + self.statistics_bytes

    @classmethod
    def of(cls, bucket: Bucket, *, sparse: bool, quantized: bool = False) -> AttentionPlan:
        """Cuts a bucket; not `sparse`: every query is dense.

        `quantized`: keys and values are in eight bits.
        """
        tokens, kv_heads, max_pages = bucket.tokens, bucket.kv_heads, bucket.max_pages
        multiprocessors = bucket.multiprocessors
        # One block of `narrow` keeps a multiprocessor's share of the memory busy; two hide each other's gaps when
        # there are more tokens than multiprocessors and no more parts to merge. Over eight bits a block is larger.
        narrow_blocks = multiprocessors if tokens == 1 or quantized else 2 * multiprocessors
        narrow = max(1, min(narrow_blocks // (tokens * kv_heads), max_pages, _MAX_PARTS))
        group = bucket.heads // kv_heads
        tiles = wide = 0
        shared = _SHARED_PARTS if sparse and not quantized and tokens >= _LEAST_SHARED else 0
        if tokens > 1:
            full = ceil_div(tokens * group, WIDE_ROWS)  # when one sequence brings them all
            tiles = tokens * group // WIDE_ROWS + min(bucket.sequences, tokens // 2)
            blocks = _WIDE_A_MULTIPROCESSOR * multiprocessors
            # Beside sparse queries there are few dense ones, over short contexts: most of such blocks would do nothing.
            most = _SPARSE_WIDE_PARTS if sparse else _MAX_PARTS
            wide = max(1, min(blocks // (full * kv_heads), max_pages, most))
            if bucket.sequences == 1 and not sparse:
                narrow, tiles = 0, full
        rows = tokens * kv_heads * max(narrow + shared, wide) * _HEADS
        return cls(
            narrow_parts=narrow,
            wide_tiles=tiles,
            wide_parts=wide,
            shared_parts=shared,
            partial_bytes=round_up(rows * bucket.head_dim * 4, 256),
            statistics_bytes=round_up(rows * 8, 256),
        )

    def of_tiles(self, bucket: Bucket, rows: int) -> AttentionPlan:
        """The same with tiles of so many rows, of which a multiprocessor takes one at a time.

        There are at most as many parts, so the scratch memory is large enough.
        """
        group = bucket.heads // bucket.kv_heads
        full = ceil_div(bucket.tokens * group, rows)
        tiles = full
        if bucket.sequences > 1:
            tiles = bucket.tokens * group // rows + min(bucket.sequences, bucket.tokens // 2)
        parts = max(1, min(bucket.multiprocessors // (full * bucket.kv_heads), self.wide_parts))
        return replace(self, wide_tiles=tiles, wide_parts=parts, shared_parts=min(parts, self.shared_parts))

    def of_many(self, bucket: Bucket, blocks: int) -> AttentionPlan:
        """The same with so many thread blocks of `narrow` on a multiprocessor; as far as the scratch memory has room."""
        parts = blocks * bucket.multiprocessors // (bucket.tokens * bucket.kv_heads)
        return replace(
            self, narrow_parts=max(1, min(parts, bucket.max_pages, self.parts - self.shared_parts))
        )


def workspace_bytes(bucket: Bucket, *, quantized: bool = False) -> int:
    """Bytes of scratch memory that attention over a bucket needs while it runs, sparse or not."""
    return max(
        AttentionPlan.of(bucket, sparse=sparse, quantized=quantized).workspace_bytes
        for sparse in (False, True)
    )


@dataclass(frozen=True)
class DecodeAttention(QueryArguments):
    """The arguments of one attention.

    Query t at position i attends densely while i + 1 < `dense_below`, else to the pages `blocks[t, g]` names; with
    no `blocks` every query is dense. `out` gets zeros for padding.

    Where `local_blocks` is not 0, every list of as many blocks as fit into it holds the first `init_blocks` blocks and
    the last `local_blocks`, the query's own the last of them; those are read once for several tokens of a sequence. (Steps
    of models do not ask for it: where it was measured it was slower, see docs/gpu_runs.md.)
    """

    out: DeviceArray  # [T, H, D]
    workspace: DeviceArray
    blocks: DeviceArray | None = None  # int32 [T, Hkv, total]
    counts: DeviceArray | None = None  # int32 [T, Hkv]
    dense_below: int = 0
    all_sparse: bool = False  # no query is dense, so the launch for those is left out; with `blocks`
    init_blocks: int = 0
    local_blocks: int = 0
    scale: float | None = None  # of the scores; 1 / sqrt(D) when None

    def __post_init__(self) -> None:
        """Checks everything that sizes and dtypes can tell."""
        tokens, kv_heads = self.batch.tokens, self.arena.kv_heads
        self.check_decode()
        self.check_queries()
        check_array("out", self.out, self.arena.dtype, self.q.shape)
        if self.blocks is not None:
            if self.counts is None:
                raise LaunchError("counts: missing, `blocks` needs the number of blocks of each query")
            check_array("blocks", self.blocks, "int32", (tokens, kv_heads, None), alignment=4)
            check_array("counts", self.counts, "int32", (tokens, kv_heads), alignment=4)
            if self.init_blocks + self.local_blocks > self.blocks.shape[2]:
                raise LaunchError(
                    f"local_blocks: {self.local_blocks} and {self.init_blocks} first ones are more than the "
                    f"{self.blocks.shape[2]} blocks of a query"
                )
        elif self.all_sparse:
            raise LaunchError("all_sparse: True, but there are no `blocks`: every query is dense")
        check_at_least("dense_below", self.dense_below, 0)
        check_at_least("init_blocks", self.init_blocks, 0)
        check_at_least("local_blocks", self.local_blocks, 0)
        self.check_scale(self.scale)

    def plan(self, multiprocessors: int) -> AttentionPlan:
        """How this bucket is cut on a device of `multiprocessors`.

        Raises:
            LaunchError: naming `workspace` when it is too small.
        """
        plan = AttentionPlan.of(
            self.bucket(multiprocessors),
            sparse=self.blocks is not None,
            quantized=self.arena.kv_dtype is not None,
        )
        check_workspace("workspace", self.workspace, plan.workspace_bytes)
        return plan
