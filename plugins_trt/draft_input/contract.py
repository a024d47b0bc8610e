"""What `draft_input` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import (
    BLOCK,
    KERNEL_DTYPES,
    DeviceArray,
    LaunchError,
    ceil_div,
    check_array,
    check_at_least,
)


def window_blocks(window: int) -> int:
    """Blocks that hold the last `window` tokens wherever they begin: the own one and those before it."""
    return ceil_div(window, BLOCK) + 1


@dataclass(frozen=True)
class DraftInput:
    """The arguments of one launch: R rows.

    Row r of `out` gets the embedding of `token_ids[r]`, times `scale`, beside row `hidden_rows[r]` of `hidden`, each
    divided by its root mean square and multiplied by its norm where there is one; zeros where the token is -1. Row r of
    `blocks` gets the blocks that the query at `positions[r]` attends to, ascending: its own and the `total - 1` before it
    as far as there are any, then -1; `counts` their number. Decode attention takes both.
    """

    embedding: DeviceArray  # [V, H]
    token_ids: DeviceArray  # int32 [R]
    hidden: DeviceArray  # [any, H]
    hidden_rows: DeviceArray  # int32 [R]
    positions: DeviceArray  # int32 [R]
    out: DeviceArray  # [R, 2 H]
    blocks: DeviceArray  # int32 [R, Hkv, total]
    counts: DeviceArray  # int32 [R, Hkv]
    embedding_norm: DeviceArray | None = None  # [H]
    hidden_norm: DeviceArray | None = None  # [H]
    scale: float = 1.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        dtype = self.embedding.dtype
        if dtype not in KERNEL_DTYPES:
            raise LaunchError(f"embedding: dtype {dtype}, must be one of {tuple(KERNEL_DTYPES)}")
        check_array("embedding", self.embedding, dtype, (None, None))
        size = self.embedding.shape[1]
        if size % 8:
            raise LaunchError(f"embedding: rows of {size} elements, must be a multiple of 8")
        check_array("token_ids", self.token_ids, "int32", (None,), alignment=4)
        rows = self.token_ids.shape[0]
        check_at_least("token_ids: rows", rows, 1)
        check_array("hidden", self.hidden, dtype, (None, size))
        check_array("hidden_rows", self.hidden_rows, "int32", (rows,), alignment=4)
        check_array("positions", self.positions, "int32", (rows,), alignment=4)
        check_array("out", self.out, dtype, (rows, 2 * size))
        check_array("blocks", self.blocks, "int32", (rows, None, None), alignment=4)
        check_array("counts", self.counts, "int32", self.blocks.shape[:2], alignment=4)
        for name, norm in (("embedding_norm", self.embedding_norm), ("hidden_norm", self.hidden_norm)):
            if norm is not None:
                check_array(name, norm, dtype, (size,))
        if self.epsilon < 0:
            raise LaunchError(f"epsilon: {self.epsilon}, must not be negative")
