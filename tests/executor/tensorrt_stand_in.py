"""What stands in for TensorRT's runtime and for a GPU, with the same interfaces. No torch.

A plan is the ONNX graph. It runs in ONNX's reference evaluator on the memory whose addresses were bound, and our nodes run
through the plugins' own `enqueue` and the session of the stream, as TensorRT runs them; only the kernels behind the session
are the caller's. What TensorRT would refuse is refused: tensors that are not bound, shapes outside the profile, types that
a plugin does not take, memory that is missing or not aligned.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")  # on machines that are lent for their GPU alone

import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from edged.engine.builder import Plan
from edged.engine.entries import StoredEngine
from edged.engine.graph import LOGITS, emit, serialize
from edged.engine.key import EngineKey
from edged.engine.manifest import Manifest
from edged.engine.provision import spec_of
from edged.engine.shapes import EngineShapes
from edged.errors import InternalError
from edged.executor.tensorrt_runtime import check_bound
from plugins_trt.contract import ELEMENT_BYTES, DeviceArray
from plugins_trt.tensorrt.registration import OPERATORS

CONTEXT_BYTES = 1 << 20
_handles = itertools.count(0xED6ED)
_running: list[int] = []
"""Handle of the stream that an engine runs on."""
NUMPY = {"float16": np.float16, "float32": np.float32, "int32": np.int32, "float64": np.float64}


def view(pointer: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """The memory at an address."""
    count = int(np.prod(shape))
    raw = (ctypes.c_char * (count * ELEMENT_BYTES[dtype])).from_address(pointer)
    return np.frombuffer(raw, NUMPY[dtype]).reshape(shape)


class Stream:
    def __init__(self) -> None:
        self.handle = next(_handles)


class StandInDevice:
    """Memory of this process. `kernels_of` makes the kernels."""

    multiprocessors = 132
    cuda_majors: dict[str, int | None] = {"PyCUDA": 13}  # noqa: RUF012

    def __init__(self, kernels_of: Any) -> None:
        self._kernels_of = kernels_of
        self.stream = Stream()
        self._memory: list[Any] = []
        self.captured = 0
        self.closed = False

    def allocate(self, nbytes: int) -> int:
        memory = np.zeros(nbytes + 256, np.uint8)
        self._memory.append(memory)
        return int(memory.ctypes.data) + -memory.ctypes.data % 256

    @property
    def allocated(self) -> int:
        return sum(each.nbytes - 256 for each in self._memory)

    def host_words(self, count: int) -> Any:
        return np.zeros(count, np.int32)

    def store(self, pointer: int, data: Any) -> None:
        data = np.ascontiguousarray(data)
        ctypes.memmove(pointer, data.ctypes.data, data.nbytes)

    def fetch(self, out: Any, pointer: int) -> None:
        assert out.flags.c_contiguous
        ctypes.memmove(out.ctypes.data, pointer, out.nbytes)

    upload = store

    def download(self, target: Any, pointer: int) -> None:
        self.fetch(target, pointer)

    def capture(self, work: Any) -> Any:
        work()
        self.captured += 1
        return work

    def synchronize(self) -> None:
        pass

    def kernels(self, plan: Any) -> Any:
        return self._kernels_of(plan)

    def close(self) -> None:
        self.closed = True
        self._memory.clear()


def _operation(operator_class: Any) -> type[OpRun]:
    """The plugin as an operator of ONNX's evaluator."""

    def _run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any]:
        operator = operator_class.from_fields(
            "node",
            {name: kind(attributes[name]) for name, kind in operator_class.field_types().items()},
        )
        arrays = [np.ascontiguousarray(each) for each in inputs]
        bound = operator.check_dtypes([str(each.dtype) for each in arrays])
        sizes = operator.check_shapes([each.shape for each in arrays])
        (port,) = operator.outputs
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in port.shape)
        out = np.full(shape, np.nan, NUMPY[bound[port.dtypes[0]]])
        workspace = np.zeros(operator.workspace_bytes(sizes) + 256, np.uint8)
        pointer = int(workspace.ctypes.data) + -workspace.ctypes.data % 256
        ins = [DeviceArray(each.ctypes.data, str(each.dtype), each.shape) for each in arrays]
        operator.enqueue(ins, [DeviceArray(out.ctypes.data, str(out.dtype), shape)], pointer, _running[-1])
        return (out,)

    return type(operator_class.NAME, (OpRun,), {"op_domain": "edged", "_run": _run})


OPERATIONS = [_operation(each) for each in OPERATORS]


