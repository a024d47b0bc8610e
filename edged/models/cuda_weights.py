"""How a model's weights lie on a GPU: packed ones as the kernels read them, the others as everywhere.

A packed LM head is widened at load: its logits are fp32, and the kernels of packed weights round to half precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.models.weights import HEAD, WeightPart, weight_parts, weight_specs
from plugins_trt.packed.tiles import tiles_of
from plugins_trt.ternary_linear import layout as ternary_layout
from plugins_trt.w4a16_linear import layout
from plugins_trt.w4a16_linear.contract import MAX_ROWS

if TYPE_CHECKING:
    from edged.models.architecture import Architecture
    from edged.models.weights import Packing, WeightSpec

GROUPS = ".groups"
"""Follows a packed weight's name, for its scales and zero points: ``layers.3.qkv`` itself holds the tiles."""


@dataclass(frozen=True)
class CudaPacked:
    """One packed weight ``[N, K]`` as the kernels read it.

    In 4 bits as :mod:`plugins_trt.w4a16_linear.layout` says, ternary as :mod:`plugins_trt.ternary_linear.layout`.

    Attributes:
        name: The weight's.
        outputs: N, gate and up together.
        inputs: K.
        group: Inputs that share a scale in the kernels' layout; in the file as many, or a multiple.
        gated: The weight is ``[gate; up]``, and the kernels go on to ``silu(gate) * up``.
        ternary: Whether it is ternary, and not in 4 bits.
    """

    name: str
    outputs: int
    inputs: int
    group: int
    gated: bool
    ternary: bool = False

    @classmethod
    def of(cls, spec: WeightSpec) -> CudaPacked | None:
        """The form of a weight; None where it is as wide as the plan says."""
        if spec.packing is None or spec.name == HEAD:
            return None
        outputs, inputs = spec.shape
        gated = spec.name.endswith(".gate_up")
        return cls(spec.name, outputs, inputs, _kernel_group(spec.packing), gated, spec.packing.ternary)

    @property
    def parts(self) -> tuple[WeightPart, ...]:
        """The tensors that it is made of."""
        tiles = tiles_of(self.outputs)
        if self.ternary:
            blocks = ternary_layout.blocks_of(self.inputs)
            scales = ternary_layout.scales_shape(self.outputs, self.inputs, self.group)
            return (
                WeightPart(self.name, (tiles, blocks, 32, 4), "int32"),
                WeightPart(self.name + GROUPS, scales, "int32"),
            )
        return (
            WeightPart(self.name, (tiles, self.inputs // layout.STEP, 32, 4), "int32"),
            WeightPart(self.name + GROUPS, (tiles, self.inputs // self.group, 8, 2), "int32"),
        )

    @property
    def kernel_rows(self) -> int:
        """Up to so many rows multiply the weight as it is; for more, it is widened, for cuBLAS."""
        return MAX_ROWS if self.ternary else 2 * MAX_ROWS

    def check(self) -> None:
        """Refuse sizes that the kernels do not take.

        Raises:
            LaunchError: Names the group, the inputs or the outputs.
        """
        check = ternary_layout.check_sizes if self.ternary else layout.check_sizes
        check(self.outputs, self.inputs, self.group, gated=self.gated)


def _kernel_group(packing: Packing) -> int:
    """The largest group of the 4-bit kernels that divides the checkpoint's (a scale is then repeated), or this itself."""
    groups = () if packing.ternary else layout.GROUPS
    return max((group for group in groups if packing.group % group == 0), default=packing.group)


def cuda_packed(architecture: Architecture) -> tuple[CudaPacked, ...]:
    """Every weight of a model that stays packed, in the order of the forward."""
    found = (CudaPacked.of(spec) for spec in weight_specs(architecture))
    return tuple(each for each in found if each is not None)


def cuda_weight_parts(spec: WeightSpec) -> tuple[WeightPart, ...]:
    """As :func:`edged.models.weights.weight_parts`, on a GPU."""
    packed = CudaPacked.of(spec)
    if packed is not None:
        return packed.parts
    if spec.packing is not None:
        return (WeightPart(spec.name, spec.shape, ""),)
    return weight_parts(spec)
