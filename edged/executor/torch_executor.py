"""The torch executor: one model in this process, on the CPU.

Supported dtypes of weights and KV: float32, bfloat16 and float16 (activations are fp32 in each), and float64 for tests.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.errors import UnsupportedError
from edged.executor.base import Executor, ExecutorLimits
from edged.executor.batch_check import check_batch, check_sampling
from edged.executor.host_sampler import draw as draw_on_host
from edged.executor.page_copies import PageCopies
from edged.executor.torch_buffers import allocate
from edged.executor.torch_operators import TorchOperators
from edged.executor.torch_weights import read_weights
from edged.memory.buffers import ModelPlan, step_buffers, weight_buffers
from edged.models.architecture import Architecture
from edged.models.decoder import Decoder
from plugins_trt.sample.reference import sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.config import ModelConfig
    from edged.executor.base import ByteArray, FloatArray, Int32Array, Progress, StepBatch

DTYPES = ("float32", "bfloat16", "float16", "float64")


class TorchExecutor(Executor):
    """Runs one configured model with torch.

    Raises:
        CheckpointError: The model folder's ``config.json`` is refused.
        UnsupportedError: A device or dtype that it does not run on.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.device != "cpu":
            raise UnsupportedError(
                f"model {config.name}: the torch executor does not run on {config.device!r}; set device to cpu",
                field="device",
            )
        if config.dtype not in DTYPES:
            raise UnsupportedError(
                f"model {config.name}: dtype {config.dtype!r} is not supported; set one of {', '.join(DTYPES[:3])}",
                field="dtype",
            )
        self._folder = config.path
        self.plan = plan = ModelPlan.of(config, Architecture.of(config))
        self._threads = config.threads or len(os.sched_getaffinity(0))
        self._limits = ExecutorLimits(
            max_step_tokens=plan.step_tokens,
            max_sequences=plan.max_sequences,
            context_length=plan.context_length,
            pages=plan.pages,
            vocabulary=plan.architecture.vocabulary,
        )
        self.buffers: dict[str, torch.Tensor] = {}
        """Every tensor that lives as long as the executor, by the name of its spec."""

    @property
    def limits(self) -> ExecutorLimits:
        """The loaded limits."""
        return self._limits

    def load(self, progress: Progress) -> None:
        """Allocate everything, then read the weights into their places; when that fails, nothing stays."""
        try:
            self._load(progress)
        except BaseException:
            self.close()
            raise

    def _load(self, progress: Progress) -> None:
        torch.set_num_threads(self._threads)
        plan = self.plan
        device = torch.device(plan.device)
        specs = (*weight_buffers(plan), *step_buffers(plan))
        self.buffers = allocate(specs, device, progress)
        progress("allocating", len(specs), len(specs))
        read_weights(self._folder, plan.architecture, self.buffers, progress)
        self._pages = PageCopies(self.buffers)
        self._decoder = Decoder(plan.architecture, self.buffers)
        frequencies = plan.architecture.rope.inverse_frequencies(
            plan.architecture.head_dim, plan.context_length
        )
        self._ops = TorchOperators(
            self._decoder,
            self.buffers,
            torch.from_numpy(frequencies).to(device),
            plan.max_sequences,
            plan.selection,
        )

    def step(self, batch: StepBatch) -> Int32Array:
        """Run one step and draw a token for each needed row, int32 [R]."""
        drawn = np.empty(len(batch.logit_rows), np.int32)

        def draw(first: int, logits: torch.Tensor) -> None:
            rows = batch.sampling[first : first + logits.shape[0]]
            simple = [index for index, row in enumerate(rows) if row.simple]
            if simple:
                chosen = [rows[index] for index in simple]
                drawn[[first + index for index in simple]] = sample(
                    logits if len(simple) == len(rows) else logits[simple],
                    temperatures=[row.temperature for row in chosen],
                    top_ks=[row.top_k for row in chosen],
                    top_ps=[row.top_p for row in chosen],
                    seeds=[row.seed for row in chosen],
                    positions=[row.position for row in chosen],
                ).numpy()
            others = [index for index, row in enumerate(rows) if not row.simple]
            for index in others:
                drawn[first + index] = draw_on_host(logits[index : index + 1].float().numpy(), [rows[index]])[
                    0
                ]

        check_sampling(batch)
        self._run(batch, draw)
        return drawn

    def logits(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the needed rows' logits, fp32 [R, V]."""
        result = np.empty((len(batch.logit_rows), self._limits.vocabulary), np.float32)

        def keep(first: int, logits: torch.Tensor) -> None:
            result[first : first + logits.shape[0]] = logits.numpy()

        self._run(batch, keep)
        return result

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in every layer, its compressed keys included."""
        return self._pages.page_bytes

    def read_pages(self, pages: Int32Array, out: ByteArray) -> None:
        """Copy pages to ``out``, uint8 [n, page_bytes]."""
        self._pages.read(pages, out)

    def write_pages(self, pages: Int32Array, data: ByteArray) -> None:
        """Copy ``data``, uint8 [n, page_bytes], to pages."""
        self._pages.write(pages, data)

    def close(self) -> None:
        """Drop every buffer."""
        self.__dict__.pop("_pages", None)
        self.__dict__.pop("_ops", None)
        self.__dict__.pop("_decoder", None)
        self.buffers = {}

    @torch.inference_mode()
    def _run(self, batch: StepBatch, consume: Callable[[int, torch.Tensor], None]) -> None:
        check_batch(batch, self._limits)
        self._ops.begin(batch, consume)
        self._decoder.forward(self._ops)