class StandInRuntime:
    """Loads what `provide` made."""

    cuda_major: int | None = 13

    def __init__(self, config: Any) -> None:
        self._config = config
        self.spec, self.shapes = spec_of(config), EngineShapes.of(config)
        self.engine: StandInEngine | None = None

    def load(self, engine: StoredEngine, stream: int) -> StandInEngine:
        assert stream
        self.spec = spec_of(self._config, refitted=engine.manifest.refitted)
        self.engine = StandInEngine(self, onnx.load_from_string(engine.plan))
        return self.engine


class StandInEngine:
    memory_bytes = CONTEXT_BYTES

    def __init__(self, runtime: StandInRuntime, model: Any) -> None:
        self.model = model
        self.evaluator = None if self.stripped else ReferenceEvaluator(model, new_ops=OPERATIONS)
        self.inputs = runtime.spec.input_shapes()
        self.profiles = runtime.shapes.profiles
        self.contexts: list[StandInContext] = []
        self.closed = False

    @property
    def stripped(self) -> list[Any]:
        """The constants that the plan lacks."""
        external = onnx.TensorProto.EXTERNAL
        return [each for each in self.model.graph.initializer if each.data_location == external]

    def refit(self, weights: Any) -> None:
        missing = {each.name for each in self.stripped}
        assert missing == set(weights)
        for each in self.stripped:
            weight, shape = weights[each.name], tuple(each.dims)
            assert weight.elements == np.prod(shape)
            each.CopyFrom(
                numpy_helper.from_array(view(weight.address, weight.dtype, shape).copy(), each.name)
            )
        self.evaluator = ReferenceEvaluator(self.model, new_ops=OPERATIONS)

    def context(self, profile: int, memory: int, pointers: Any, *, captured: bool) -> StandInContext:
        assert captured is (self.profiles[profile].name == "decode")
        assert not self.stripped, "an engine without its weights"
        assert memory
        assert memory % 256 == 0
        check_bound([*self.inputs, LOGITS], pointers)
        made = StandInContext(self, profile, dict(pointers))
        self.contexts.append(made)
        return made

    def close(self) -> None:
        self.closed = True


class StandInContext:
    def __init__(self, engine: StandInEngine, profile: int, pointers: dict[str, int]) -> None:
        self._engine, self._pointers = engine, pointers
        self._profile = engine.profiles[profile]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.runs: list[int] = []
        """Tokens of each run."""

    def set_shapes(self, shapes: Any) -> None:
        for name, shape in shapes.items():
            _, dims = self._engine.inputs[name]
            least, _, most = self._profile.shape(dims)
            if len(shape) != len(dims) or not all(
                low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
            ):
                raise InternalError(f"shape {shape} of {name} is outside {least} to {most}")
        self._shapes = dict(shapes)

    def enqueue(self, stream: int) -> None:
        feeds = {}
        for name, (dtype, dims) in self._engine.inputs.items():
            dynamic = any(isinstance(dim, str) for dim in dims)
            feeds[name] = view(self._pointers[name], dtype, self._shapes[name] if dynamic else dims)
        _running.append(stream)
        try:
            logits: Any = self._engine.evaluator.run(None, feeds)[0]
        finally:
            _running.pop()
        self.runs.append(self._shapes["token_ids"][0])
        view(self._pointers[LOGITS], "float32", logits.shape)[:] = logits


def provide(config: Any, progress: Any, *, refitted: bool = False) -> StoredEngine:
    """An engine as the cache gives it, whose plan is the graph."""
    progress("building", 0, 1)
    spec, shapes = spec_of(config, refitted=refitted), EngineShapes.of(config)
    plan = Plan(memoryview(serialize(emit(spec))), {"decode": CONTEXT_BYTES // 2, "prefill": CONTEXT_BYTES})
    key = EngineKey(
        graph=hashlib.sha256(plan.data).hexdigest(),
        shapes=shapes.text,
        dtype=spec.dtype,
        tensorrt="stand_in 1",
        targets="sm90",
        driver="none",
        plugins="",
        edged="",
    )
    manifest = Manifest(
        key,
        "0" * 16,
        config.name,
        len(plan.data),
        "",
        activation_bytes=plan.activation_bytes,
        refitted=refitted,
    )
    # The verdict of its check is kept there.
    folder = config.path / "engines" / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    return StoredEngine(folder, manifest, bytes(plan.data), None)


def with_engine_bytes(engine: StoredEngine, nbytes: int) -> StoredEngine:
    """The engine, saying that its context needs so much."""
    return replace(engine, manifest=replace(engine.manifest, activation_bytes={"prefill": nbytes}))
