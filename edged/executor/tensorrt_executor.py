"""The TensorRT executor: one model's engine in a process without torch, each decode bucket a captured CUDA graph.

A step is one copy (tokens, positions, page tables, how rows are drawn), the engine, and the ids of the drawn tokens on their
way back. Steps of up to 64 tokens are padded to a bucket and replayed; longer ones, with pieces of prompts, are padded to a
multiple of 16 and enqueued. All contexts of the engine share one block of memory, of the size that the ledger knows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edged.engine.graph import LOGITS
from edged.engine.rope_tables import rope_tables
from edged.engine.shapes import PREFILL_STEP, EngineShapes
from edged.engine.store import DEFAULT_LIMIT, EngineStore, default_folder
from edged.errors import EdgedError, FailedPreconditionError, InternalError, LedgerError, UnsupportedError
from edged.executor.base import Executor, ExecutorLimits
from edged.executor.batch_check import check_batch, check_sampling
from edged.executor.cuda_staging import Staging
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
from edged.executor.tensorrt_weights import load_weights
from edged.memory.buffers import ModelPlan, step_buffers, weight_buffers
from edged.memory.cuda_buffers import (
    MULTIPROCESSORS,
    StepLayout,
    attention_workspace,
    bucket_sizes,
    captured_sizes,
    has_dense_graph,
    logit_rows,
)
from edged.memory.specs import ELEMENT_BYTES
from edged.memory.tensorrt_buffers import CONTEXT, context_bytes
from edged.models.architecture import Architecture
from edged.models.weights import EMBEDDING, HEAD
from plugins_trt.argmax.contract import Argmax
from plugins_trt.contract import MAX_DECODE, DeviceArray, round_up
from plugins_trt.sample.contract import Sample
from plugins_trt.tensorrt.adapter import TensorRTError, check_cuda
from plugins_trt.tensorrt.device_session import DeviceSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.checkpoint.reference_logits import ReferenceLogits
    from edged.config import ModelConfig
    from edged.engine.entries import StoredEngine
    from edged.executor.base import ByteArray, FloatArray, Int32Array, Progress, SamplingRow, StepBatch
    from edged.executor.tensorrt_device import Device, EngineKernels
    from edged.executor.tensorrt_runtime import Context, LoadedEngine, Runtime, Shapes
    from edged.executor.tensorrt_weights import Numbers
    from edged.memory.buffers import BufferSpec

    Provide = Callable[[ModelConfig, Progress], StoredEngine]
    OpenRuntime = Callable[[StoredEngine], Runtime]

_DECODE, _PREFILL = 0, 1
"""Indices of the profiles of :class:`edged.engine.shapes.EngineShapes`."""


@dataclass(frozen=True)
class Bucket:
    """A captured step."""

    tokens: int
    rows: int
    replay: Callable[[], None]
    replay_dense: Callable[[], None]
    """The same for steps none of whose queries attends sparsely."""
    draw: Callable[[], None]
    """Draws the rows with a temperature, after either."""


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
        self._provide = provide or _provide_apart
        self._open_device = open_device or _open_gpu
        self._open_runtime = open_runtime or _open_tensorrt
        self._longest = EngineShapes.of(config).prefill_tokens
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
        self._buckets: tuple[Bucket, ...] = ()

    @property
    def limits(self) -> ExecutorLimits:
        """The loaded limits."""
        return self._limits

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The captured steps, by rising size."""
        return self._buckets

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
        if device.multiprocessors > MULTIPROCESSORS:
            raise LedgerError(
                f"this device has {device.multiprocessors} multiprocessors; scratch memory is planned for "
                f"{MULTIPROCESSORS}: report this card"
            )
        specs = (*weight_buffers(plan), *step_buffers(plan))
        self._specs = {spec.name: spec for spec in specs}
        for index, spec in enumerate(specs):
            progress(f"allocating {spec.row}", index, len(specs))
            self.pointers[spec.name] = device.allocate(spec.nbytes)
        load_weights(self._config.path, plan.architecture, plan.dtype, self._store, progress)
        cosine, sine = rope_tables(plan.architecture, self._specs["rope_cosine"].shape[0])
        self._store("rope_cosine", 0, cosine)
        self._store("rope_sine", 0, sine)
        progress("loading the engine", 0, 1)
        stream = int(device.stream.handle)
        self._loaded: LoadedEngine = runtime.load(self.engine, stream)
        self._check_memory(self._loaded.memory_bytes)
        kernels: EngineKernels = device.kernels(plan)
        self._kernels = kernels
        session = DeviceSession(
            kernels.attend,
            stream=device.stream,
            arena=arena_of(plan, self.pointers),
            workspace=self._array("attention_workspace"),
            arrived=self._array("arrived"),
            multiply=kernels.multiply,
        )
        self._session = session.__enter__()
        self._staging = Staging(plan, device.host_words(StepLayout.of(plan).words))
        self._at = StepLayout.of(plan)
        self._drawn = device.host_words(self._specs["drawn"].shape[0])
        self._row = device.host_words(plan.architecture.vocabulary)
        self._prefill = self._loaded.context(_PREFILL, self.pointers[CONTEXT], self._bindings())
        self._pages = DevicePages(plan, self.pointers, device)
        self._capture_buckets(progress)
        self._check_engine(reference, progress)

    def step(self, batch: StepBatch) -> Int32Array:
        """Run one step and draw a token for each needed row, int32 [R]."""
        check_sampling(batch)
        tokens = self._padded(batch)
        count, rows = len(batch.logit_rows), logit_rows(self.plan, tokens)
        if count > rows:
            return draw_on_host(self.logits(batch), batch.sampling)
        places = np.arange(count, dtype=np.int32)
        self._stage(batch, tokens, batch.logit_rows)
        warm = self._staging.write_sampling(places, batch.sampling)
        draw = self._run(batch, tokens)
        if warm:
            draw()
        self.device.synchronize()
        drawn: Int32Array = self._drawn[:count].copy()
        for index, row in enumerate(batch.sampling):
            if not row.simple:
                drawn[index] = self._draw_on_host(index, row)
        return drawn

    def logits(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the needed rows' logits, fp32 [R, V].

        More rows than a step gives are computed some at a time: what a step stores, it stores again as it was.
        """
        tokens = self._padded(batch)
        needed = batch.logit_rows
        result = np.empty((len(needed), self._limits.vocabulary), np.float32)
        step = logit_rows(self.plan, tokens)
        for first in range(0, max(len(needed), 1), step):
            some = needed[first : first + step]
            self._stage(batch, tokens, some)
            self._run(batch, tokens)
            for index in range(len(some)):
                result[first + index] = self._fetch_logits(index)
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
        self._buckets = ()
        for name in ("_prefill", "_kernels", "_staging", "_pages"):
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

    def _bindings(self) -> dict[str, int]:
        """Addresses of the graph's inputs and outputs: weights, tables, and the parts of a step's data."""
        pointers, at, step = dict(self.pointers), self._at, self.pointers["step"]
        word = ELEMENT_BYTES["int32"]
        for name, place in (
            ("token_ids", at.token_ids),
            ("positions", at.positions),
            ("sequence_starts", at.starts),
            ("lengths", at.lengths),
            ("page_tables", at.tables),
            ("logit_rows", at.needed),
        ):
            pointers[name] = step + word * place
        if self.plan.architecture.tied:
            pointers[HEAD] = pointers[EMBEDDING]
        pointers[LOGITS] = self.pointers["logits"]
        return pointers

    def _shapes(self, tokens: int) -> Shapes:
        """Shapes of everything whose size a bucket decides, or the plan."""
        plan = self.plan
        sequences, table = plan.max_sequences, self._specs["rope_cosine"].shape
        return {
            "token_ids": (tokens,),
            "positions": (tokens,),
            "sequence_starts": (sequences + 1,),
            "lengths": (sequences,),
            "page_tables": (sequences, plan.pages_per_sequence),
            "tree_masks": (tokens, 2),
            "logit_rows": (logit_rows(plan, tokens),),
            "rope_cosine": table,
            "rope_sine": table,
        }

    def _capture_buckets(self, progress: Progress) -> None:
        """Capture every bucket that decodes; each has a context of its own, for a context keeps what a graph runs on."""
        plan, device = self.plan, self.device
        self._staging.words[:] = 0  # no sequence: only padding runs
        device.upload(self.pointers["step"], self._staging.words)
        largest = max(attention_workspace(plan, size, device.multiprocessors) for size in bucket_sizes(plan))
        if largest > self._specs["attention_workspace"].nbytes:
            raise LedgerError(
                f"attention needs {largest} bytes of scratch memory on this device, "
                f"{self._specs['attention_workspace'].nbytes} were planned: report this card"
            )
        sizes, bindings = captured_sizes(plan), self._bindings()
        draws: dict[int, Callable[[], None]] = {}
        buckets = []
        for index, tokens in enumerate(sizes):
            progress("capturing graphs", index, len(sizes))
            context = self._loaded.context(_DECODE, self.pointers[CONTEXT], bindings)
            context.set_shapes(self._shapes(tokens))
            rows = logit_rows(plan, tokens)
            replay = replay_dense = device.capture(partial(self._forward, context, rows))
            if has_dense_graph(plan, tokens):
                replay_dense = device.capture(partial(self._forward, context, rows, dense=True))
            if rows not in draws:
                draws[rows] = device.capture(partial(self._draw, rows))
            buckets.append(Bucket(tokens, rows, replay, replay_dense, draws[rows]))
        device.synchronize()
        progress("capturing graphs", len(sizes), len(sizes))
        self._buckets = tuple(buckets)

    # -- a step

    def _forward(self, context: Context, rows: int, *, dense: bool = False) -> None:
        """The engine, and the largest logit of each row on its way to the host."""
        self._session.dense = dense
        context.enqueue(int(self.device.stream.handle))
        drawn = DeviceArray(self.pointers["drawn"], "int32", (rows,))
        self._kernels.argmax(Argmax(self._logits_of(rows), drawn))
        self.device.download(self._drawn[:rows], drawn.pointer)

    def _draw(self, rows: int) -> None:
        """What follows where a row has a temperature."""
        step, at, word = self.pointers["step"], self._at, ELEMENT_BYTES["int32"]

        def part(place: int, dtype: str) -> DeviceArray:
            return DeviceArray(step + word * place, dtype, (rows,))

        drawn = DeviceArray(self.pointers["drawn"], "int32", (rows,))
        self._kernels.sample(
            Sample(
                logits=self._logits_of(rows),
                temperatures=part(at.temperatures, "float32"),
                top_ks=part(at.top_ks, "int32"),
                top_ps=part(at.top_ps, "float64"),
                numbers=part(at.numbers, "float64"),
                ids=drawn,
            )
        )
        self.device.download(self._drawn[:rows], drawn.pointer)

    def _logits_of(self, rows: int) -> DeviceArray:
        return DeviceArray(self.pointers["logits"], "float32", (rows, self._limits.vocabulary))

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
        tokens = len(batch.token_ids)
        if tokens <= MAX_DECODE:
            return next(bucket.tokens for bucket in self._buckets if bucket.tokens >= tokens)
        return min(round_up(tokens, PREFILL_STEP), self._longest)

    def _stage(self, batch: StepBatch, tokens: int, needed: Int32Array) -> None:
        """Write a step into the host's buffer. The graph gathers by ids and rows: padding names the first of each."""
        staging, at, count = self._staging, self._at, len(batch.token_ids)
        staging.write(batch, tokens)
        staging.write_needed(needed)
        staging.words[at.token_ids + count : at.token_ids + tokens] = 0
        staging.words[at.needed + len(needed) : at.temperatures] = 0

    def _run(self, batch: StepBatch, tokens: int) -> Callable[[], None]:
        """Enqueue a staged step; what is returned enqueues the draw of its warm rows."""
        self.device.upload(self.pointers["step"], self._staging.words)
        rule = self.plan.selection
        dense = rule is None or int(batch.positions.max()) + 1 < rule.dense_below
        if tokens <= MAX_DECODE:
            bucket = next(bucket for bucket in self._buckets if bucket.tokens == tokens)
            (bucket.replay_dense if dense else bucket.replay)()
            return bucket.draw
        rows = logit_rows(self.plan, tokens)
        self._prefill.set_shapes(self._shapes(tokens))
        self._forward(self._prefill, rows)
        return partial(self._draw, rows)

    def _fetch_logits(self, place: int) -> FloatArray:
        """One row of logits of the step that was enqueued last, fp32 [V]; valid until the next call."""
        size = self._limits.vocabulary * ELEMENT_BYTES["float32"]
        self.device.download(self._row, self.pointers["logits"] + place * size)
        self.device.synchronize()
        return self._row.view(np.float32)

    def _draw_on_host(self, place: int, row: SamplingRow) -> int:
        return int(draw_on_host(self._fetch_logits(place)[None], [row])[0])


def _provide_apart(config: ModelConfig, progress: Progress) -> StoredEngine:
    from edged.engine.apart import provide_apart  # noqa: PLC0415 - tests bring an engine of their own

    engine, _ = provide_apart(config, default_folder(), DEFAULT_LIMIT, progress=progress)
    return engine


def _open_gpu() -> Device:
    from edged.executor.tensorrt_device import PyCudaDevice  # noqa: PLC0415 - tests bring a device of their own

    return PyCudaDevice()


def _open_tensorrt(engine: StoredEngine) -> Runtime:
    from edged.executor.tensorrt_runtime import TensorRTRuntime  # noqa: PLC0415 - likewise

    return TensorRTRuntime(engine)
