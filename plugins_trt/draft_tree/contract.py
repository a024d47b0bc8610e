"""What `draft_top` and `draft_grow` take, and their refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import MAX_TREE, DeviceArray, LaunchError, ceil_div, check_array, check_at_least

PART = 2048
"""Logits that a thread block looks at."""

MAX_WIDTH = 16
"""Most likeliest tokens of a node."""

MAX_PARTS = 256
"""Most parts of a row of logits: 524 288 tokens."""


def parts_of(vocabulary: int) -> int:
    """Parts that a row of logits is cut into."""
    return ceil_div(vocabulary, PART)


def pool_size(width: int, levels: int) -> int:
    """Nodes of a tree: k + k² (levels - 1)."""
    return width + width * width * (levels - 1)


@dataclass(frozen=True)
class DraftTop:
    """The likeliest tokens of each part of R rows of logits.

    `candidates[r, p]` gets the keys of the `width` largest logits of part p, falling, 0 behind the last: numbers that order
    as the logits do, and of equal logits the smaller id first. `statistics[r, p]` gets the largest logit and the sum of
    exp(logit - largest).
    """

    logits: DeviceArray  # float32 [R, V]
    candidates: DeviceArray  # int64 [R, parts, width]
    statistics: DeviceArray  # float32 [R, parts, 2]

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("logits", self.logits, "float32", (None, None), alignment=4)
        rows, vocabulary = self.logits.shape
        check_at_least("logits: columns", vocabulary, 1)
        parts = parts_of(vocabulary)
        if parts > MAX_PARTS:
            raise LaunchError(f"logits: {vocabulary} columns, must be at most {MAX_PARTS * PART}")
        check_array("candidates", self.candidates, "int64", (rows, parts, None), alignment=8)
        if not 1 <= self.candidates.shape[2] <= MAX_WIDTH:
            raise LaunchError(
                f"candidates: {self.candidates.shape[2]} of each part, must be 1 to {MAX_WIDTH}"
            )
        check_array("statistics", self.statistics, "float32", (rows, parts, 2), alignment=8)


@dataclass(frozen=True)
class DraftGrow:
    """One level of the tree; k is the width, L the number of levels.

    The rows of `candidates` are the nodes that ran last: of level 0 the root alone, of later ones those that the launch
    before chose. The k likeliest tokens below each become its children in the pool (`tokens`, `parents`, and `chances`,
    their probabilities given the parent): level 0 has places 0 to k, level l the k² from k + (l - 1) k² on. Unless it is the
    last level, the k children with the largest joint probability (of equals the first) are what runs next, in the order of
    their places: rows `level k` to `level k + k` of `token_ids`, `positions`, `masks` (bit j: row j is its ancestor or
    itself) and `hidden_rows`, where the layer's output for the parent lies: `root_row` below the root, and row r of level l
    at `first_row + l k + r`.
    """

    candidates: DeviceArray  # int64 [R, parts, k], R = 1 at level 0, k after it
    statistics: DeviceArray  # float32 [R, parts, 2]
    lengths: DeviceArray  # int32 [1], tokens before the tree
    root_row: DeviceArray  # int32 [1]
    tokens: DeviceArray  # int32 [pool]
    parents: DeviceArray  # int32 [pool], -1: the root
    chances: DeviceArray  # float32 [pool]
    joint: DeviceArray  # float32 [k], from one level to the next
    nodes: DeviceArray  # int32 [k], likewise
    token_ids: DeviceArray  # int32 [L k]
    hidden_rows: DeviceArray  # int32 [L k]
    positions: DeviceArray  # int32 [L k]
    masks: DeviceArray  # int64 [L k]
    level: int
    levels: int
    first_row: int
    token_map: DeviceArray | None = None  # int32 [V], the token id of each column of the logits

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_at_least("level", self.level, 0)
        check_at_least("levels", self.levels, self.level + 1)
        check_array("candidates", self.candidates, "int64", (None, None, None), alignment=8)
        rows, parts, width = self.candidates.shape
        if not 1 <= width <= MAX_WIDTH:
            raise LaunchError(f"candidates: {width} of each part, must be 1 to {MAX_WIDTH}")
        if rows != (1 if self.level == 0 else width):
            raise LaunchError(f"candidates: {rows} rows at level {self.level} of width {width}")
        if (self.levels - 1) * width > MAX_TREE:
            raise LaunchError(
                f"levels: {self.levels} of width {width} run {(self.levels - 1) * width} nodes, at most {MAX_TREE}"
            )
        check_array("statistics", self.statistics, "float32", (rows, parts, 2), alignment=8)
        pool = pool_size(width, self.levels)
        for name in ("tokens", "parents"):
            check_array(name, getattr(self, name), "int32", (pool,), alignment=4)
        check_array("chances", self.chances, "float32", (pool,), alignment=4)
        check_array("joint", self.joint, "float32", (width,), alignment=4)
        check_array("nodes", self.nodes, "int32", (width,), alignment=4)
        for name in ("lengths", "root_row"):
            check_array(name, getattr(self, name), "int32", (1,), alignment=4)
        for name in ("token_ids", "hidden_rows", "positions"):
            check_array(name, getattr(self, name), "int32", (self.levels * width,), alignment=4)
        check_array("masks", self.masks, "int64", (self.levels * width,), alignment=8)
        check_at_least("first_row", self.first_row, 0)
        if self.token_map is not None:
            check_array("token_map", self.token_map, "int32", (None,), alignment=4)
