"""Constant weights of a graph: those of dense products, for a plan that is stripped of them and refitted when it is loaded.

In the graph they are initializers whose bytes lie in a file beside it. The builder gives TensorRT a file without
content: weights that are marked refittable may have any value, so that one plan serves every checkpoint of a shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx import TensorProto

from edged.engine.onnx_nodes import ELEMENT_TYPES
from edged.models.cuda_weights import cuda_packed
from edged.models.weights import EMBEDDING, weight_specs
from plugins_trt.contract import ELEMENT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from edged.models.architecture import Architecture

FILE = "weights"
"""Name of the file beside the graph."""

_ALIGNMENT = 4096
_MATRIX = 2


@dataclass(frozen=True)
class HeldWeight:
    """One of them; no two share a place, for TensorRT tells weights apart by their address."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return ELEMENT_BYTES[self.dtype] * self.elements

    def to_onnx(self) -> TensorProto:
        """As an initializer that names the file."""
        tensor = TensorProto(
            name=self.name,
            data_type=ELEMENT_TYPES[self.dtype],
            dims=self.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (("location", FILE), ("offset", self.offset), ("length", self.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def held_weights(architecture: Architecture, dtype: str) -> tuple[HeldWeight, ...]:
    """The matrices of dense products, in the order of the forward.

    The embedding is read by rows and stays an input; the head of a tied model, which is the embedding, too.
    """
    packed = {each.name for each in cuda_packed(architecture)}
    held, offset = [], 0
    for spec in weight_specs(architecture):
        if len(spec.shape) != _MATRIX or spec.name in packed or spec.name == EMBEDDING:
            continue
        held.append(HeldWeight(spec.name, dtype, spec.shape, offset))
        offset += -(-held[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(held)


def total_bytes(held: tuple[HeldWeight, ...]) -> int:
    """Length of a file that holds them all."""
    return held[-1].offset + held[-1].nbytes if held else 0


def write_blank(folder: Path, held: tuple[HeldWeight, ...]) -> None:
    """Make the file as zeros that take no room on the disk."""
    with (folder / FILE).open("xb") as file:
        file.truncate(total_bytes(held))
