"""4-bit weights as arguments: their sizes, and their refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins_trt.contract import LaunchError, check_array
from plugins_trt.w4a16_linear.layout import STEP, check_sizes

if TYPE_CHECKING:
    from plugins_trt.contract import DeviceArray


class W4A16Weights:
    """What all that reads such weights has in common; their layout is layout.py's."""

    tiles: DeviceArray  # int32 or uint32 [tiles, K / 64, 32, 4]
    groups: DeviceArray  # int32 or uint32 [tiles, K / G, 8, 2]

    @property
    def inputs(self) -> int:
        """K."""
        return self.tiles.shape[1] * STEP

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.groups.shape[1]

    def check_forms(self) -> None:
        """Refuses tiles and groups of another form.

        Raises:
            LaunchError: naming `tiles` or `groups`.
        """
        words = ("int32", "uint32")
        check_array("tiles", self.tiles, words, (None, None, 32, 4))
        check_array("groups", self.groups, words, (self.tiles.shape[0], None, 8, 2))

    def check_weights(self, outputs: int, *, gated: bool) -> None:
        """Refuses sizes that the kernels do not take.

        Raises:
            LaunchError: naming `groups`, `group`, `inputs` or `outputs`.
        """
        if self.inputs % self.groups.shape[1]:
            raise LaunchError(
                f"groups: {self.groups.shape[1]} groups of {self.inputs} inputs, which do not divide"
            )
        check_sizes(outputs, self.inputs, self.group, gated=gated)
