"""A growing ONNX graph: nodes, constants and tensor names, with each tensor's element type beside its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from onnx import NodeProto, ValueInfoProto

ELEMENT_TYPES: Mapping[str, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
"""ONNX element types, by dtype name."""

Dim = int | str
"""A size, or the name of one that is known at run time alone."""


@dataclass(frozen=True)
class Value:
    """A tensor of the graph."""

    name: str
    dtype: str


class OnnxNodes:
    """Collects what becomes one ``GraphProto``. Names are made from the caller's scope, so equal calls give equal bytes."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.inputs: list[ValueInfoProto] = []
        self.constants: list[ValueInfoProto] = []
        """What :meth:`held` declared."""
        self.values: list[ValueInfoProto] = []
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], Value] = {}
        self.initializers: list[TensorProto] = []
        self._used: dict[str, int] = {}

    def input(self, name: str, dtype: str, shape: Sequence[Dim]) -> Value:
        """Declare an input of the graph."""
        self.inputs.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], list(shape)))
        self._used[name] = 1
        return Value(name, dtype)

    def held(self, name: str, dtype: str, shape: Sequence[Dim]) -> Value:
        """Declare a constant whose bytes lie outside the graph."""
        self.constants.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], list(shape)))
        self._used[name] = 1
        return Value(name, dtype)

    def add(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        dtype: str,
        scope: str,
        *,
        domain: str = "",
        **attributes: Any,  # noqa: ANN401 - what an ONNX attribute can be
    ) -> Value:
        """Add a node with one output.

        Args:
            kind: The ONNX operator.
            inputs: Its inputs; None leaves an optional one out.
            dtype: Element type of the output.
            scope: What the node belongs to; its name begins with it.
            domain: The operator's domain; the standard one when empty.
            **attributes: The operator's attributes.
        """
        return self.add_many(kind, inputs, [dtype], scope, domain=domain, **attributes)[0]

    def add_many(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        dtypes: Sequence[str],
        scope: str,
        *,
        domain: str = "",
        **attributes: Any,  # noqa: ANN401 - what an ONNX attribute can be
    ) -> list[Value]:
        """Add a node with several outputs, of these element types."""
        name = self._unique(f"{scope}.{kind.lower()}")
        outputs = [
            Value(name if index == 0 else f"{name}:{index}", dtype) for index, dtype in enumerate(dtypes)
        ]
        self.nodes.append(
            helper.make_node(
                kind,
                ["" if value is None else value.name for value in inputs],
                [value.name for value in outputs],
                name=name,
                domain=domain,
                **attributes,
            )
        )
        return outputs

    def describe(self, value: Value, shape: Sequence[Dim | None]) -> None:
        """State a tensor's type and shape, where tools cannot infer them (after nodes of a domain of our own).

        A size of None is not known and has no name.
        """
        self.values.append(helper.make_tensor_value_info(value.name, ELEMENT_TYPES[value.dtype], list(shape)))

    def constant(self, array: npt.NDArray[np.float32] | npt.NDArray[np.int64]) -> Value:
        """A small constant; equal ones are the same tensor."""
        key = (str(array.dtype), array.tobytes(), array.shape)
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = Value(name, str(array.dtype))
        return self._constants[key]

    def scalar(self, value: float) -> Value:
        """An fp32 constant without dimensions."""
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> Value:
        """A list of int64."""
        return self.constant(np.array(values, np.int64))

    def cast(self, value: Value, dtype: str, scope: str) -> Value:
        """The tensor in another element type; itself where it has it."""
        if value.dtype == dtype:
            return value
        return self.add("Cast", [value], dtype, scope, to=ELEMENT_TYPES[dtype])

    def _unique(self, name: str) -> str:
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return name if count == 0 else f"{name}_{count}"
