"""Loads plans and runs them: TensorRT behind three small interfaces, so that all around it runs without a GPU too.

Written after the documentation of TensorRT 10.3 to 11 and TensorRT-RTX 1.7; docs/engines.md says where it ran.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from edged import __version__
from edged.checkpoint.name_list import listed
from edged.engine.gpu import find_gpu
from edged.errors import FailedPreconditionError, InternalError
from plugins_trt.tensorrt import adapter
from plugins_trt.tensorrt.adapter import TensorRTError
from plugins_trt.tensorrt.logger import record
from plugins_trt.tensorrt.registration import register
from plugins_trt.tensorrt.source_hash import source_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edged.engine.entries import StoredEngine
    from edged.engine.gpu import Gpu
    from edged.executor.tensorrt_refit import HostWeight
    from plugins_trt.tensorrt.adapter import TensorRT

TENSOR_ALIGNMENT = 256
"""Bytes that the address of a tensor is a multiple of (IExecutionContext::setTensorAddress)."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of inputs whose size is known at run time alone, by name."""


class Context(Protocol):
    """One set of shapes of one profile, to be run again and again."""

    def set_shapes(self, shapes: Shapes) -> None:
        """Say how large the inputs are.

        Raises:
            InternalError: Outside the profile.
        """

    def enqueue(self, stream: int) -> None:
        """Enqueue the engine on a stream (its handle); no synchronization, no allocation.

        Raises:
            InternalError: TensorRT or a plugin refuses; carries what they said.
        """


class LoadedEngine(Protocol):
    """A plan on the device."""

    @property
    def memory_bytes(self) -> int:
        """Device memory that a context of any profile needs."""

    def refit(self, weights: Mapping[str, HostWeight]) -> None:
        """Put in the weights that the plan was stripped of; they are copied.

        Raises:
            InternalError: TensorRT wants others, or refuses; carries what it said.
        """

    def context(self, profile: int, memory: int, pointers: Mapping[str, int], *, captured: bool) -> Context:
        """Make a context.

        Args:
            profile: Index of the optimization profile.
            memory: Address of :attr:`memory_bytes` of device memory, which contexts that do not run together share.
            pointers: Addresses of all inputs and outputs, by name.
            captured: Its shapes are set once, and its runs are captured; otherwise they change from run to run.

        Raises:
            InternalError: TensorRT refuses.
        """

    def close(self) -> None:
        """Give the engine and its contexts back; nothing of it may be running."""


class Runtime(Protocol):
    """What loads plans."""

    @property
    def cuda_major(self) -> int | None:
        """Of the CUDA that it is made for; None where it is unknown."""

    def load(self, engine: StoredEngine, stream: int) -> LoadedEngine:
        """Load a plan.

        Args:
            engine: From the engine cache.
            stream: Handle of the stream that its contexts will run on.

        Raises:
            FailedPreconditionError: The plan is another TensorRT's, another GPU's or other plugins', or TensorRT refuses it;
                says why.
        """


class TensorRTRuntime:
    """`Runtime` of the TensorRT that built an engine.

    Raises:
        FailedPreconditionError: It cannot be imported.
    """

    def __init__(self, engine: StoredEngine) -> None:
        name = engine.manifest.key.tensorrt.partition(" ")[0]
        try:
            self._tensorrt = adapter.load(name)
        except TensorRTError as error:
            raise FailedPreconditionError(f"the engine {engine.folder.name}: {error}") from None

    @property
    def cuda_major(self) -> int | None:
        """Of its packages."""
        return self._tensorrt.cuda_major

    def load(self, engine: StoredEngine, stream: int) -> LoadedEngine:
        """Deserialize it."""
        tensorrt = self._tensorrt
        check_fits(engine, f"{tensorrt.name} {tensorrt.version}", find_gpu())
        register(tensorrt)
        record.clear()
        runtime = tensorrt.module.Runtime(tensorrt.logger)
        loaded = runtime.deserialize_cuda_engine(engine.plan)
        if loaded is None:
            raise FailedPreconditionError(
                f"{tensorrt.name} {tensorrt.version} cannot load the engine {engine.folder.name} of "
                f"{engine.manifest.label}: {record.reason()}; build it again with `edgectl build --rebuild`"
            )
        return _Engine(tensorrt, runtime, loaded, stream)


