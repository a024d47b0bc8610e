"""What the arguments of products with packed weights, and of their widening, have in common: sizes, checks, pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins_trt.contract import LaunchError, check_array, check_rows, check_workspace
from plugins_trt.packed.tiles import TILE, tiles_of

if TYPE_CHECKING:
    from plugins_trt.contract import DeviceArray

OCTET = 8
"""Outputs that are widened together."""


class PackedProduct:
    """out = x weightᵀ + bias + residual, or of gated weights [gate; up] silu(gate) * up."""

    x: DeviceArray  # [M, K], rows may lie apart
    tiles: DeviceArray  # [tiles, ..]
    out: DeviceArray  # [M, N], gated [M, N / 2]
    bias: DeviceArray | None  # [N]
    residual: DeviceArray | None  # [M, N], not of gated weights
    workspace: DeviceArray | None
    gated: bool

    @property
    def rows(self) -> int:
        """M."""
        return self.x.shape[0]

    @property
    def outputs(self) -> int:
        """N, gate and up together."""
        return self.out.shape[1] * (2 if self.gated else 1)

    @property
    def row_stride(self) -> int:
        """Elements from a row of x to the next."""
        return check_rows("x", self.x, self.x.dtype, self.x.shape)

    def check_results(self) -> None:
        """Refuses results of other sizes than the weights', and what is added to them where its shape is another.

        Raises:
            LaunchError: naming `out`, `bias` or `residual`.
        """
        tiles, dtype = self.tiles.shape[0], self.x.dtype
        if tiles_of(self.outputs) != tiles:
            raise LaunchError(
                f"out: shape {self.out.shape}, must be of {tiles} tiles of {TILE} outputs"
                f"{' (gate and up)' if self.gated else ''}"
            )
        if self.bias is not None:
            check_array("bias", self.bias, dtype, (self.outputs,), alignment=2)
        if self.residual is not None:
            if self.gated:
                raise LaunchError("residual: given, but gated outputs are no branch of the residual stream")
            check_array("residual", self.residual, dtype, self.out.shape, alignment=2)

    def check_workspace(self, needed: int) -> None:
        """Refuses a workspace that is missing or too small where ``needed`` bytes are.

        Raises:
            LaunchError: naming `workspace`.
        """
        if not needed:
            return
        if self.workspace is None:
            raise LaunchError(f"workspace: missing, this product needs {needed} bytes")
        check_workspace("workspace", self.workspace, needed)

    def pointers(self, scales: DeviceArray, *, in_clusters: bool) -> tuple[int, ...]:
        """Those that the kernels' `Linear` structs begin with; clusters that add up shares have no workspace."""
        return (
            self.x.pointer,
            self.tiles.pointer,
            scales.pointer,
            self.out.pointer,
            0 if self.bias is None else self.bias.pointer,
            0 if self.residual is None else self.residual.pointer,
            0 if self.workspace is None or in_clusters else self.workspace.pointer,
        )


class WidenedRows:
    """out = rows `first` to `first` + R of the weight.

    The rows are in the order of the checkpoint, not in that of the tiles: of gated weights all of gate come first, then
    all of up.
    """

    tiles: DeviceArray  # [tiles, ..]
    out: DeviceArray  # [R, K]
    outputs: int
    first: int
    gated: bool

    @property
    def rows(self) -> int:
        """R."""
        return self.out.shape[0]

    @property
    def octets(self) -> tuple[int, int]:
        """The first that is widened, and those of gate, 0 of weights that are not gated."""
        return self.first // OCTET, self.outputs // 2 // OCTET if self.gated else 0

    def check_range(self) -> None:
        """Refuses outputs that are not the tiles', and rows that they do not have.

        Raises:
            LaunchError: naming `outputs`, `first` or `out`.
        """
        if tiles_of(self.outputs) != self.tiles.shape[0]:
            raise LaunchError(
                f"outputs: {self.outputs}, must be those of {self.tiles.shape[0]} tiles of {TILE}"
            )
        if self.first % OCTET or not 0 <= self.first < self.outputs:
            raise LaunchError(f"first: {self.first}, must be a multiple of {OCTET} below {self.outputs}")
        if self.first + self.rows > self.outputs:
            raise LaunchError(f"out: {self.rows} rows, must be at most {self.outputs - self.first}")
