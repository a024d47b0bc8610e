"""The GPU of a process without torch: memory, stream and copies are PyCUDA's, captured graphs cuda-python's."""

from __future__ import annotations

import atexit
import gc
import importlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edged.errors import InternalError, LedgerError, UnsupportedError
from plugins_trt.argmax.launch import Argmaxer
from plugins_trt.attention.launch import Attender
from plugins_trt.registry import Kernels, KernelsError
from plugins_trt.sample.launch import Sampler
from plugins_trt.ternary_linear.launch import TernaryMultiplier
from plugins_trt.w4a16_linear.launch import W4A16Multiplier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from edged.memory.buffers import ModelPlan
    from plugins_trt.argmax.contract import Argmax
    from plugins_trt.attention.contract import Attention
    from plugins_trt.sample.contract import Sample

    Words = npt.NDArray[np.int32]
    Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EngineKernels:
    """Our kernels of one model: those of its engine's nodes, which name their stream, and those around the engine."""

    attend: Callable[[Attention, Any], None]
    multiply: Callable[[Any, Any], None] | None
    argmax: Callable[[Argmax], None]
    sample: Callable[[Sample], None]


class Device(Protocol):
    """What the executor asks of the device it runs on. Addresses are numbers."""

    @property
    def multiprocessors(self) -> int:
        """How many it has."""

    @property
    def stream(self) -> Any:  # noqa: ANN401 - PyCUDA's; `handle` is what TensorRT takes
        """The stream of all work."""

    @property
    def cuda_majors(self) -> dict[str, int | None]:
        """CUDA majors of what this process drives the device with, by name."""

    def allocate(self, nbytes: int) -> int:
        """Device memory, filled with zeros.

        Raises:
            LedgerError: There is not so much.
        """

    def host_words(self, count: int) -> Words:
        """Host memory that copies to and from the device use directly, zeros."""

    def store(self, pointer: int, data: Array) -> None:
        """Copy any host array; it is there on return."""

    def fetch(self, out: Array, pointer: int) -> None:
        """Copy to any host array; it is there on return."""

    def upload(self, pointer: int, source: Words) -> None:
        """Enqueue a copy from :meth:`host_words`."""

    def download(self, target: Words, pointer: int) -> None:
        """Enqueue a copy to :meth:`host_words`."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work`` once and give back what enqueues it again."""

    def synchronize(self) -> None:
        """Wait for everything that was enqueued."""

    def kernels(self, plan: ModelPlan) -> EngineKernels:
        """The operators for a model's dtype, heads and packed weights."""

    def close(self) -> None:
        """Give everything back."""


