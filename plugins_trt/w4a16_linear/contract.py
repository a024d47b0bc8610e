"""What `w4a16_linear` takes, how its work is cut, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import (
    KERNEL_DTYPES,
    DeviceArray,
    LaunchError,
    ceil_div,
    check_array,
    check_at_least,
    check_rows,
    round_up,
)
from plugins_trt.packed.cut import most_shares
from plugins_trt.packed.product import PackedProduct
from plugins_trt.packed.tiles import TILE, tiles_of
from plugins_trt.w4a16_linear.layout import STEP
from plugins_trt.w4a16_linear.weights import W4A16Weights

MAX_ROWS = 64
"""Rows of x of one launch."""

FEW_ROWS = 16
"""Up to here a multiprocessor's thread blocks take all inputs of their outputs; beyond, shares of them where outputs are few."""

_MAX_SPLITS = 8
_SPLIT_STEPS = 8  # of a share of the inputs, at least


def tiles_of_block(rows: int) -> int:
    """Tiles that a thread block that shares x takes at most."""
    return 8 if rows <= FEW_ROWS else 16


@dataclass(frozen=True)
class LinearPlan:
    """How the inputs are shared out when x is shared, and the scratch memory; depends on sizes alone."""

    splits: int  # shares of the inputs, 1: the output is written at once
    workspace_bytes: int  # float32 [shares of the inputs, M, 16 tiles], as many as any kernel cuts; 0 without

    @classmethod
    def of(cls, *, rows: int, outputs: int, inputs: int, multiprocessors: int) -> LinearPlan:
        """Cuts a product of up to `rows` rows for a device of `multiprocessors`."""
        check_at_least("multiprocessors", multiprocessors, 1)
        tiles = tiles_of(outputs)
        splits, shares = 1, 1
        if rows > FEW_ROWS:
            blocks = ceil_div(tiles, tiles_of_block(rows))
            while 2 * splits <= _MAX_SPLITS and 2 * splits * blocks <= multiprocessors:
                splits *= 2
            while splits > 1 and inputs // STEP // splits < _SPLIT_STEPS:
                splits //= 2
            shares = max(splits, most_shares(tiles, inputs // (2 * STEP), multiprocessors))
        size = round_up(shares * rows * tiles * TILE * 4, 256) if shares > 1 else 0
        return cls(splits, size)


@dataclass(frozen=True)
class W4A16Linear(PackedProduct, W4A16Weights):
    """out = x weightᵀ + bias + residual, accumulated in fp32 and rounded once; the layout of the weights is layout.py's.

    Gated, of weights [gate; up]: out = silu(gate) * up, with no residual. `residual` may be `out`.
    """

    x: DeviceArray  # [M, K], rows may lie apart
    tiles: DeviceArray  # int32 or uint32 [tiles, K / 64, 32, 4]
    groups: DeviceArray  # int32 or uint32 [tiles, K / G, 8, 2]
    out: DeviceArray  # [M, N], gated [M, N / 2]
    bias: DeviceArray | None = None  # [N]
    residual: DeviceArray | None = None  # [M, N]
    workspace: DeviceArray | None = None
    gated: bool = False
    symmetric: bool = False
    """Whether every zero point is 8: some kernels are faster then. Of others, they lose some exactness."""

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        self.check_forms()
        dtype = self.x.dtype
        if dtype not in KERNEL_DTYPES:
            raise LaunchError(f"x: dtype {dtype}, must be one of {tuple(KERNEL_DTYPES)}")
        if len(self.x.shape) != 2 or not 1 <= self.x.shape[0] <= MAX_ROWS:
            raise LaunchError(f"x: shape {self.x.shape}, must be 1 to {MAX_ROWS} rows of {self.inputs}")
        check_rows("x", self.x, dtype, (None, self.inputs))
        check_array("out", self.out, dtype, (self.rows, None), alignment=2)
        self.check_weights(self.outputs, gated=self.gated)
        self.check_results()

    def plan(self, multiprocessors: int) -> LinearPlan:
        """How this product is cut on a device of `multiprocessors`.

        Raises:
            LaunchError: naming `workspace`, when it is missing or too small.
        """
        plan = LinearPlan.of(
            rows=self.rows, outputs=self.outputs, inputs=self.inputs, multiprocessors=multiprocessors
        )
        self.check_workspace(plan.workspace_bytes)
        return plan
