"""A checkpoint's tensors held against what a decoder needs, and their way into its weights.

A checkpoint that lacks a tensor, has one that nothing maps, or one of another shape is refused, with all of them listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edged.checkpoint import awq, gptq, marlin, ternary
from edged.checkpoint.name_list import listed
from edged.checkpoint.packed import Expected, PackedModule, Shape
from edged.errors import CheckpointError
from edged.models.quantization import TERNARY
from edged.models.weights import WeightSource, WeightSpec, weight_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edged.checkpoint.safetensors_files import WeightFiles
    from edged.models.architecture import Architecture
    from edged.models.quantization import Quantization

FLOATS = ("F64", "F32", "BF16", "F16")
"""Element types that weights may have."""
GPTQ, AWQ, MARLIN = "gptq", "awq", "marlin"


class DenseTensor(NamedTuple):
    """A tensor that is read into rows of a weight as it stands."""

    weight: str
    source: WeightSource


class PackedLinear(NamedTuple):
    """A 4-bit module, and the rows of a weight that it fills from ``start`` on; ``part`` counts a weight's modules."""

    weight: str
    module: str
    shape: Shape
    start: int
    part: int


_MTP_HEAD = re.compile(r"(model\.(?:mtp_)?layers\.\d+\.)(?:eh_proj|input_proj)\.")


@dataclass(frozen=True)
class CheckpointPlan:
    """What is read from a checkpoint, and where it goes.

    Attributes:
        dense: Tensors that are read as they stand, by name.
        packed: 4-bit modules, in the order of the forward.
        layout: Of the packed modules: one of ``gptq``, ``awq``, ``marlin``, ``ternary``; empty where there are none.
    """

    dense: Mapping[str, DenseTensor]
    packed: tuple[PackedLinear, ...]
    layout: str
    quantization: Quantization | None

    @classmethod
    def of(cls, architecture: Architecture, files: WeightFiles) -> CheckpointPlan:
        """Hold a checkpoint's tensors against what the decoder needs; no tensor is read.

        Raises:
            CheckpointError: Tensors are missing, unmapped, of another shape or another element type; lists them.
        """
        quantization = architecture.quantization
        layout = "" if quantization is None else _layout(quantization, files)
        dense: dict[str, DenseTensor] = {}
        packed: list[PackedLinear] = []
        for spec in weight_specs(architecture):
            if spec.packing is None:
                dense.update({source.name: DenseTensor(spec.name, source) for source in spec.sources})
            else:
                packed.extend(_modules(spec, spec.packing.group, layout))
        plan = cls(dense, tuple(packed), layout, quantization)
        plan.check(architecture, files)
        return plan

    def expected(self) -> dict[str, Expected]:
        """Every tensor that the checkpoint may have, by name."""
        tensors = {name: Expected(item.source.shape, FLOATS) for name, item in self.dense.items()}
        for linear in self.packed:
            tensors |= self.tensors_of(linear)
        return tensors

    def tensors_of(self, linear: PackedLinear) -> dict[str, Expected]:
        """The tensors that a 4-bit module has in the checkpoint or may have, by name."""
        tensors = self._layout_of(linear)
        # Checked when it is read: zeros beside a linear that has no bias are harmless, and common in old files.
        bias = f"{linear.module}.bias"
        if bias not in self.dense:
            tensors[bias] = Expected((linear.shape.outputs,), FLOATS, needed=False)
        return tensors

    def check(self, architecture: Architecture, files: WeightFiles) -> None:
        """Refuse a checkpoint that does not fit, with everything that does not.

        Raises:
            CheckpointError: As :meth:`of`.
        """
        expected = self.expected()
        missing = [name for name, item in expected.items() if item.needed and name not in files]
        heads = _mtp_heads(files)
        unmapped = [
            name
            for name in files.names()
            if name not in expected and not _is_redundant(name, architecture) and not name.startswith(heads)
        ]
        found = {name: files.info(name) for name in expected if name in files}
        shapes = [
            f"{name} is {list(info.shape)} instead of {list(expected[name].shape)}"
            for name, info in found.items()
            if tuple(info.shape) != expected[name].shape
        ]
        dtypes = [
            f"{name} is {info.dtype} instead of {' or '.join(expected[name].dtypes)}"
            for name, info in found.items()
            if info.dtype not in expected[name].dtypes
        ]
        faults = [
            f"{len(names)} {what}: {listed(names)}"
            for what, names in (
                ("tensors are missing", missing),
                ("tensors have no place in this architecture", unmapped),
                ("tensors have shapes that contradict config.json", shapes),
                ("tensors have element types that they cannot have", dtypes),
            )
            if names
        ]
        if faults:
            kind = f"{self.layout} " if self.layout else ""
            raise CheckpointError(
                f"{files.folder}: the weights do not fit the {kind}{architecture.model_type} model: {'; '.join(faults)}"
            )

    def read(self, files: WeightFiles, linear: PackedLinear) -> PackedModule:
        """Read a 4-bit module.

        Raises:
            CheckpointError: The file changed, or holds what the format does not allow; names the tensor.
        """
        quantization = self.quantization
        if quantization is None:
            raise ValueError(f"{linear.module}: the checkpoint has no 4-bit linears")
        if self.layout == MARLIN:
            return marlin.read(files, linear.module, linear.shape)
        if self.layout == AWQ:
            return awq.read(files, linear.module)
        if self.layout == TERNARY:
            return ternary.read(files, linear.module)
        return gptq.read(
            files,
            linear.module,
            linear.shape,
            act_order=quantization.act_order,
            zero_offset=quantization.zero_offset,
        )

    def _layout_of(self, linear: PackedLinear) -> dict[str, Expected]:
        if self.layout == MARLIN:
            return marlin.expected(linear.module, linear.shape)
        if self.layout == AWQ:
            return awq.expected(linear.module, linear.shape)
        if self.layout == TERNARY:
            return ternary.expected(linear.module, linear.shape)
        act_order = self.quantization is not None and self.quantization.act_order
        return gptq.expected(linear.module, linear.shape, act_order=act_order)


def _layout(quantization: Quantization, files: WeightFiles) -> str:
    """How the files have their 4-bit linears.

    Raises:
        CheckpointError: The files are in Marlin's layout, and the configuration asks for what that has not.
    """
    if quantization.method != GPTQ or not marlin.is_marlin(files):
        return quantization.method
    if quantization.act_order:
        raise CheckpointError(
            f"{files.folder}: quantization_config.desc_act is true, which files in Marlin's layout do not have"
        )
    return MARLIN


def _modules(spec: WeightSpec, group: int, layout: str) -> Iterable[PackedLinear]:
    outputs, inputs = spec.shape
    if layout == MARLIN:
        name = marlin.fused_name([source.module for source in spec.sources])
        yield PackedLinear(spec.name, name, Shape(outputs, inputs, group), 0, 0)
        return
    for part, source in enumerate(spec.sources):
        yield PackedLinear(
            spec.name, source.module, Shape(source.shape[0], inputs, group), source.start, part
        )


def _mtp_heads(files: WeightFiles) -> tuple[str, ...]:
    """What the tensors of heads for multi-token prediction begin with: drafts, which the model runs without."""
    return tuple(sorted({found[1] for name in files.names() if (found := _MTP_HEAD.match(name)) is not None}))


def _is_redundant(name: str, architecture: Architecture) -> bool:
    """Whether a tensor repeats what is known: the tied head, or the table that rope parameters already give."""
    return (architecture.tied and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")
