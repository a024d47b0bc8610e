"""What `w4a16_widen` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import KERNEL_DTYPES, DeviceArray, check_array
from plugins_trt.packed.product import WidenedRows
from plugins_trt.w4a16_linear.weights import W4A16Weights


@dataclass(frozen=True)
class W4A16Widen(WidenedRows, W4A16Weights):
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
        self.check_forms()
        self.check_weights(self.outputs, gated=self.gated)
        check_array("out", self.out, tuple(KERNEL_DTYPES), (None, self.inputs))
        self.check_range()
