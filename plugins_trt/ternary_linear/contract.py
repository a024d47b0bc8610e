"""What `ternary_linear` takes, how its work is cut, and its refusals."""

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
from plugins_trt.packed.cut import MAX_ROWS, most_shares
from plugins_trt.packed.product import PackedProduct, WidenedRows
from plugins_trt.packed.tiles import TILE, tiles_of
from plugins_trt.ternary_linear.layout import BLOCK, GROUPS, blocks_of, check_sizes

SLAB = 32
"""Rows of x that a thread block takes at most."""

FEW_ROWS = 2
"""Up to here, and where x is small, the weights stream past an x that lies whole in shared memory."""

FEW_BYTES = 64 << 10
"""Of such an x."""

WARPS = 16
"""Of a thread block that keeps x whole."""

MAX_SUM_BYTES = 6 << 10
"""Of the sums of such a thread block."""

BLOCK_TILES = 8
"""Tiles of a thread block that streams x too."""

_MAX_SPLITS = 8
_SPLIT_INPUTS = 512  # of a share of the inputs, at least


def sum_bytes(tiles: int, splits: int, rows: int) -> int:
    """Of the sums of a thread block that keeps x whole."""
    return 4 * (TILE + 4) * tiles * splits * rows


@dataclass(frozen=True)
class FewPlan:
    """How a product is cut whose x lies whole in shared memory."""

    splits: int  # shares of the inputs, of the warps of a thread block
    thread_blocks: int

    @classmethod
    def of(cls, rows: int, tiles: int, blocks: int, multiprocessors: int) -> FewPlan | None:
        """One thread block a multiprocessor, or some each; None where x is too large."""
        if rows > FEW_ROWS or rows * blocks * BLOCK * 2 > FEW_BYTES:
            return None
        thread_blocks = 0
        while thread_blocks < tiles:
            thread_blocks = min(tiles, thread_blocks + multiprocessors)
            most = ceil_div(tiles, thread_blocks)  # tiles of a thread block

            # The least work of a warp; where that is equal, the fewest shares.
            def of_a_warp(splits: int, most: int = most) -> int:
                return ceil_div(most * splits, WARPS) * ceil_div(blocks // 2, splits)

            fitting = [each for each in (1, 2, 4, 8, 16) if sum_bytes(most, each, rows) <= MAX_SUM_BYTES]
            if fitting:
                return cls(min(fitting, key=of_a_warp), thread_blocks)
        return None


@dataclass(frozen=True)
class LinearPlan:
    """How a product is cut, and its scratch memory; depends on sizes alone."""

    few: FewPlan | None  # where x is small and the device has the memory for it
    splits: int  # shares of the inputs, of thread blocks, where x is streamed
    workspace_bytes: int  # float32 [shares of the inputs, M, 16 tiles], as many as any kernel cuts; 0 without

    @classmethod
    def of(cls, *, rows: int, outputs: int, inputs: int, multiprocessors: int) -> LinearPlan:
        """Cuts a product of up to `rows` rows for a device of `multiprocessors`."""
        check_at_least("multiprocessors", multiprocessors, 1)
        tiles, blocks = tiles_of(outputs), blocks_of(inputs)
        groups = ceil_div(tiles, BLOCK_TILES) * ceil_div(rows, SLAB)
        most = max(1, min(_MAX_SPLITS, inputs // _SPLIT_INPUTS))

        def time(splits: int) -> float:
            # Of a multiprocessor; it runs two thread blocks beside each other, one alone takes more than half of the time.
            rounds = ceil_div(groups * splits, multiprocessors)
            return (1.5 if rounds == 1 else rounds) * ceil_div(blocks, splits) + splits / 8

        splits = min(range(1, most + 1), key=time)
        sums = splits * rows if splits > 1 else 0
        shares = most_shares(tiles, blocks_of(inputs), multiprocessors)
        if rows > FEW_ROWS and shares > 1:
            sums = max(sums, shares * min(rows, MAX_ROWS))
        size = round_up(sums * tiles * TILE * 4, 256)
        return cls(FewPlan.of(rows, tiles, blocks, multiprocessors), splits, size)


@dataclass(frozen=True)
class TernaryLinear(PackedProduct):
    """out = x weightᵀ + bias + residual, accumulated in fp32 and rounded once; the layout of the weights is layout.py's.

    Gated, of weights [gate; up]: out = silu(gate) * up, with no residual. `residual` may be `out`.
    """

    x: DeviceArray  # [M, K], rows may lie apart
    tiles: DeviceArray  # int32 or uint32 [tiles, blocks, 32, 4]
    scales: DeviceArray  # int32 or uint32 [tiles, blocks, 8, 128 / G], or [tiles, 1, 8, 1]
    out: DeviceArray  # [M, N], gated [M, N / 2]
    bias: DeviceArray | None = None  # [N]
    residual: DeviceArray | None = None  # [M, N]
    workspace: DeviceArray | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        dtype = self.x.dtype
        if dtype not in KERNEL_DTYPES:
            raise LaunchError(f"x: dtype {dtype}, must be one of {tuple(KERNEL_DTYPES)}")
        if len(self.x.shape) != 2 or self.x.shape[0] < 1:
            raise LaunchError(f"x: shape {self.x.shape}, must be rows of inputs, one at least")
        check_rows("x", self.x, dtype, (None, None))
        check_array("out", self.out, dtype, (self.rows, None), alignment=2)
        check_weights(self.tiles, self.scales, self.inputs, self.outputs, gated=self.gated)
        self.check_results()

    @property
    def inputs(self) -> int:
        """K."""
        return self.x.shape[1]

    @property
    def scale_count(self) -> int:
        """Scales of an output in a block of inputs; 0: one of all inputs."""
        return scale_count(self.scales)

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


@dataclass(frozen=True)
class TernaryWiden(WidenedRows):
    """out = rows `first` to `first` + R of the weight; the scale, and so the weight, is rounded once.

    The rows are in the order of the checkpoint, not in that of the tiles: of gated weights all of gate come first, then
    all of up.
    """

    tiles: DeviceArray  # int32 or uint32 [tiles, blocks, 32, 4]
    scales: DeviceArray  # int32 or uint32 [tiles, blocks, 8, 128 / G], or [tiles, 1, 8, 1]
    out: DeviceArray  # [R, K]
    outputs: int
    first: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        """Checks shapes, dtypes and the range of rows."""
        check_array("out", self.out, tuple(KERNEL_DTYPES), (None, None))
        check_weights(self.tiles, self.scales, self.inputs, self.outputs, gated=self.gated)
        self.check_range()

    @property
    def inputs(self) -> int:
        """K."""
        return self.out.shape[1]

    @property
    def scale_count(self) -> int:
        """Scales of an output in a block of inputs; 0: one of all inputs."""
        return scale_count(self.scales)


def scale_count(scales: DeviceArray) -> int:
    """Scales of an output in a block of inputs; 0: one of all inputs."""
    return 0 if scales.shape[1] == scales.shape[3] == 1 else scales.shape[3]


def check_weights(tiles: DeviceArray, scales: DeviceArray, inputs: int, outputs: int, *, gated: bool) -> None:
    """Refuses weights of another form, or that are not of so many inputs.

    Raises:
        LaunchError: naming `tiles`, `scales`, `x`, `inputs` or `outputs`.
    """
    words = ("int32", "uint32")
    check_array("tiles", tiles, words, (None, None, 32, 4))
    check_array("scales", scales, words, (tiles.shape[0], None, 8, None))
    blocks, count = tiles.shape[1], scale_count(scales)
    if blocks_of(inputs) != blocks:
        raise LaunchError(
            f"inputs: {inputs}, must be at most {blocks} blocks of {BLOCK}, as tiles has, and no two less"
        )
    possible = tuple(BLOCK // group for group in GROUPS)
    if count and (scales.shape[1] != blocks or count not in possible):
        raise LaunchError(
            f"scales: shape {scales.shape}, must have {blocks} blocks of one of {possible} scales, or one of one"
        )
    check_sizes(outputs, inputs, BLOCK // count if count else inputs, gated=gated)
