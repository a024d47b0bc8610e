"""What `skinny_linear` takes, how its work is cut, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import (
    KERNEL_DTYPES,
    DeviceArray,
    LaunchError,
    ceil_div,
    check_array,
    check_rows,
)

MAX_ROWS = 16
"""Rows of x of one launch."""

STEP = 32
"""Elements of a row of weights that a warp takes at a time; the inputs are a multiple of it."""

TILE = 16
"""Outputs that a thread block computes together."""


@dataclass(frozen=True)
class SkinnyLinear:
    """out = scale * (x weightᵀ + bias), accumulated in fp32 and rounded once; out is fp32 or x's dtype."""

    x: DeviceArray  # [M, K], rows may lie apart
    weight: DeviceArray  # [N, K]
    out: DeviceArray  # [M, N]
    bias: DeviceArray | None = None  # [N]
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("weight", self.weight, tuple(KERNEL_DTYPES), (None, None))
        outputs, inputs = self.weight.shape
        if inputs % STEP:
            raise LaunchError(f"weight: rows of {inputs} elements, must be a multiple of {STEP}")
        if len(self.x.shape) != 2 or not 1 <= self.x.shape[0] <= MAX_ROWS:
            raise LaunchError(f"x: shape {self.x.shape}, must be 1 to {MAX_ROWS} rows of {inputs}")
        check_rows("x", self.x, self.weight.dtype, (None, inputs))
        dtypes = (self.weight.dtype, "float32")
        check_array("out", self.out, dtypes, (self.x.shape[0], outputs), alignment=4)
        if self.bias is not None:
            check_array("bias", self.bias, self.weight.dtype, (outputs,))

    @property
    def row_stride(self) -> int:
        """Elements from a row of x to the next."""
        return check_rows("x", self.x, self.weight.dtype, self.x.shape)

    @property
    def wide(self) -> bool:
        """Whether the result is fp32."""
        return self.out.dtype == "float32"


@dataclass(frozen=True)
class SkinnyGated:
    """out = silu(x gateᵀ) * (x upᵀ) with the weights one below the other, accumulated in fp32 and rounded once."""

    x: DeviceArray  # [M, K], rows may lie apart
    weight: DeviceArray  # [2 N, K]: gate, then up
    out: DeviceArray  # [M, N]
    bias: DeviceArray | None = None  # [2 N]

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("weight", self.weight, tuple(KERNEL_DTYPES), (None, None))
        outputs, inputs = self.weight.shape
        if outputs % 2:
            raise LaunchError(f"weight: {outputs} rows, must be those of gate and as many of up")
        if inputs % STEP:
            raise LaunchError(f"weight: rows of {inputs} elements, must be a multiple of {STEP}")
        if len(self.x.shape) != 2 or not 1 <= self.x.shape[0] <= MAX_ROWS:
            raise LaunchError(f"x: shape {self.x.shape}, must be 1 to {MAX_ROWS} rows of {inputs}")
        check_rows("x", self.x, self.weight.dtype, (None, inputs))
        check_array("out", self.out, self.weight.dtype, (self.x.shape[0], outputs // 2), alignment=4)
        if self.bias is not None:
            check_array("bias", self.bias, self.weight.dtype, (outputs,))

    @property
    def row_stride(self) -> int:
        """Elements from a row of x to the next."""
        return check_rows("x", self.x, self.weight.dtype, self.x.shape)


def grid(outputs: int, thread_blocks: int, tile: int = TILE) -> int:
    """Thread blocks of a launch: each takes as many tiles as the others, one more at most, all at the same time.

    Args:
        outputs: N.
        thread_blocks: that the device runs at once.
        tile: outputs of a tile.
    """
    tiles = ceil_div(outputs, tile)
    return ceil_div(tiles, ceil_div(tiles, thread_blocks))