class PyCudaDevice:
    """The first GPU.

    Raises:
        UnsupportedError: PyCUDA or cuda-python is missing; says which.
    """

    def __init__(self) -> None:
        self._driver: Any = _import("pycuda.driver", "PyCUDA")
        self._cuda: Any = _import("cuda.bindings.driver", "cuda-python")
        self._driver.init()
        # TensorRT works in the primary context, too.
        self._context = self._driver.Device(0).retain_primary_context()
        self._context.push()
        # PyCUDA ends a process that leaves its context behind.
        atexit.register(self._leave)
        self._stream = self._driver.Stream()
        self._kernels = Kernels.of_current_device()
        self._allocations: list[Any] = []
        self._graphs: list[Any] = []

    @property
    def multiprocessors(self) -> int:
        """132 on an H200."""
        return self._kernels.multiprocessors

    @property
    def stream(self) -> Any:  # noqa: ANN401
        """PyCUDA's."""
        return self._stream

    @property
    def cuda_majors(self) -> dict[str, int | None]:
        """What PyCUDA was compiled with; the driver runs what any older CUDA made, so its own major says nothing."""
        return {"PyCUDA": self._driver.get_version()[0]}

    def allocate(self, nbytes: int) -> int:
        """Of the primary context."""
        try:
            allocation = self._driver.mem_alloc(max(nbytes, 1))
        except self._driver.MemoryError as error:
            raise LedgerError(
                f"the GPU refused {nbytes} bytes, which the budget had planned: free memory on this machine, or lower "
                f"context_length or max_sequences ({error})"
            ) from None
        self._allocations.append(allocation)
        self._driver.memset_d8(allocation, 0, max(nbytes, 1))
        return int(allocation)

    def host_words(self, count: int) -> Words:
        """Page-locked memory."""
        words: Words = self._driver.pagelocked_zeros(count, "int32")
        return words

    def store(self, pointer: int, data: Array) -> None:
        """Behind what the stream still does with that memory."""
        self._stream.synchronize()
        self._driver.memcpy_htod(pointer, np.ascontiguousarray(data))

    def fetch(self, out: Array, pointer: int) -> None:
        """Behind what the stream still does with that memory."""
        self._stream.synchronize()
        self._driver.memcpy_dtoh(out, pointer)

    def upload(self, pointer: int, source: Words) -> None:
        """On the stream."""
        self._driver.memcpy_htod_async(pointer, source, self._stream)

    def download(self, target: Words, pointer: int) -> None:
        """On the stream; captured, it writes when the graph runs."""
        self._driver.memcpy_dtoh_async(target, pointer, self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture a CUDA graph; ``work`` runs once before, so that whatever it loads or allocates is there."""
        cuda, stream = self._cuda, self._cuda.CUstream(int(self._stream.handle))
        work()
        self.synchronize()
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with _no_collection():
            self._call("cuStreamBeginCapture", stream, mode)
            try:
                work()
            except BaseException:
                with suppress(InternalError):
                    self._call("cuGraphDestroy", self._call("cuStreamEndCapture", stream))
                raise
            graph = self._call("cuStreamEndCapture", stream)
        executable = self._call("cuGraphInstantiate", graph, 0)
        self._call("cuGraphDestroy", graph)
        self._graphs.append(executable)

        def replay() -> None:
            self._call("cuGraphLaunch", executable, stream)

        return replay

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def kernels(self, plan: ModelPlan) -> EngineKernels:
        """Load them.

        Raises:
            UnsupportedError: No compiled kernels suit the device.
        """
        a, find, stream = plan.architecture, self._kernels.operator, self._stream
        try:
            best = Argmaxer(find("argmax"), dtype="float32")
            draw = Sampler(
                find("sample"), multiprocessors=self.multiprocessors, capability=self._kernels.capability
            )
            attend = Attender(
                self._kernels, dtype=plan.dtype, heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim
            )
            multiply = self._multiplier(plan)
        except KernelsError as error:
            raise UnsupportedError(f"device: cuda: {error}", field="device") from error
        return EngineKernels(
            attend=attend,
            multiply=multiply,
            argmax=lambda args: best(args, stream),
            sample=lambda args: draw(args, stream),
        )

    def _multiplier(self, plan: ModelPlan) -> Callable[[Any, Any], None] | None:
        quantization, find = plan.architecture.quantization, self._kernels.operator
        if quantization is None:
            return None
        if quantization.ternary:
            return TernaryMultiplier(
                find("ternary_linear"), multiprocessors=self.multiprocessors, dtype=plan.dtype
            )
        return W4A16Multiplier(
            find("w4a16_linear"),
            multiprocessors=self.multiprocessors,
            shared_bytes=self._kernels.shared_bytes,
            dtype=plan.dtype,
        )

    def close(self) -> None:
        """Drop graphs and memory, and leave the context."""
        self.synchronize()
        for graph in self._graphs:
            self._call("cuGraphExecDestroy", graph)
        for allocation in self._allocations:
            allocation.free()
        self._graphs, self._allocations = [], []
        atexit.unregister(self._leave)
        self._leave()

    def _leave(self) -> None:
        self._context.pop()

    def _call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - what the driver gives
        """A function of the driver; cuda-python gives its status first."""
        status, *results = getattr(self._cuda, name)(*arguments)
        if int(status) != 0:
            raise InternalError(f"{name}: {status!s}")
        return results[0] if results else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector out: what it finds may be PyCUDA's, and to free memory ends a capture as failed."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _import(module: str, package: str) -> Any:  # noqa: ANN401 - a module without types
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"executor: tensorrt needs {package}, which does not load here ({error}): pip install edged[gpu]",
            field="executor",
        ) from None
