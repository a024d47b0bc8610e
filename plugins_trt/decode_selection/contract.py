"""What decode block selection takes, the scratch memory it needs, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import (
    DeviceArray,
    LaunchError,
    QueryArguments,
    SelectionRule,
    ceil_div,
    check_array,
    check_workspace,
    round_up,
)

WARPS = 16  # of a thread block, but for those of many tokens
MANY = 32
"""Tokens of a bucket from which thread blocks share heads and keys in shared memory."""
KEYS = 256  # compressed keys that a thread block of many tokens takes
TILES = (2, 4, 8, 16)  # tokens that a thread block takes
GROUP_KEYS = 128  # compressed keys that a thread block of `lse_groups` takes
GROUP_LSE_TILES = (4, 8, 16)
GROUP_SCORE_TILES = (8, 16, 32)
MAX_PAGES = 8192
"""Pages of a table that is compared: 524 288 tokens."""

_HEADS = 16
_NODE_KEYS = 4


@dataclass(frozen=True)
class SelectionPlan:
    """How one bucket is cut and where its scratch memory lies; depends on sizes alone."""

    lse_parts: int  # thread blocks along the coarse (or fine) keys
    group_lse_parts: int  # the same of warpgroups
    score_parts: int  # thread blocks along the fine keys
    lse_bytes: int  # float32 [T, Hkv, (lse_parts or group_lse_parts) + 1, 16]
    score_stride: int  # blocks of a row of scores
    scores_bytes: int  # float32 [T, Hkv, score_stride]
    first_bytes: int  # float32 [T, Hkv, score_parts]
    nodes_bytes: int  # float32 [T, Hkv, 4, 2]

    @property
    def workspace_bytes(self) -> int:
        """Bytes in all, in the order above."""
        return self.lse_bytes + self.scores_bytes + self.first_bytes + self.nodes_bytes

    @classmethod
    def of(cls, *, tokens: int, kv_heads: int, max_pages: int, lse: str) -> SelectionPlan:
        """Cuts a bucket.

        Raises:
            LaunchError: naming `max_pages`, when a table is longer than can be compared.
        """
        if max_pages > MAX_PAGES:
            raise LaunchError(
                f"max_pages: {max_pages}, block selection compares at most {MAX_PAGES} ({MAX_PAGES * 64} tokens)"
            )
        score_parts = ceil_div(max_pages, WARPS * 4)
        lse_parts = score_parts if lse == "exact" else ceil_div(max_pages, WARPS * 16)
        group_lse_parts = ceil_div(max_pages * (4 if lse == "exact" else 1), GROUP_KEYS)
        return cls(
            lse_parts=lse_parts,
            group_lse_parts=group_lse_parts,
            score_parts=score_parts,
            lse_bytes=round_up(tokens * kv_heads * (max(lse_parts, group_lse_parts) + 1) * _HEADS * 4, 256),
            score_stride=score_parts * WARPS * 4,
            scores_bytes=round_up(tokens * kv_heads * score_parts * WARPS * 4 * 4, 256),
            first_bytes=round_up(tokens * kv_heads * score_parts * 4, 256),
            nodes_bytes=round_up(tokens * kv_heads * _NODE_KEYS * 8, 256),
        )


def tile_of(*, tokens: int, parts: int, kv_heads: int, at_once: int, tiles: tuple[int, ...] = TILES) -> int:
    """Tokens that a thread block takes: as few as let all blocks run `at_once`, or the most there are.

    A block takes its tokens one after the other.
    """
    for tile in tiles:
        if parts * kv_heads * ceil_div(tokens, tile) <= at_once:
            return tile
    return tiles[-1] if tokens > tiles[-2] else tiles[-2]


def workspace_bytes(*, tokens: int, kv_heads: int, max_pages: int, lse: str = "approximate") -> int:
    """Bytes of scratch memory that a selection over a bucket of `tokens` needs while it runs."""
    return SelectionPlan.of(tokens=tokens, kv_heads=kv_heads, max_pages=max_pages, lse=lse).workspace_bytes


@dataclass(frozen=True)
class DecodeSelection(QueryArguments):
    """The arguments of one selection; the step's keys and compressed keys are appended already.

    `blocks[t, g]` gets the blocks that query t attends to for the heads of KV head g, ascending, -1 behind the
    last; `counts[t, g]` their number: 0 for a dense query and for padding. `arrived` is zero before the first
    launch and zero again after each.
    """

    blocks: DeviceArray  # int32 [T, Hkv, rule.total]
    counts: DeviceArray  # int32 [T, Hkv]
    workspace: DeviceArray
    arrived: DeviceArray  # int32 [S, Hkv]
    rule: SelectionRule
    node_fine: DeviceArray | None = None  # [T, Hkv, D], trees only
    node_coarse: DeviceArray | None = None  # [T, Hkv, D], trees only
    scale: float | None = None  # of the scores; 1 / sqrt(D) when None

    def __post_init__(self) -> None:
        """Checks everything that sizes and dtypes can tell."""
        tokens, kv_heads = self.batch.tokens, self.arena.kv_heads
        self.check_decode()
        self.check_queries()
        check_array("blocks", self.blocks, "int32", (tokens, kv_heads, self.rule.total), alignment=4)
        check_array("counts", self.counts, "int32", (tokens, kv_heads), alignment=4)
        check_array("arrived", self.arrived, "int32", (self.batch.sequences, kv_heads), alignment=4)
        self.check_nodes(self.node_fine, self.node_coarse)
        self.check_scale(self.scale)
        check_workspace("workspace", self.workspace, self.plan.workspace_bytes)

    @property
    def plan(self) -> SelectionPlan:
        """How this bucket is cut."""
        return SelectionPlan.of(
            tokens=self.batch.tokens,
            kv_heads=self.arena.kv_heads,
            max_pages=self.batch.max_pages,
            lse=self.rule.lse,
        )
