"""What a plugin says of itself, without TensorRT: fields, inputs, outputs, workspace and what it does.

An operator is a frozen dataclass; its fields (int, float or str) are the node's attributes in the graph and the
plugin's serialized fields in a plan. `base` turns the class into a TensorRT plugin and its creator.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugins_trt.contract import DeviceArray

FIELD_TYPES = {"int": int, "float": float, "str": str}

Size = int | str
"""Of a dimension: a number, or a name that stands for one size throughout the node (``T``), or for it plus one
(``S+1``)."""


class PluginError(ValueError):
    """A node, its tensors or its fields are not what the plugin takes; the message begins with the node."""


@dataclass(frozen=True)
class Port:
    """An input or output: its name, the element types it may have, and its shape.

    A type in ``dtypes`` that begins with ``$`` is a variable: every port that names it has the same type, one of
    `PluginOperator.TYPE_VARIABLES`.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[Size, ...]


class PluginOperator(abc.ABC):
    """Base of the operators; subclasses are frozen dataclasses of int, float and str fields."""

    NAME: ClassVar[str]
    VERSION: ClassVar[str]
    TYPE_VARIABLES: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[Port, ...]:
        """The inputs, in order."""

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[Port, ...]:
        """The outputs, in order; each name in their shapes stands in an input's too."""

    @abc.abstractmethod
    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        """Device memory that any step up to these sizes needs while the node runs."""

    @abc.abstractmethod
    def enqueue(
        self,
        inputs: Sequence[DeviceArray],
        outputs: Sequence[DeviceArray],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue the work on a CUDA stream (its handle); no synchronization, no allocation."""

    @property
    def title(self) -> str:
        """How messages name the node."""
        return f"edged::{self.NAME}"

    @classmethod
    def field_types(cls) -> dict[str, type]:
        """Type of each field, by name, in order."""
        return {
            each.name: FIELD_TYPES[each.type if isinstance(each.type, str) else each.type.__name__]
            for each in dataclasses.fields(cls)  # type: ignore[arg-type]
        }

    @classmethod
    def from_fields(cls, node: str, values: Mapping[str, Any]) -> PluginOperator:
        """Make the operator from a node's attributes or a plan's fields.

        Args:
            node: For messages.
            values: Every field by name.

        Raises:
            PluginError: A field is missing, unknown, of another type, or has a value that the operator refuses.
        """
        where = f"edged::{cls.NAME} ({node})"
        types = cls.field_types()
        missing = [name for name in types if name not in values]
        unknown = [name for name in values if name not in types]
        if missing or unknown:
            faults = [
                f"{what} {', '.join(names)}"
                for what, names in (("lacks", missing), ("has unknown", unknown))
                if names
            ]
            raise PluginError(
                f"{where}: {' and '.join(faults)}: the graph or plan was made by another version; build it again"
            )
        for name, kind in types.items():
            if not isinstance(values[name], kind) or isinstance(values[name], bool):
                raise PluginError(
                    f"{where}: field {name} is {values[name]!r}, must be {_KINDS[kind]}: the graph or plan was made by "
                    "another version; build it again"
                )
        try:
            return cls(**values)
        except ValueError as error:
            raise PluginError(f"{where}: {error}") from None

    def check_dtypes(self, inputs: Sequence[str]) -> dict[str, str]:
        """Hold the inputs' element types against the ports.

        Returns:
            What each type variable stands for.

        Raises:
            PluginError: Another number of inputs, or one of another type; names it.
        """
        if len(inputs) != len(self.inputs):
            names = ", ".join(port.name for port in self.inputs)
            raise PluginError(f"{self.title}: {len(inputs)} inputs, must be {len(self.inputs)}: {names}")
        bound: dict[str, str] = {}
        for port, dtype in zip(self.inputs, inputs, strict=True):
            self.check_dtype(port, dtype, bound, "input")
        return bound

    def check_dtype(self, port: Port, dtype: str, bound: dict[str, str], what: str) -> None:
        """Hold one port's element type against it; ``bound`` gains the type variables that it fixes.

        Raises:
            PluginError: It is another; names the port.
        """
        allowed: list[str] = []
        for each in port.dtypes:
            if not each.startswith("$"):
                allowed.append(each)
            elif each in bound:
                allowed.append(bound[each])
            else:
                allowed.extend(self.TYPE_VARIABLES[each])
                if dtype in self.TYPE_VARIABLES[each]:
                    bound[each] = dtype
        if dtype not in allowed:
            raise PluginError(f"{self.title}: {what} {port.name} is {dtype}, must be {' or '.join(allowed)}")

    def check_shapes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Hold the inputs' shapes against the ports; a size of -1 (not known yet) fits everything.

        Returns:
            The size that each name stands for, where it is known.

        Raises:
            PluginError: An input has another number of dimensions or a size that contradicts; names it.
        """
        sizes: dict[str, int] = {}
        for port, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(port.shape):
                raise PluginError(
                    f"{self.title}: input {port.name} has shape {_shown(shape)}, must be {_shown(port.shape)}"
                )
            for found, wanted in zip(shape, port.shape, strict=True):
                if found < 0:
                    continue
                if isinstance(wanted, int):
                    expected = wanted
                else:
                    name, offset = _symbol(wanted)
                    expected = sizes.setdefault(name, found - offset) + offset
                if found != expected:
                    known = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                    raise PluginError(
                        f"{self.title}: input {port.name} has shape {_shown(shape)}, must be {_shown(port.shape)}"
                        + (f" with {known}" if known else "")
                    )
        return sizes


_KINDS = {int: "an integer", float: "a number", str: "a text"}


def _symbol(size: str) -> tuple[str, int]:
    """Name and offset of ``T`` or ``S+1``."""
    name, _, offset = size.partition("+")
    return name, int(offset or 0)


def _shown(shape: Sequence[object]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
