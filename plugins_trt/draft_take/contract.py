"""What `draft_take` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import MAX_TREE, DeviceArray, check_array

ROWS = MAX_TREE


@dataclass(frozen=True)
class DraftTake:
    """The rows of the n tokens that one sequence has accepted, so that a draft goes on before the host has seen them.

    Row i < n: `token_ids[i]` is the token drawn at the i-th node of `path`, `hidden_rows[i]` that node's row of the step, and
    `positions[i]` is `lengths + i`; rows behind them are padding (token -1). `starts` becomes 0 and n, `tree_lengths`
    `lengths + n`, and `root_row` n - 1.
    """

    drawn: DeviceArray  # int32 [T], by row of the step
    path: DeviceArray  # int32 [64], rows of the step
    accepted: DeviceArray  # int32 [1], n
    lengths: DeviceArray  # int32 [1], rows that the draft has
    token_ids: DeviceArray  # int32 [64]
    hidden_rows: DeviceArray  # int32 [64]
    positions: DeviceArray  # int32 [64]
    starts: DeviceArray  # int32 [2]
    tree_lengths: DeviceArray  # int32 [1]
    root_row: DeviceArray  # int32 [1]

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("drawn", self.drawn, "int32", (None,), alignment=4)
        for name in ("path", "token_ids", "hidden_rows", "positions"):
            check_array(name, getattr(self, name), "int32", (ROWS,), alignment=4)
        check_array("starts", self.starts, "int32", (2,), alignment=4)
        for name in ("accepted", "lengths", "tree_lengths", "root_row"):
            check_array(name, getattr(self, name), "int32", (1,), alignment=4)
