"""What `w4a16_widen` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import KERNEL_DTYPES, DeviceArray, LaunchError, check_array
from plugins_trt.packed.product import WidenedRows
from plugins_trt.w4a16_linear.layout import STEP, check_sizes


@dataclass(frozen=True)
class W4A16Widen(WidenedRows):
    """out = rows `first` to `first` + R of the weight, `scale * (q - zero)`, rounded once.

    The rows are in the order of the checkpoint, not in that of the tiles: of gated weights all of gate come first, then
    all of up.
    """

    tiles: DeviceArray  # int32 [tiles, K / 64, 32, 4], the layout of w4a16_linear
    groups: DeviceArray  # int32 [tiles, K / G, 8, 2]
    out: DeviceArray  # [R, K]
    outputs: int
    first: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        """Checks shapes, dtypes and the range of rows."""
        words = ("int32", "uint32")
        check_array("tiles", self.tiles, words, (None, None, 32, 4))
        check_array("groups", self.groups, words, (self.tiles.shape[0], None, 8, 2))
        if self.inputs % self.groups.shape[1]:
            raise LaunchError(
                f"groups: {self.groups.shape[1]} groups of {self.inputs} inputs, which do not divide"
            )
        check_sizes(self.outputs, self.inputs, self.group, gated=self.gated)
        check_array("out", self.out, tuple(KERNEL_DTYPES), (None, self.inputs))
        self.check_range()

    @property
    def inputs(self) -> int:
        """K."""
        return self.tiles.shape[1] * STEP

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.groups.shape[1]
