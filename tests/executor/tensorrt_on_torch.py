"""An engine on a real GPU where no TensorRT runs: the graph's own nodes by torch, ours through the plugins' `enqueue`.

Everything around it is the product's: PyCUDA's memory, stream and copies, cuda-python's captured graphs, our kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from tensorrt_stand_in import CONTEXT_BYTES

from edged.engine.graph import LOGITS
from edged.engine.provision import spec_of
from edged.engine.shapes import EngineShapes
from edged.executor.tensorrt_runtime import check_bound
from plugins_trt.contract import DeviceArray
from plugins_trt.tensorrt.registration import OPERATORS

_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2", "int32": "<i4"}
_CAST = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
}


_OPERATIONS: dict[str, Any] = {
    "Gather": lambda given, _: given[0].index_select(0, given[1]),
    "Cast": lambda given, attributes: given[0].to(_CAST[attributes["to"]]),
    "Mul": lambda given, _: given[0] * given[1],
    "Add": lambda given, _: given[0] + given[1],
    "Div": lambda given, _: given[0] / given[1],
    "Sqrt": lambda given, _: given[0].sqrt(),
    "Sigmoid": lambda given, _: given[0].sigmoid(),
    "ReduceMean": lambda given, _: given[0].mean(-1, keepdim=True),
    "Gemm": lambda given, _: (
        torch.addmm(given[2], given[0], given[1].t()) if len(given) > 2 else given[0] @ given[1].t()
    ),
    "Identity": lambda given, _: given[0],
}


def tensor_at(pointer: int, dtype: str, shape: Any) -> Any:
    """Device memory as a tensor."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(shape),
            "typestr": _TYPES[dtype],
            "data": (pointer, False),
            "version": 3,
        }

    tensor = torch.as_tensor(Memory(), device="cuda")
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


class TorchRuntime:
    cuda_major: int | None = None

    def __init__(self, config: Any) -> None:
        self._config = config
        self.spec, self.shapes = spec_of(config), EngineShapes.of(config)
        self.engine: TorchEngine | None = None

    def load(self, engine: Any, stream: int) -> TorchEngine:
        self.spec = spec_of(self._config, refitted=engine.manifest.refitted)
        self.engine = TorchEngine(self, onnx.load_from_string(engine.plan), stream)
        return self.engine


class TorchEngine:
    memory_bytes = CONTEXT_BYTES

    def __init__(self, runtime: TorchRuntime, model: Any, stream: int) -> None:
        self.inputs = runtime.spec.input_shapes()
        self.vocabulary = runtime.spec.architecture.vocabulary
        self.nodes = []
        kinds = {each.NAME: each for each in OPERATORS}
        for node in model.graph.node:
            values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            operator = None
            if node.domain == "edged":
                fields = kinds[node.op_type].field_types()
                plain = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
                operator = kinds[node.op_type].from_fields(node.name, {name: plain[name] for name in fields})
            self.nodes.append((node, values, operator))
        external = onnx.TensorProto.EXTERNAL
        self.stripped = {
            each.name: each for each in model.graph.initializer if each.data_location == external
        }
        self.constants = {
            each.name: numpy_helper.to_array(each)
            for each in model.graph.initializer
            if each.name not in self.stripped
        }
        self.stream = torch.cuda.ExternalStream(stream)
        with torch.cuda.stream(self.stream):
            self.on_device = {
                name: torch.from_numpy(each.copy()).cuda() for name, each in self.constants.items()
            }
        torch.cuda.synchronize()
        self.contexts: list[TorchContext] = []
        self.closed = False

    def refit(self, weights: Any) -> None:
        assert set(weights) == set(self.stripped)
        for name, weight in weights.items():
            raw = (ctypes.c_int16 * weight.elements).from_address(weight.address)
            values = torch.frombuffer(raw, dtype=torch.int16).view(getattr(torch, weight.dtype))
            with torch.cuda.stream(self.stream):
                self.on_device[name] = values.reshape(list(self.stripped.pop(name).dims)).cuda()
        torch.cuda.synchronize()

    def context(self, profile: int, memory: int, pointers: Any, *, captured: bool) -> TorchContext:
        assert not self.stripped, "an engine without its weights"
        del profile, memory, captured
        check_bound([*self.inputs, LOGITS], pointers)
        self.contexts.append(TorchContext(self, dict(pointers)))
        return self.contexts[-1]

    def close(self) -> None:
        self.closed = True
        self.on_device.clear()


class TorchContext:
    def __init__(self, engine: TorchEngine, pointers: dict[str, int]) -> None:
        self._engine, self._pointers = engine, pointers
        self._feeds: dict[str, Any] = {}
        self.runs: list[int] = []

    def set_shapes(self, shapes: Any) -> None:
        for name, (dtype, dims) in self._engine.inputs.items():
            dynamic = any(isinstance(dim, str) for dim in dims)
            self._feeds[name] = tensor_at(self._pointers[name], dtype, shapes[name] if dynamic else dims)
        rows, vocabulary = shapes["logit_rows"][0], self._engine.vocabulary
        self._logits = tensor_at(self._pointers[LOGITS], "float32", (rows, vocabulary))

    def enqueue(self, stream: int) -> None:
        engine = self._engine
        values = {**engine.on_device, **self._feeds}
        with torch.inference_mode(), torch.cuda.stream(engine.stream):
            for node, attributes, operator in engine.nodes:
                given = [values[name] for name in node.input]
                results = self._run(node, attributes, operator, given, stream)
                values.update(zip(node.output, results, strict=True))
            self._logits.copy_(values[LOGITS])
        self.runs.append(len(self._feeds["token_ids"]))

    def _run(self, node: Any, attributes: Any, operator: Any, given: list[Any], stream: int) -> list[Any]:
        if operator is not None:
            return [self._plugin(operator, [each.contiguous() for each in given], stream)]
        if node.op_type == "Split":
            return list(given[0].split(self._engine.constants[node.input[1]].tolist(), -1))
        return [_OPERATIONS[node.op_type](given, attributes)]

    @staticmethod
    def _plugin(operator: Any, inputs: list[Any], stream: int) -> Any:
        bound = operator.check_dtypes([str(each.dtype).removeprefix("torch.") for each in inputs])
        sizes = operator.check_shapes([each.shape for each in inputs])
        (port,) = operator.outputs
        shape = [sizes[size] if isinstance(size, str) else size for size in port.shape]
        out = torch.empty(shape, dtype=getattr(torch, bound[port.dtypes[0]]), device=inputs[0].device)
        scratch = torch.empty(operator.workspace_bytes(sizes), dtype=torch.uint8, device=inputs[0].device)
        operator.enqueue(
            [DeviceArray.of(each) for each in inputs],
            [DeviceArray.of(out)],
            scratch.data_ptr() if scratch.numel() else 0,
            stream,
        )
        return out
