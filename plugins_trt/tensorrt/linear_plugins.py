"""`edged::W4A16Linear` and `edged::TernaryLinear`: products with packed weights as TensorRT nodes.

The weights are inputs, as the kernels read them. A step of more rows than one launch takes is multiplied some rows at a
time, on one workspace.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from plugins_trt.contract import ELEMENT_BYTES, DeviceArray
from plugins_trt.packed.tiles import tiles_of
from plugins_trt.tensorrt.names import (
    TERNARY_LINEAR,
    TERNARY_LINEAR_VERSION,
    W4A16_LINEAR,
    W4A16_LINEAR_VERSION,
)
from plugins_trt.tensorrt.operator import PluginOperator, Port
from plugins_trt.tensorrt.sessions import session_of
from plugins_trt.ternary_linear import contract as ternary_contract
from plugins_trt.ternary_linear import layout as ternary_layout
from plugins_trt.ternary_linear.contract import LinearPlan as TernaryPlan
from plugins_trt.w4a16_linear import contract as w4a16
from plugins_trt.w4a16_linear import layout as w4a16_layout
from plugins_trt.w4a16_linear.contract import LinearPlan as W4A16Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MULTIPROCESSORS = 192
"""Most multiprocessors of a device that workspaces are planned for: a plan is built where its GPU need not be."""

TERNARY_ROWS = ternary_contract.SLAB
"""Rows of one launch with ternary weights: the kernels take more, and need as many times the scratch memory for them."""

_ROW_STEP = 8


@dataclass(frozen=True)
class PackedLinearOperator(PluginOperator):
    """Fields of either node.

    Attributes:
        weight: Name of the weight, for messages.
        outputs_of_row: N, gate and up together.
        inputs_of_row: K.
        group: Inputs that share a scale.
        gated: 1 if the weight is ``[gate; up]`` and the node gives ``silu(gate) * up``.
        bias: 1 if an input more holds the bias.
    """

    weight: str
    outputs_of_row: int
    inputs_of_row: int
    group: int
    gated: int
    bias: int

    LAUNCH_ROWS: ClassVar[int]
    """Most rows of one launch."""
    TYPE_VARIABLES: ClassVar[Mapping[str, tuple[str, ...]]] = {"$element": ("float16", "bfloat16")}

    def __post_init__(self) -> None:
        """Refuse sizes that the kernels do not take.

        Raises:
            LaunchError: Naming the group, the inputs or the outputs.
            ValueError: Naming another field.
        """
        for name in ("gated", "bias"):
            if getattr(self, name) not in (0, 1):
                raise ValueError(f"{name}: {getattr(self, name)}, must be 0 or 1")
        self.check_sizes()

    @abc.abstractmethod
    def check_sizes(self) -> None:
        """Refuse sizes that the kernels do not take.

        Raises:
            LaunchError: Naming the group, the inputs or the outputs.
        """

    @property
    @abc.abstractmethod
    def weight_ports(self) -> tuple[Port, Port]:
        """The packed integers, and what scales them."""

    @abc.abstractmethod
    def product(
        self,
        x: DeviceArray,
        weights: Sequence[DeviceArray],
        out: DeviceArray,
        bias: DeviceArray | None,
        workspace: DeviceArray | None,
        *,
        symmetric: bool = False,
    ) -> w4a16.W4A16Linear | ternary_contract.TernaryLinear:
        """The arguments of one launch; `symmetric` says that every zero point of a 4-bit weight is 8.

        Raises:
            LaunchError: Naming the argument that the kernels refuse.
        """

    @property
    def title(self) -> str:
        """With the weight's name."""
        return f"edged::{self.NAME} ({self.weight})"

    @property
    def inputs(self) -> tuple[Port, ...]:
        """M rows."""
        bias = (Port("bias", ("$element",), (self.outputs_of_row,)),) if self.bias else ()
        return (Port("x", ("$element",), ("M", self.inputs_of_row)), *self.weight_ports, *bias)

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The product, rounded once."""
        width = self.outputs_of_row // 2 if self.gated else self.outputs_of_row
        return (Port("out", ("$element",), ("M", width)),)

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        """What the largest launch needs, on the device that needs most of it."""
        return _workspace(self, min(sizes.get("M", self.LAUNCH_ROWS), self.LAUNCH_ROWS))

    def enqueue(
        self, inputs: Sequence[DeviceArray], outputs: Sequence[DeviceArray], workspace: int, stream: int
    ) -> None:
        """Multiply, on the kernels of the stream's session.

        Raises:
            SessionError: No executor runs on this stream.
            LaunchError: The kernels refuse an argument, or need more scratch memory than was planned.
        """
        session = session_of(stream)
        x, tiles, scales = inputs[:3]
        bias, out = inputs[3] if self.bias else None, outputs[0]
        rows = x.shape[0]
        planned = _workspace(self, min(rows, self.LAUNCH_ROWS))
        scratch = DeviceArray(workspace, "uint8", (planned,)) if planned else None
        symmetric = self.weight in session.symmetric
        for first in range(0, rows, self.LAUNCH_ROWS):
            count = min(self.LAUNCH_ROWS, rows - first)
            session.multiply(
                self.product(
                    _rows(x, first, count),
                    (tiles, scales),
                    _rows(out, first, count),
                    bias,
                    scratch,
                    symmetric=symmetric,
                )
            )


@functools.lru_cache(maxsize=1024)
def _workspace(operator: PackedLinearOperator, rows: int) -> int:
    return most_workspace(
        operator.outputs_of_row,
        operator.inputs_of_row,
        rows,
        ternary=isinstance(operator, TernaryLinearOperator),
    )


@functools.lru_cache(maxsize=1024)
def most_workspace(outputs: int, inputs: int, rows: int, *, ternary: bool) -> int:
    """Most bytes that a launch of up to so many rows needs on any device.

    Neither the largest device nor the largest number of rows need be the one that shares the inputs out most.
    """
    of = TernaryPlan.of if ternary else W4A16Plan.of
    return max(
        of(rows=count, outputs=outputs, inputs=inputs, multiprocessors=device).workspace_bytes
        for count in {*range(_ROW_STEP, rows + 1, _ROW_STEP), rows}
        for device in range(1, MULTIPROCESSORS + 1)
    )


def packed_workspace(outputs: int, inputs: int, *, ternary: bool) -> int:
    """Device memory that a node needs while it runs, whatever the step."""
    rows = TERNARY_ROWS if ternary else w4a16.MAX_ROWS
    return most_workspace(outputs, inputs, rows, ternary=ternary)


def _rows(array: DeviceArray, first: int, count: int) -> DeviceArray:
    """Some rows of a matrix without gaps."""
    offset = first * array.shape[1] * ELEMENT_BYTES[array.dtype]
    return DeviceArray(array.pointer + offset, array.dtype, (count, array.shape[1]))


@dataclass(frozen=True)
class W4A16LinearOperator(PackedLinearOperator):
    """4-bit weights, laid as :mod:`plugins_trt.w4a16_linear.layout` says."""

    NAME: ClassVar[str] = W4A16_LINEAR
    VERSION: ClassVar[str] = W4A16_LINEAR_VERSION
    LAUNCH_ROWS: ClassVar[int] = w4a16.MAX_ROWS

    def check_sizes(self) -> None:
        """Hold them against the layout."""
        w4a16_layout.check_sizes(self.outputs_of_row, self.inputs_of_row, self.group, gated=bool(self.gated))

    @property
    def weight_ports(self) -> tuple[Port, Port]:
        """``tiles`` and ``groups``."""
        tiles = tiles_of(self.outputs_of_row)
        return (
            Port("tiles", ("int32",), (tiles, self.inputs_of_row // w4a16_layout.STEP, 32, 4)),
            Port("groups", ("int32",), (tiles, self.inputs_of_row // self.group, 8, 2)),
        )

    def product(
        self,
        x: DeviceArray,
        weights: Sequence[DeviceArray],
        out: DeviceArray,
        bias: DeviceArray | None,
        workspace: DeviceArray | None,
        *,
        symmetric: bool = False,
    ) -> w4a16.W4A16Linear:
        """Of up to `LAUNCH_ROWS` rows."""
        tiles, groups = weights
        return w4a16.W4A16Linear(
            x,
            tiles,
            groups,
            out,
            bias,
            workspace=workspace,
            gated=bool(self.gated),
            symmetric=symmetric,
        )


@dataclass(frozen=True)
class TernaryLinearOperator(PackedLinearOperator):
    """Ternary weights, laid as :mod:`plugins_trt.ternary_linear.layout` says."""

    NAME: ClassVar[str] = TERNARY_LINEAR
    VERSION: ClassVar[str] = TERNARY_LINEAR_VERSION
    LAUNCH_ROWS: ClassVar[int] = TERNARY_ROWS

    def check_sizes(self) -> None:
        """Hold them against the layout."""
        ternary_layout.check_sizes(
            self.outputs_of_row, self.inputs_of_row, self.group, gated=bool(self.gated)
        )

    @property
    def weight_ports(self) -> tuple[Port, Port]:
        """``tiles`` and ``scales``."""
        tiles = tiles_of(self.outputs_of_row)
        blocks = ternary_layout.blocks_of(self.inputs_of_row)
        scales = ternary_layout.scales_shape(self.outputs_of_row, self.inputs_of_row, self.group)
        return Port("tiles", ("int32",), (tiles, blocks, 32, 4)), Port("scales", ("int32",), scales)

    def product(
        self,
        x: DeviceArray,
        weights: Sequence[DeviceArray],
        out: DeviceArray,
        bias: DeviceArray | None,
        workspace: DeviceArray | None,
        *,
        symmetric: bool = False,  # noqa: ARG002 - ternary weights have no zero points
    ) -> ternary_contract.TernaryLinear:
        """Of up to `LAUNCH_ROWS` rows."""
        tiles, scales = weights
        return ternary_contract.TernaryLinear(
            x, tiles, scales, out, bias, workspace=workspace, gated=bool(self.gated)
        )
