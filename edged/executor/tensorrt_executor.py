"""The TensorRT executor: one model's engine in a process without torch, each decode bucket a captured CUDA graph.

A step is one copy (tokens, positions, page tables, how rows are drawn), the engine, and the ids of the drawn tokens on their
way back. Steps of up to 64 tokens are padded to a bucket and replayed; longer ones, with pieces of prompts, are padded to a
multiple of 16 and enqueued. All contexts of the engine share one block of memory, of the size that the ledger knows.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edged.engine.provision import spec_of
from edged.engine.rope_tables import rope_tables
from edged.engine.store import EngineStore
from edged.errors import EdgedError, FailedPreconditionError, InternalError, LedgerError, UnsupportedError
from edged.executor.base import Executor, ExecutorLimits
from edged.executor.batch_check import check_batch, check_sampling
from edged.executor.captured import check_multiprocessors
from edged.executor.engine_check import (
    DIVERGENCE,
    RELATIVE_RMS,
    compare_engine,
    figures,
    read_reference,
    verdict,
)
from edged.executor.host_sampler import draw as draw_on_host
from edged.executor.kv_arena import arena_of
from edged.executor.tensorrt_pages import DevicePages
from edged.executor.tensorrt_provide import provide_engine
from edged.executor.tensorrt_refit import HostWeights
from edged.executor.tensorrt_steps import EngineSteps
from edged.executor.tensorrt_weights import load_weights
from edged.memory.buffers import ModelPlan, step_buffers, weight_buffers
from edged.memory.tensorrt_buffers import context_bytes
from edged.models.architecture import Architecture
from plugins_trt.contract import DeviceArray
from plugins_trt.tensorrt.adapter import TensorRTError, check_cuda
from plugins_trt.tensorrt.device_session import DeviceSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.checkpoint.reference_logits import ReferenceLogits
    from edged.config import ModelConfig
    from edged.engine.entries import StoredEngine
    from edged.engine.held_weights import HeldWeight
    from edged.executor.base import ByteArray, FloatArray, Int32Array, Progress, StepBatch
    from edged.executor.captured import Bucket
    from edged.executor.tensorrt_device import Device
    from edged.executor.tensorrt_runtime import LoadedEngine, Runtime
    from edged.executor.tensorrt_weights import Numbers
    from edged.memory.buffers import BufferSpec

    Provide = Callable[[ModelConfig, Progress], StoredEngine]
    OpenRuntime = Callable[[StoredEngine], Runtime]


class TensorRTExecutor(Executor):
    """Runs one configured model on TensorRT.

    Args:
        config: The model's part of the configuration.
        provide: Finds or builds the engine; by default in the engine cache, in a process of its own.
        open_device: Makes the device; the first GPU by default.
        open_runtime: Makes what loads an engine; the TensorRT that built it by default.

    Raises:
        CheckpointError: The model folder's ``config.json`` is refused.
        ConfigError: A dtype or attention that no engine has.
        UnsupportedError: Heads, weights or a context that the kernels do not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        provide: Provide | None = None,
        open_device: Callable[[], Device] | None = None,
        open_runtime: OpenRuntime | None = None,
    ) -> None:
        self._config = config
        self.plan = plan = ModelPlan.of(replace(config, executor="tensorrt"), Architecture.of(config))
        self._provide = provide or provide_engine
        self._open_device = open_device or _open_gpu
        self._open_runtime = open_runtime or _open_tensorrt
        self._limits = ExecutorLimits(
            max_step_tokens=plan.step_tokens,
            max_sequences=plan.max_sequences,
            context_length=plan.context_length,
            pages=plan.pages,
            vocabulary=plan.architecture.vocabulary,
        )
        self.pointers: dict[str, int] = {}
        """Address of every buffer that lives as long as the executor, by the name of its spec."""
        self._specs: dict[str, BufferSpec] = {}

    @property
    def limits(self) -> ExecutorLimits:
        """The loaded limits."""
        return self._limits

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The captured steps, by rising size."""
        return self._steps.buckets

    def load(self, progress: Progress) -> None:
        """Provide the engine, allocate everything, read the weights, capture every bucket; if that fails, nothing stays."""
        try:
            self._load(progress)
        except BaseException:
            with suppress(Exception):  # what went wrong first is what matters
                self.close()
            raise

    def _load(self, progress: Progress) -> None:
        plan = self.plan
        reference = read_reference(self._config.path, plan.context_length)
        self.engine = self._provide(self._config, progress)
        self._check_memory(self.engine.manifest.context_bytes or 0)
        runtime = self._open_runtime(self.engine)
        self.device = device = self._open_device()
        try:
            check_cuda({"TensorRT": runtime.cuda_major, **device.cuda_majors})
        except TensorRTError as error:
            raise FailedPreconditionError(str(error)) from None
        check_multiprocessors(device.multiprocessors)
        # Weights that the plan was stripped of lie in the engine: the same bytes in another place.
        held = spec_of(self._config, refitted=True).held if self.engine.manifest.refitted else ()
        inside = {each.name for each in held}
        specs = [spec for spec in (*weight_buffers(plan), *step_buffers(plan)) if spec.name not in inside]
        self._specs = {spec.name: spec for spec in specs}
        for index, spec in enumerate(specs):
            progress(f"allocating {spec.row}", index, len(specs))
            self.pointers[spec.name] = device.allocate(spec.nbytes)
        cosine, sine = rope_tables(plan.architecture, self._specs["rope_cosine"].shape[0])
        self._store("rope_cosine", 0, cosine)
        self._store("rope_sine", 0, sine)
        symmetric = self._load_engine(runtime, held, progress)
        self._check_memory(self._loaded.memory_bytes)
        kernels = device.kernels(plan)
        session = DeviceSession(
            kernels.attend,
            stream=device.stream,
            arena=arena_of(plan, self.pointers),
            workspace=self._array("attention_workspace"),
            arrived=self._array("arrived"),
            multiply=kernels.multiply,
            symmetric=symmetric,
        )
        self._session = session.__enter__()
        self._pages = DevicePages(plan, self.pointers, device)
        self._steps = EngineSteps(self._config, plan, self.pointers, device, self._loaded, kernels, session)
        self._steps.capture(self._specs["attention_workspace"].nbytes, progress)
        self._check_engine(reference, progress)

    def _load_engine(
        self, runtime: Runtime, held: tuple[HeldWeight, ...], progress: Progress
    ) -> frozenset[str]:
        """Read the weights, load the plan, and put in what it was stripped of; names of the symmetric 4-bit weights."""
        with ExitStack() as stack:
            host = stack.enter_context(HostWeights(held, self.engine.folder.parent)) if held else None

            def store(weight: str, offset: int, data: Numbers) -> None:
                (self._store if host is None or weight not in host else host.store)(weight, offset, data)

            path, architecture, dtype = self._config.path, self.plan.architecture, self.plan.dtype
            symmetric = load_weights(path, architecture, dtype, store, progress)
            progress("loading the engine", 0, 1)
            self._loaded: LoadedEngine = runtime.load(self.engine, int(self.device.stream.handle))
            if host is not None:
                progress("putting weights into the engine", 0, 1)
                self._loaded.refit(host.weights())
        return symmetric

    def step(self, batch: StepBatch) -> Int32Array:
        """Run one step and draw a token for each needed row, int32 [R]."""
        check_sampling(batch)
        tokens, steps = self._padded(batch), self._steps
        count = len(batch.logit_rows)
        if count > steps.rows(tokens):
            return draw_on_host(self.logits(batch), batch.sampling)
        steps.stage(batch, tokens, batch.logit_rows)
        warm = steps.stage_sampling(batch)
        draw, draw_with_options = steps.run(batch, tokens)
        if steps.write_options(batch):
            draw_with_options()
        elif warm:
            draw()
        drawn = steps.drawn(count)
        done = steps.finish_options(drawn)
        for index, row in enumerate(batch.sampling):
            if not row.simple and index not in done:
                drawn[index] = draw_on_host(steps.logits(index)[None], [row])[0]
        return drawn

    def logits(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the needed rows' logits, fp32 [R, V].

        More rows than a step gives are computed some at a time: what a step stores, it stores again as it was.
        """
        tokens, steps = self._padded(batch), self._steps
        needed, most = batch.logit_rows, steps.rows(tokens)
        result = np.empty((len(needed), self._limits.vocabulary), np.float32)
        for first in range(0, max(len(needed), 1), most):
            some = needed[first : first + most]
            steps.stage(batch, tokens, some)
            steps.run(batch, tokens)
            for index in range(len(some)):
                result[first + index] = steps.logits(index)
        self.device.synchronize()
        return result

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: keys, values and compressed keys of every layer."""
        return self._pages.page_bytes

    def read_pages(self, pages: Int32Array, out: ByteArray) -> None:
        """Copy pages to host memory."""
        self._pages.read(pages, out)

    def write_pages(self, pages: Int32Array, data: ByteArray) -> None:
        """Copy pages back."""
        self._pages.write(pages, data)

    def close(self) -> None:
        """Drop graphs, engine and buffers, and leave the device."""
        device = self.__dict__.pop("device", None)
        if device is not None:
            device.synchronize()
        session = self.__dict__.pop("_session", None)
        if session is not None:
            session.__exit__()
        for name in ("_steps", "_pages"):
            self.__dict__.pop(name, None)
        loaded = self.__dict__.pop("_loaded", None)
        if loaded is not None:
            loaded.close()
        self.pointers = {}
        if device is not None:
            device.close()

    # -- loading

    def _check_memory(self, needed: int) -> None:
        """Refuse an engine that needs more memory than the ledger set aside for it."""
        planned = context_bytes(self.plan)
        if needed > planned:
            raise LedgerError(
                f"model {self._config.name}: its engine needs {needed} bytes for activations and scratch, {planned} were "
                "planned before it was built: start again, the ledger knows it now"
            )

    def _check_engine(self, reference: ReferenceLogits, progress: Progress) -> None:
        """Hold the engine's logits against the model's reference, and keep the verdict beside the engine.

        Raises:
            FailedPreconditionError: They differ; with the numbers.
        """
        engine = self.engine
        progress("checking the engine", 0, 1)
        found = compare_engine(self, reference)
        passed = verdict(found)
        said = engine.check is not None and engine.check.get("passed") is passed
        if not said:
            # In a cache that cannot be written the verdict is found again at the next start.
            with suppress(EdgedError):
                store = EngineStore(engine.folder.parent)
                store.record_check(engine, {"model": self._config.name, **figures(found)}, passed=passed)
        if not passed:
            lines = "; ".join(f"{name}: {each}" for name, each in found.items())
            raise FailedPreconditionError(
                f"model {self._config.name}: the logits of its engine {engine.folder.name} are not those of the reference "
                f"({lines}; allowed are a relative RMS difference of {RELATIVE_RMS} and {DIVERGENCE} nats): it is not used; "
                "build it again with `edgectl build --rebuild`, or use executor: torch"
            )
        progress("checking the engine", 1, 1)

    def _store(self, weight: str, offset: int, data: Numbers) -> None:
        """Put an array's bytes into a buffer."""
        size = self._specs[weight].nbytes
        if offset + data.nbytes > size:
            raise InternalError(f"{weight}: {offset + data.nbytes} bytes do not fit {size}")
        self.device.store(self.pointers[weight] + offset, data)

    def _array(self, name: str) -> DeviceArray:
        spec = self._specs[name]
        return DeviceArray(self.pointers[name], spec.dtype, spec.shape)

    def _padded(self, batch: StepBatch) -> int:
        """Tokens of the step with its padding.

        Raises:
            InternalError: The step does not fit the executor.
            UnsupportedError: It holds a tree.
        """
        check_batch(batch, self._limits)
        if batch.tree_masks is not None:
            raise UnsupportedError(
                "the TensorRT executor verifies no trees of draft tokens yet: set speculation.method to off",
                field="speculation.method",
            )
        return self._steps.padded(len(batch.token_ids))


def _open_gpu() -> Device:
    from edged.executor.tensorrt_device import PyCudaDevice  # noqa: PLC0415 - tests bring a device of their own

    return PyCudaDevice()


def _open_tensorrt(engine: StoredEngine) -> Runtime:
    from edged.executor.tensorrt_runtime import TensorRTRuntime  # noqa: PLC0415 - likewise

    return TensorRTRuntime(engine)
