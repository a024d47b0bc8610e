"""Turns a `PluginOperator` into a TensorRT plugin (IPluginV3: core, build, runtime) and its creator.

The bindings' base classes exist once a TensorRT is imported, so the classes are made for a module. What a plugin raises
TensorRT swallows: it is kept in `logger.record` first, from where the builder and the loader take their messages.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins_trt.contract import DeviceArray
from plugins_trt.tensorrt.logger import record
from plugins_trt.tensorrt.names import NAMESPACE
from plugins_trt.tensorrt.operator import PluginError
from plugins_trt.tensorrt.pin import pin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plugins_trt.tensorrt.operator import PluginOperator


def _reported(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a callback raises before TensorRT swallows it."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:  # noqa: ANN401
        try:
            return method(self, *arguments)
        except Exception as error:
            record.add_fault(str(error) if isinstance(error, ValueError) else repr(error))
            raise

    return call


def make_plugin_class(trt: Any) -> Any:  # noqa: ANN401, C901 - the bindings have no types; one class, many callbacks
    """The plugin class for the bindings ``trt``; instances wrap one operator each."""
    names = {
        trt.DataType.FLOAT: "float32",
        trt.DataType.HALF: "float16",
        trt.DataType.BF16: "bfloat16",
        trt.DataType.INT32: "int32",
        trt.DataType.INT64: "int64",
        trt.DataType.INT8: "int8",
        trt.DataType.UINT8: "uint8",
    }
    types = {name: dtype for dtype, name in names.items()}

    def name_of(dtype: Any) -> str:  # noqa: ANN401
        return names.get(dtype, str(dtype))

    class Plugin(
        trt.IPluginV3,  # type: ignore[misc]
        trt.IPluginV3OneCore,  # type: ignore[misc]
        trt.IPluginV3OneBuild,  # type: ignore[misc]
        trt.IPluginV3OneRuntime,  # type: ignore[misc]
    ):
        """One node."""

        def __init__(self, operator: PluginOperator, node: str) -> None:
            trt.IPluginV3.__init__(self)
            trt.IPluginV3OneCore.__init__(self)
            trt.IPluginV3OneBuild.__init__(self)
            trt.IPluginV3OneRuntime.__init__(self)
            self.operator = operator
            self.node = node
            self.plugin_name = operator.NAME
            self.plugin_version = operator.VERSION
            self.plugin_namespace = NAMESPACE
            self.num_outputs = len(operator.outputs)
            self.attached = self.building = False
            pin(self)  # a few hundred small objects a build: TensorRT tells nobody when it lets go of one

        # -- core

        def get_capability_interface(self, kind: Any) -> Any:  # noqa: ANN401, ARG002
            return self

        def clone(self) -> Any:  # noqa: ANN401
            copy = type(self)(self.operator, self.node)
            copy.attached, copy.building = self.attached, self.building
            return copy

        # -- build

        @_reported
        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            bound = self.operator.check_dtypes([name_of(dtype) for dtype in input_types])
            return [types[bound.get(port.dtypes[0], port.dtypes[0])] for port in self.operator.outputs]

        @_reported
        def get_output_shapes(self, inputs: Sequence[Any], _: Any, builder: Any) -> list[Any]:  # noqa: ANN401
            self.operator.check_shapes(
                [
                    [dim.get_constant_value() if dim.is_constant() else -1 for dim in _dims(each)]
                    for each in inputs
                ]
            )
            return [
                _output_dims(trt, self.operator, port.shape, inputs, builder)
                for port in self.operator.outputs
            ]

        @_reported
        def supports_format_combination(self, position: int, tensors: Sequence[Any], count: int) -> bool:
            if tensors[position].desc.format != trt.TensorFormat.LINEAR:
                return False
            # TensorRT tries types on purpose where a network is not strongly typed: an answer, no fault.
            bound: dict[str, str] = {}
            ports = [*self.operator.inputs, *self.operator.outputs]
            try:
                for index in range(position + 1):
                    what = "input" if index < count else "output"
                    self.operator.check_dtype(ports[index], name_of(tensors[index].desc.type), bound, what)
            except PluginError:
                return False
            return True

        @_reported
        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:  # noqa: ARG002
            self.operator.check_dtypes([name_of(each.desc.type) for each in inputs])
            for which in ("min", "opt", "max"):
                self.operator.check_shapes([list(getattr(each, which)) for each in inputs])

        @_reported
        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:  # noqa: ARG002
            return self.operator.workspace_bytes(
                self.operator.check_shapes([list(each.max) for each in inputs])
            )

        # -- runtime

        def get_fields_to_serialize(self) -> Any:  # noqa: ANN401
            # TensorRT reads the arrays later: they live as long as the plugin.
            self._fields = [
                _field(trt, name, getattr(self.operator, name)) for name in self.operator.field_types()
            ]
            return trt.PluginFieldCollection(self._fields)

        @_reported
        def attach_to_context(self, context: Any) -> Any:  # noqa: ANN401, ARG002
            copy = self.clone()
            copy.attached = True
            return copy

        def set_tactic(self, tactic: int) -> None:
            """There is one."""

        @_reported
        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:  # noqa: ARG002
            self.operator.check_dtypes([name_of(each.type) for each in inputs])
            self.operator.check_shapes([list(each.dims) for each in inputs])

        @_reported
        def enqueue(  # noqa: PLR0917 - TensorRT's signature
            self,
            input_tensors: Sequence[Any],
            output_tensors: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            # While it builds, TensorRT may run a node on memory that holds no step's data, to time it.
            if self.building or not self.attached:
                return
            self.operator.enqueue(
                [_array(name_of, *each) for each in zip(input_tensors, inputs, strict=True)],
                [_array(name_of, *each) for each in zip(output_tensors, outputs, strict=True)],
                int(workspace),
                int(stream),
            )

    return Plugin


def make_creator(trt: Any, plugin_class: Any, operator_class: type[PluginOperator]) -> Any:  # noqa: ANN401
    """The creator that the ONNX parser and the runtime call for nodes of this operator."""

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        """Makes plugins of one operator from fields."""

        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = operator_class.NAME
            self.plugin_version = operator_class.VERSION
            self.plugin_namespace = NAMESPACE
            self.field_names = trt.PluginFieldCollection(
                [
                    trt.PluginField(name, np.array([]), _field_type(trt, kind))
                    for name, kind in operator_class.field_types().items()
                ]
            )

        @_reported
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:  # noqa: ANN401
            values = {field.name: _value(trt, field) for field in fields}
            plugin = plugin_class(operator_class.from_fields(name, values), name)
            plugin.building = phase == trt.TensorRTPhase.BUILD
            return plugin

    return Creator()


def _field_type(trt: Any, kind: type) -> Any:  # noqa: ANN401
    kinds = trt.PluginFieldType
    return {int: kinds.INT32, float: kinds.FLOAT32, str: kinds.CHAR}[kind]


def _field(trt: Any, name: str, value: float | str) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return trt.PluginField(name, np.frombuffer(value.encode(), np.int8), trt.PluginFieldType.CHAR)
    array = np.array([value], np.int32 if isinstance(value, int) else np.float32)
    return trt.PluginField(name, array, _field_type(trt, type(value)))


def _value(trt: Any, field: Any) -> int | float | str:  # noqa: ANN401
    """A field's value; of a type that no operator uses, an array, which the operator then refuses."""
    data, kinds = field.data, trt.PluginFieldType
    if field.type == kinds.CHAR:
        # The ONNX parser counts the closing zero in.
        return bytes(data if isinstance(data, bytes) else np.asarray(data, np.int8)).rstrip(b"\0").decode()
    array = np.asarray(data).reshape(-1)
    if array.size == 1 and field.type in (kinds.INT32, kinds.INT64):
        return int(array[0])
    if array.size == 1 and field.type in (kinds.FLOAT32, kinds.FLOAT64):
        return float(array[0])
    return array  # type: ignore[return-value]


def _dims(expressions: Any) -> list[Any]:  # noqa: ANN401
    return [expressions[index] for index in range(len(expressions))]


def _output_dims(
    trt: Any,  # noqa: ANN401
    operator: PluginOperator,
    shape: Sequence[int | str],
    inputs: Sequence[Any],
    builder: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """An output's shape, its named sizes taken from the first input that has them."""
    dims = trt.DimsExprs(len(shape))
    for index, size in enumerate(shape):
        dims[index] = builder.constant(size) if isinstance(size, int) else _find(operator, size, inputs)
    return dims


def _find(operator: PluginOperator, size: str, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
    for port, expressions in zip(operator.inputs, inputs, strict=True):
        for index, each in enumerate(port.shape):
            if each == size:
                return expressions[index]
    raise PluginError(f"{operator.title}: no input has a dimension {size}, which an output needs")


def _array(name_of: Callable[[Any], str], tensor: Any, pointer: int) -> DeviceArray:  # noqa: ANN401
    return DeviceArray(int(pointer), name_of(tensor.type), tuple(int(size) for size in tensor.dims))