def check_fits(engine: StoredEngine, loaded: str, gpu: Gpu | None) -> None:
    """Refuse a plan that was built by another TensorRT, for another GPU or with other plugins: TensorRT may crash on it.

    Args:
        engine: From the engine cache.
        loaded: Name and version of the TensorRT that is to load it.
        gpu: This machine's; None where there is no driver, which TensorRT itself says.

    Raises:
        FailedPreconditionError: Names every difference.
    """
    key, manifest = engine.manifest.key, engine.manifest
    here = replace(key, tensorrt=loaded, plugins=source_hash(), edged=__version__)
    if gpu is not None:
        here = replace(here, targets=gpu.target, driver=gpu.driver_name)
    key.check_serves(here, f"the engine {engine.folder.name} of {manifest.label}")


class _Engine:
    def __init__(self, tensorrt: TensorRT, runtime: Any, engine: Any, stream: int) -> None:  # noqa: ANN401
        self._tensorrt = tensorrt
        self._runtime = runtime
        self._engine = engine
        self._stream = stream
        self._contexts: list[Any] = []

    @property
    def memory_bytes(self) -> int:
        count = self._engine.num_optimization_profiles
        return max(int(self._engine.get_device_memory_size_for_profile_v2(index)) for index in range(count))

    def refit(self, weights: Mapping[str, HostWeight]) -> None:
        trt, name = self._tensorrt.module, self._tensorrt.name
        types = {"bfloat16": trt.DataType.BF16, "float16": trt.DataType.HALF}
        record.clear()
        refitter = trt.Refitter(self._engine, self._tensorrt.logger)
        wanted = list(refitter.get_all_weights())
        if sorted(wanted) != sorted(weights):
            raise InternalError(
                f"{name} wants the weights {listed(sorted(wanted))} of the engine, and there are {listed(sorted(weights))}: "
                "it is another model's"
            )
        for each, weight in weights.items():
            given = trt.Weights(types[weight.dtype], weight.address, weight.elements)
            if not refitter.set_named_weights(each, given):
                raise InternalError(f"{name} refuses the weight {each}: {record.reason()}")
        if not refitter.refit_cuda_engine():
            raise InternalError(f"{name} cannot put the weights into the engine: {record.reason()}")

    def context(self, profile: int, memory: int, pointers: Mapping[str, int], *, captured: bool) -> Context:
        trt = self._tensorrt.module
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._tensorrt.is_rtx:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(managed)
            # Kernels that are finished in the background would be swapped under a captured graph; where the shapes change,
            # finishing some for each would hold up the step that brings a new one.
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = (
                strategies.EAGER if captured else strategies.NONE
            )
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context(managed)
        if context is None:
            raise InternalError(f"{self._tensorrt.name} makes no execution context: {record.reason()}")
        context.set_device_memory(memory, self.memory_bytes)
        if not context.set_optimization_profile_async(profile, self._stream):
            raise InternalError(f"{self._tensorrt.name} refuses profile {profile}: {record.reason()}")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        check_bound(names, pointers)
        for name in names:
            if not context.set_tensor_address(name, pointers[name]):
                raise InternalError(f"{self._tensorrt.name} refuses the address of {name}: {record.reason()}")
        self._contexts.append(context)
        return _Context(self._tensorrt.name, context)

    def close(self) -> None:
        # In this order: a context holds on to its engine, an engine to its runtime.
        self._contexts.clear()
        self._engine = None
        self._runtime = None


def check_bound(names: Sequence[str], pointers: Mapping[str, int]) -> None:
    """Refuse an engine with tensors that nothing is bound to, and addresses that TensorRT does not take.

    Raises:
        InternalError: Names the tensors.
    """
    unbound = [name for name in names if name not in pointers]
    if unbound:
        raise InternalError(f"nothing is bound to the engine's {', '.join(unbound)}: it is another model's")
    # TensorRT does not look: its kernels read 16 bytes and more at a time.
    crooked = [name for name in names if pointers[name] % TENSOR_ALIGNMENT]
    if crooked:
        raise InternalError(
            f"the addresses of {', '.join(crooked)} are no multiples of {TENSOR_ALIGNMENT}, which TensorRT asks for"
        )


class _Context:
    def __init__(self, name: str, context: Any) -> None:  # noqa: ANN401
        self._name = name
        self._context = context

    def set_shapes(self, shapes: Shapes) -> None:
        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, shape):
                raise InternalError(f"{self._name} refuses shape {shape} of {name}: {record.reason()}")

    def enqueue(self, stream: int) -> None:
        record.clear()
        if not self._context.execute_async_v3(stream):
            raise InternalError(f"{self._name} cannot run the engine: {record.reason()}")
