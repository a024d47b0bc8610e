"""One engine's steps: what is bound to it, its shapes, its captured buckets, and the tokens drawn from its logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edged.engine.graph import LOGITS
from edged.engine.shapes import PREFILL_STEP, EngineShapes
from edged.errors import LedgerError
from edged.executor.captured import Bucket
from edged.executor.cuda_staging import Staging
from edged.executor.device_options import DeviceOptions
from edged.memory.cuda_buffers import (
    StepLayout,
    attention_workspace,
    bucket_sizes,
    captured_sizes,
    has_dense_graph,
    logit_rows,
)
from edged.memory.specs import ELEMENT_BYTES, PAGE_TOKENS
from edged.memory.tensorrt_buffers import CONTEXT, tensorrt_step_buffers
from edged.models.weights import EMBEDDING, HEAD
from plugins_trt.argmax.contract import Argmax
from plugins_trt.contract import MAX_DECODE, DeviceArray, round_up
from plugins_trt.sample.contract import WORKSPACE, Options, Sample
from plugins_trt.sample.rows import LOGPROB_WORDS, ROW_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edged.config import ModelConfig
    from edged.executor.base import FloatArray, Int32Array, Progress, StepBatch
    from edged.executor.tensorrt_device import Device, EngineKernels
    from edged.executor.tensorrt_runtime import Context, LoadedEngine, Shapes
    from edged.memory.buffers import ModelPlan
    from plugins_trt.tensorrt.device_session import DeviceSession

_DECODE, _PREFILL = 0, 1
"""Indices of the profiles of :class:`edged.engine.shapes.EngineShapes`."""

_WORD = ELEMENT_BYTES["int32"]


class EngineSteps:
    """Runs steps of one loaded engine.

    Args:
        config: The model's part of the configuration.
        plan: Its plan.
        pointers: Addresses of the plan's buffers, by name.
        device: Where they are.
        engine: Loaded there.
        kernels: The device's.
        session: Open for the device's stream.
    """

    def __init__(  # noqa: PLR0917 - the parts of an executor
        self,
        config: ModelConfig,
        plan: ModelPlan,
        pointers: Mapping[str, int],
        device: Device,
        engine: LoadedEngine,
        kernels: EngineKernels,
        session: DeviceSession,
    ) -> None:
        self._plan = plan
        self._pointers = pointers
        self._device = device
        self._engine = engine
        self._kernels = kernels
        self._session = session
        self._longest = EngineShapes.of(config).prefill_tokens
        self._at = at = StepLayout.of(plan)
        self._staging = Staging(plan, device.host_words(at.words))
        self._drawn = device.host_words(logit_rows(plan, bucket_sizes(plan)[-1]))
        self._buffers = {spec.name: spec for spec in tensorrt_step_buffers(plan)}
        self._options = DeviceOptions(tuple(self._buffers.values()), device.host_words)
        self._row = device.host_words(plan.architecture.vocabulary)
        self._prefill = engine.context(_PREFILL, pointers[CONTEXT], self._bindings(), captured=False)
        self.buckets: tuple[Bucket, ...] = ()
        """By rising size."""

    def capture(self, workspace: int, progress: Progress) -> None:
        """Capture every bucket that decodes; each has a context of its own, for a context keeps what a graph runs on.

        Args:
            workspace: Bytes of scratch memory that attention has.
            progress: Is told of every bucket.

        Raises:
            LedgerError: Attention needs more on this device.
        """
        plan, device = self._plan, self._device
        needed = max(attention_workspace(plan, size, device.multiprocessors) for size in bucket_sizes(plan))
        if needed > workspace:
            raise LedgerError(
                f"attention needs {needed} bytes of scratch memory on this device, {workspace} were planned: report this "
                "card"
            )
        self._staging.words[:] = 0  # no sequence: only padding runs
        device.upload(self._pointers["step"], self._staging.words)
        sizes, bindings = captured_sizes(plan), self._bindings()
        draws: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}
        buckets = []
        for index, tokens in enumerate(sizes):
            progress("capturing graphs", index, len(sizes))
            context = self._engine.context(_DECODE, self._pointers[CONTEXT], bindings, captured=True)
            context.set_shapes(self._shapes(tokens))
            rows = logit_rows(plan, tokens)
            replay = replay_dense = device.capture(partial(self._forward, context, rows))
            if has_dense_graph(plan, tokens):
                replay_dense = device.capture(partial(self._forward, context, rows, dense=True))
            if rows not in draws:
                plain, full = partial(self._draw, rows), partial(self._draw, rows, options=True)
                draws[rows] = device.capture(plain), device.capture(full)
            buckets.append(Bucket(tokens, rows, replay, replay_dense, *draws[rows]))
        device.synchronize()
        progress("capturing graphs", len(sizes), len(sizes))
        self.buckets = tuple(buckets)

    def padded(self, tokens: int) -> int:
        """Tokens of a step with its padding."""
        if tokens <= MAX_DECODE:
            return self._bucket(tokens).tokens
        return min(round_up(tokens, PREFILL_STEP), self._longest)

    def rows(self, tokens: int) -> int:
        """Rows of logits of a padded step."""
        return logit_rows(self._plan, tokens)

    def stage(self, batch: StepBatch, tokens: int, needed: Int32Array) -> None:
        """Write a step into the host's buffer. The graph gathers by ids and rows: padding names the first of each."""
        staging, at, count = self._staging, self._at, len(batch.token_ids)
        staging.write(batch, tokens)
        staging.write_needed(needed)
        staging.words[at.token_ids + count : at.token_ids + tokens] = 0
        staging.words[at.needed + len(needed) : at.temperatures] = 0

    def stage_sampling(self, batch: StepBatch) -> bool:
        """Write how the rows are drawn; return whether any is drawn rather than the largest taken."""
        return self._staging.write_sampling(np.arange(len(batch.sampling), dtype=np.int32), batch.sampling)

    def run(self, batch: StepBatch, tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Enqueue a staged step; what is returned enqueues the draw of its warm rows, and that with options."""
        self._device.upload(self._pointers["step"], self._staging.words)
        if tokens <= MAX_DECODE:
            rule, bucket = self._plan.selection, self._bucket(tokens)
            dense = rule is None or int(batch.positions.max()) + 1 < rule.dense_below
            (bucket.replay_dense if dense else bucket.replay)()
            return bucket.draw, bucket.draw_with_options
        rows = self.rows(tokens)
        self._prefill.set_shapes(self._shapes(tokens))
        self._forward(self._prefill, rows)
        return partial(self._draw, rows), partial(self._draw, rows, options=True)

    def write_options(self, batch: StepBatch) -> bool:
        """Enqueue the copies of the rows' options, which may wait for masks; False where there are none."""
        places = np.arange(len(batch.sampling), dtype=np.int32)
        if not self._options.write(places, batch.sampling):
            return False
        for name, words in self._options.parts():
            self._device.upload(self._pointers[name], words)
        return True

    def finish_options(self, drawn: Int32Array) -> set[int]:
        """Tell the samplers of the tokens; the rows that were drawn with options."""
        return self._options.finish(drawn)

    def drawn(self, count: int) -> Int32Array:
        """Wait for the step, and take its first ids, int32 ``[count]``."""
        self._device.synchronize()
        ids: Int32Array = self._drawn[:count].copy()
        return ids

    def logits(self, place: int) -> FloatArray:
        """One row of logits of the step that was enqueued last, fp32 ``[V]``; valid until the next call."""
        size = self._plan.architecture.vocabulary * ELEMENT_BYTES["float32"]
        self._device.download(self._row, self._pointers["logits"] + place * size)
        self._device.synchronize()
        return self._row.view(np.float32)

    def _bucket(self, tokens: int) -> Bucket:
        return next(bucket for bucket in self.buckets if bucket.tokens >= tokens)

    def _bindings(self) -> dict[str, int]:
        """Addresses of the graph's inputs and outputs: weights, tables, and the parts of a step's data."""
        pointers, at, step = dict(self._pointers), self._at, self._pointers["step"]
        for name, place in (
            ("token_ids", at.token_ids),
            ("positions", at.positions),
            ("sequence_starts", at.starts),
            ("lengths", at.lengths),
            ("page_tables", at.tables),
            ("logit_rows", at.needed),
        ):
            pointers[name] = step + _WORD * place
        if self._plan.architecture.tied:
            pointers[HEAD] = pointers[EMBEDDING]
        pointers[LOGITS] = self._pointers["logits"]
        return pointers

    def _shapes(self, tokens: int) -> Shapes:
        """Shapes of everything whose size a step decides, or the plan."""
        plan = self._plan
        table = (plan.pages_per_sequence * PAGE_TOKENS, plan.architecture.head_dim // 2)
        return {
            "token_ids": (tokens,),
            "positions": (tokens,),
            "sequence_starts": (plan.max_sequences + 1,),
            "lengths": (plan.max_sequences,),
            "page_tables": (plan.max_sequences, plan.pages_per_sequence),
            "tree_masks": (tokens, 2),
            "logit_rows": (self.rows(tokens),),
            "rope_cosine": table,
            "rope_sine": table,
        }

    def _forward(self, context: Context, rows: int, *, dense: bool = False) -> None:
        """The engine, and the largest logit of each row on its way to the host."""
        self._session.dense = dense
        context.enqueue(int(self._device.stream.handle))
        drawn = DeviceArray(self._pointers["drawn"], "int32", (rows,))
        self._kernels.argmax(Argmax(self._logits_of(rows), drawn))
        self._device.download(self._drawn[:rows], drawn.pointer)

    def _draw(self, rows: int, *, options: bool = False) -> None:
        """What follows where a row has a temperature, or options."""
        step, at = self._pointers["step"], self._at

        def part(place: int, dtype: str) -> DeviceArray:
            return DeviceArray(step + _WORD * place, dtype, (rows,))

        drawn = DeviceArray(self._pointers["drawn"], "int32", (rows,))
        self._kernels.sample(
            Sample(
                logits=self._logits_of(rows),
                temperatures=part(at.temperatures, "float32"),
                top_ks=part(at.top_ks, "int32"),
                top_ps=part(at.top_ps, "float64"),
                numbers=part(at.numbers, "float64"),
                ids=drawn,
                workspace=DeviceArray(self._pointers["sample_workspace"], "uint8", (rows * WORKSPACE,)),
                options=self._options_of(rows) if options else None,
                largest_known=True,
            )
        )
        self._device.download(self._drawn[:rows], drawn.pointer)
        if options:
            self._device.download(
                self._options.logprobs[: rows * LOGPROB_WORDS], self._pointers["sample_logprobs"]
            )

    def _options_of(self, rows: int) -> Options:
        def whole(name: str) -> DeviceArray:
            spec = self._buffers[name]
            return DeviceArray(self._pointers[name], spec.dtype, spec.shape)

        return Options(
            rows=DeviceArray(self._pointers["sample_rows"], "int32", (rows, ROW_WORDS)),
            entries=whole("sample_entries"),
            raw=whole("sample_raw"),
            masks=whole("sample_masks"),
            logprobs=DeviceArray(self._pointers["sample_logprobs"], "int32", (rows, LOGPROB_WORDS)),
        )

    def _logits_of(self, rows: int) -> DeviceArray:
        return DeviceArray(self._pointers["logits"], "float32", (rows, self._plan.architecture.vocabulary))
