"""The torch executor on a GPU: one model in this process, each bucket of steps a captured CUDA graph.

A step is one copy (tokens, positions, page tables, how rows are drawn), one graph, and the ids of the drawn tokens on
their way back. Padding rows belong to no sequence: they write no page and are never looked at.

Supported dtypes of weights, activations and KV: bfloat16 and float16; sums are fp32 everywhere. Linears that a checkpoint
has in 4 bits stay so.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.errors import LedgerError
from edged.executor.base import Executor, ExecutorLimits
from edged.executor.batch_check import check_batch, check_sampling
from edged.executor.captured import Bucket, check_multiprocessors
from edged.executor.cuda_angles import fill_angles
from edged.executor.cuda_eagle import CudaEagle
from edged.executor.cuda_every_row import EveryRow
from edged.executor.cuda_operators import CudaOperators
from edged.executor.cuda_packed import PackedLoader, packed_tensors
from edged.executor.cuda_staging import Staging
from edged.executor.cuda_trees import TreeBucket, TreeSteps, draw_along_paths
from edged.executor.device_options import DeviceOptions
from edged.executor.host_sampler import draw as draw_on_host
from edged.executor.page_copies import PageCopies
from edged.executor.torch_buffers import allocate
from edged.executor.torch_tree import accepted_paths
from edged.executor.torch_weights import read_weights
from edged.memory.buffers import ModelPlan, draft_buffers, step_buffers, weight_buffers
from edged.memory.cuda_buffers import (
    attention_workspace,
    bucket_sizes,
    has_dense_graph,
    most_logit_rows,
    most_tree_tokens,
)
from edged.models.architecture import Architecture
from edged.models.decoder import Decoder
from plugins_trt.argmax.contract import Argmax
from plugins_trt.contract import DeviceArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.config import ModelConfig
    from edged.executor.base import ByteArray, FloatArray, Int32Array, Progress, SamplingRow, StepBatch
    from edged.executor.cuda_device import Device, StepKernels

_PARTS = ("_kernels", "_decoder", "_staging", "_every_row", "_options", "_pages", "_trees", "_eagle")
"""Attributes that a loaded executor has, apart from its buffers."""


class CudaExecutor(Executor):
    """Runs one configured model on a GPU.

    Args:
        config: The model's part of the configuration.
        open_device: Makes the device; the first GPU by default.

    Raises:
        CheckpointError: The model folder's ``config.json`` is refused.
        UnsupportedError: A dtype, a head layout or a context that the kernels do not have.
    """

    def __init__(self, config: ModelConfig, open_device: Callable[[], Device] | None = None) -> None:
        self._folder = config.path
        self.plan = plan = ModelPlan.of(config, Architecture.of(config))
        self._open_device = open_device
        self._embeds = config.embeddings != "none"
        self._limits = ExecutorLimits(
            max_step_tokens=plan.step_tokens,
            max_sequences=plan.max_sequences,
            context_length=plan.context_length,
            pages=plan.pages,
            vocabulary=plan.architecture.vocabulary,
            max_tree_tokens=most_tree_tokens(plan),
        )
        self.buffers: dict[str, torch.Tensor] = {}
        """Every tensor that lives as long as the executor, by the name of its spec."""

    @property
    def limits(self) -> ExecutorLimits:
        """The loaded limits."""
        return self._limits

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The captured steps, by rising size."""
        return self._buckets

    def load(self, progress: Progress) -> None:
        """Allocate everything, read the weights into their places, capture every bucket; if that fails, nothing stays."""
        try:
            self._load(progress)
        except BaseException:
            with suppress(Exception):  # what went wrong first is what matters
                self.close()
            raise

    def _load(self, progress: Progress) -> None:
        plan = self.plan
        self.device = _open_gpu() if self._open_device is None else self._open_device()
        check_multiprocessors(self.device.multiprocessors)
        with self.device.scope():
            specs = (*weight_buffers(plan), *step_buffers(plan), *draft_buffers(plan))
            self.buffers = allocate(specs, self.device.torch_device, progress)
            progress("allocating", len(specs), len(specs))
            self._fill_weights(progress)
            fill_angles(
                plan.architecture, plan.context_length, *(self.buffers[n] for n in ("cosine", "sine"))
            )
            self.device.synchronize()
        self._kernels: StepKernels = self.device.kernels(plan)
        self._decoder = Decoder(plan.architecture, self.buffers)
        self._staging = Staging(plan, self.device.host_words(len(self.buffers["step"])))
        self._drawn = self.device.host_words(most_logit_rows(plan))
        self._logits = self.device.host_words(plan.architecture.vocabulary).view(np.float32)
        parts = (self._kernels, self._decoder, self._staging)
        self._every_row = EveryRow(plan, self.buffers, self.device, *parts, keeps_hidden=self._embeds)
        self._options = DeviceOptions(step_buffers(plan), self.device.host_words)
        self._pages = PageCopies(self.buffers)
        self._eagle: CudaEagle | None = None
        if plan.draft is not None:
            self._eagle = CudaEagle(
                plan, self.buffers, self.device, kernels=self._kernels, head=self._decoder.head
            )
        self._trees = TreeSteps(
            plan, self.buffers, self.device, self._kernels, decoder=self._decoder, drawn=self._drawn
        )
        self._capture_buckets(progress)
        if self._eagle is not None:
            self._eagle.capture()
            self.device.synchronize()

    @property
    def draft_model(self) -> CudaEagle | None:
        """The EAGLE draft, where there is one."""
        return self._eagle

    def step(self, batch: StepBatch) -> Int32Array:
        """Run one step and draw a token for each needed row, int32 [R]."""
        check_batch(batch, self._limits)
        check_sampling(batch)
        if self._eagle is not None:
            self._eagle.put_all_away()
        drawn = self._step_of_trees(batch) if has_trees(batch) else self._plain_step(batch)
        if self._eagle is not None and batch.draft_slots:
            self._eagle.observe_step(batch, accepted_paths(batch, drawn), drawn)
        return drawn

    def _plain_step(self, batch: StepBatch) -> Int32Array:
        """A step without trees."""
        bucket = self._bucket_of(len(batch.token_ids))
        needed = batch.logit_rows
        if len(needed) > bucket.rows:
            logits = self._every_row.logits(batch, bucket.tokens, self._fetch_logits)
            return draw_on_host(logits, batch.sampling)
        places = self._stage(batch, bucket)
        warm = self._staging.write_sampling(places, batch.sampling)
        self.device.upload(self.buffers["step"], self._staging.words)
        self._replay(bucket, batch)
        if self._options.write(places, batch.sampling):
            for name, words in self._options.parts():
                self.device.upload(self.buffers[name].view(-1)[: len(words)], words)
            bucket.draw_with_options()
        elif warm:
            bucket.draw()
        self._wait(batch)
        drawn: Int32Array = self._drawn[places]
        done = self._options.finish(drawn)
        for index, row in enumerate(batch.sampling):
            if not row.simple and index not in done:
                drawn[index] = self._draw_on_host(int(places[index]), row)
        return drawn

    def logits(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the needed rows' logits, fp32 [R, V]."""
        check_batch(batch, self._limits)
        if self._eagle is not None:
            self._eagle.put_all_away()
        needed = batch.logit_rows
        if has_trees(batch):
            places = needed
            self._run_trees(batch, verify=False)
        else:
            bucket = self._bucket_of(len(batch.token_ids))
            if len(needed) > bucket.rows:
                return self._every_row.logits(batch, bucket.tokens, self._fetch_logits)
            places = self._stage(batch, bucket)
            self.device.upload(self.buffers["step"], self._staging.words)
            self._replay(bucket, batch)
        result = np.empty((len(needed), self._limits.vocabulary), np.float32)
        for index, place in enumerate(places.tolist()):
            result[index] = self._fetch_logits(place)
        self.device.synchronize()
        return result

    def _step_of_trees(self, batch: StepBatch) -> Int32Array:
        """Verify a step's trees; what the host has to draw it draws along the paths, which it then keeps."""
        left = self._run_trees(batch, verify=True)
        self._wait(batch)
        drawn: Int32Array = self._drawn[batch.logit_rows]
        if all(row.simple for row in batch.sampling):
            return drawn
        draw_along_paths(batch, drawn, self._draw_on_host)
        if left:
            paths = accepted_paths(batch, drawn)
            self._trees.keep({index: paths[index] for index in left}, len(batch.lengths))
        return drawn

    def _wait(self, batch: StepBatch) -> None:
        """Wait for a step's tokens; a draft goes on from them meanwhile."""
        if self._eagle is None:
            self.device.synchronize()
            return
        arrived = self.device.mark()
        self._eagle.go_on(batch)
        arrived()

    def _run_trees(self, batch: StepBatch, *, verify: bool) -> list[int]:
        """Enqueue a step of trees; return the sequences whose paths are left for the host to choose."""
        bucket = self._trees.bucket_of(len(batch.token_ids))
        left = self._stage_trees(batch, bucket, verify=verify)
        self.device.upload(self.buffers["step"], self._staging.words)
        self._replay(bucket, batch)
        return left

    def _stage_trees(self, batch: StepBatch, bucket: TreeBucket, *, verify: bool) -> list[int]:
        """Write a step of trees; return the sequences whose paths are left for the host to choose."""
        self._staging.write(batch, bucket.tokens)
        drawn = len(batch.logit_rows) if verify else 0
        self._staging.write_sampling(batch.logit_rows[:drawn], batch.sampling[:drawn])
        return self._staging.write_trees(batch, bucket.tokens, verify=verify)

    def hidden_states(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the final norm's output at the needed rows, fp32 [R, H]."""
        check_batch(batch, self._limits)
        return self._every_row.hidden_states(batch, self._bucket_of(len(batch.token_ids)).tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: keys, values and compressed keys of every layer."""
        return self._pages.page_bytes

    def read_pages(self, pages: Int32Array, out: ByteArray) -> None:
        """Copy pages to host memory."""
        with self.device.scope():
            self._pages.read(pages, out)
            self.device.synchronize()

    def write_pages(self, pages: Int32Array, data: ByteArray) -> None:
        """Copy pages back."""
        with self.device.scope():
            self._pages.write(pages, data)
            self.device.synchronize()

    def close(self) -> None:
        """Drop graphs and buffers, and leave the device."""
        self._buckets: tuple[Bucket, ...] = ()
        for name in _PARTS:
            self.__dict__.pop(name, None)
        self.buffers = {}
        device = self.__dict__.pop("device", None)
        if device is not None:
            device.close()

    def _fill_weights(self, progress: Progress) -> None:
        """Read the model folder."""
        store = PackedLoader(packed_tensors(self.plan, self.buffers), self.buffers, self.device)
        read_weights(self._folder, self.plan.architecture, self.buffers, progress, store)

    @torch.inference_mode()
    def _capture_buckets(self, progress: Progress) -> None:
        """Capture every bucket, the largest first: the others then find all memory that any of them needs."""
        plan = self.plan
        sizes = bucket_sizes(plan)
        arrived = self.buffers["arrived"]
        draws: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}
        buckets = []
        self._staging.words[:] = 0  # no sequence: only padding runs
        self._staging.words[: sizes[-1]] = -1
        self.device.upload(self.buffers["step"], self._staging.words)
        for index, tokens in enumerate(reversed(sizes)):
            progress("capturing graphs", index, len(sizes))
            if attention_workspace(plan, tokens, self.device.multiprocessors) > len(
                self.buffers["attention_workspace"]
            ):
                raise LedgerError(
                    f"a step of {tokens} tokens needs more scratch memory on this device than was planned"
                )
            operators = CudaOperators(plan, self.buffers, self._kernels, tokens)
            rows = operators.rows
            replay = replay_dense = self.device.capture(partial(self._forward, operators))
            if has_dense_graph(plan, tokens):
                dense = CudaOperators(plan, self.buffers, self._kernels, tokens, dense=True)
                replay_dense = self.device.capture(partial(self._forward, dense))
            if rows not in draws:
                plain, full = partial(self._draw, operators), partial(self._draw, operators, options=True)
                draws[rows] = self.device.capture(plain), self.device.capture(full)
            buckets.append(Bucket(tokens, rows, replay, replay_dense, *draws[rows]))
        self._trees.capture(progress)
        self.device.synchronize()
        assert not arrived.any(), "selection leaves its counters at zero"  # noqa: S101
        progress("capturing graphs", len(sizes), len(sizes))
        self._buckets = tuple(reversed(buckets))

    def _forward(self, operators: CudaOperators) -> None:
        """One step up to the largest logit of each row, on its way to the host."""
        operators.restart()
        logits = self._decoder.forward(operators)
        drawn = self.buffers["drawn"][: operators.rows]
        self._kernels.argmax(Argmax(DeviceArray.of(logits), DeviceArray.of(drawn)))
        self.device.download(self._drawn[: operators.rows], drawn)

    def _draw(self, operators: CudaOperators, *, options: bool = False) -> None:
        """What follows where a row has a temperature, or options."""
        drawn, rows = self.buffers["drawn"][: operators.rows], operators.rows
        self._kernels.sample(operators.sampling(drawn, options=options))
        self.device.download(self._drawn[:rows], drawn)
        if options:
            logprobs = self.buffers["sample_logprobs"][:rows].view(-1)
            self.device.download(self._options.logprobs[: logprobs.numel()], logprobs)

    def _replay(self, bucket: Bucket | TreeBucket, batch: StepBatch) -> None:
        """Enqueue a staged step."""
        rule = self.plan.selection
        if rule is None or int(batch.positions.max()) + 1 < rule.dense_below:
            bucket.replay_dense()
        elif isinstance(bucket, TreeBucket) and int(batch.positions.min()) + 1 >= rule.dense_below:
            bucket.replay_sparse()
        else:
            bucket.replay()

    def _bucket_of(self, tokens: int) -> Bucket:
        return next(bucket for bucket in self._buckets if bucket.tokens >= tokens)

    def _stage(self, batch: StepBatch, bucket: Bucket) -> Int32Array:
        """Write a step; return the row of logits of each needed row."""
        self._staging.write(batch, bucket.tokens)
        if bucket.rows == bucket.tokens:
            return batch.logit_rows
        self._staging.write_needed(batch.logit_rows)
        return np.arange(len(batch.logit_rows), dtype=np.int32)

    def _fetch_logits(self, place: int) -> FloatArray:
        """One row of logits of the step that was enqueued last, fp32 [V]; valid until the next call."""
        self.device.download(self._logits.view(np.int32), self.buffers["logits"][place])
        self.device.synchronize()
        return self._logits

    def _draw_on_host(self, place: int, row: SamplingRow) -> int:
        return int(draw_on_host(self._fetch_logits(place)[None], [row])[0])


def has_trees(batch: StepBatch) -> bool:
    """Whether a step brings a tree with more than its root, which is a token like any other."""
    return batch.tree_masks is not None and len(batch.token_ids) > len(batch.lengths)


def _open_gpu() -> Device:
    from edged.executor.cuda_device import CudaDevice  # noqa: PLC0415 - tests bring a device of their own

    return CudaDevice()
