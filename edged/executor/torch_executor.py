"""The torch executor: one model in this process, on the CPU.

Supported dtypes of weights and KV: float32, bfloat16 and float16 (activations are fp32 in each), and float64 for tests.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.errors import UnsupportedError
from edged.executor.base import OFF_PATH, Executor, ExecutorLimits
from edged.executor.batch_check import check_batch, check_sampling
from edged.executor.host_sampler import draw as draw_on_host
from edged.executor.page_copies import PageCopies
from edged.executor.torch_buffers import allocate
from edged.executor.torch_eagle import DraftSlot, TorchEagle
from edged.executor.torch_operators import TorchOperators
from edged.executor.torch_packed import packed_weights
from edged.executor.torch_tree import accepted_paths, parent_rows
from edged.executor.torch_weights import read_weights
from edged.memory.buffers import ModelPlan, draft_buffers, step_buffers, weight_buffers
from edged.models.architecture import Architecture
from edged.models.decoder import Decoder
from plugins_trt.sample.reference import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.config import ModelConfig
    from edged.executor.base import ByteArray, FloatArray, Int32Array, Progress, SamplingRow, StepBatch
    from edged.memory.draft_plan import DraftPlan

DTYPES = ("float32", "bfloat16", "float16", "float64")


class TorchExecutor(Executor):
    """Runs one configured model with torch.

    Args:
        config: The model's part of the configuration.
        keeps_hidden: Whether :attr:`hidden` is wanted; it is kept where there is a draft model.

    Raises:
        CheckpointError: The model folder's ``config.json`` is refused.
        UnsupportedError: A device or dtype that it does not run on.
    """

    def __init__(self, config: ModelConfig, *, keeps_hidden: bool = False) -> None:
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
        self._eagle: TorchEagle | None = None
        self._kept_layers = () if plan.draft is None else plan.draft.eagle.hidden_layers
        self._keeps_hidden = keeps_hidden or (plan.draft is not None and not self._kept_layers)
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
        specs = (*weight_buffers(plan), *step_buffers(plan), *draft_buffers(plan))
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
            plan.logit_rows,
            plan.selection,
            keeps_hidden=self._keeps_hidden,
            kept_layers=self._kept_layers,
        )
        if plan.draft is not None:
            self._load_draft(plan.draft)

    def _load_draft(self, draft: DraftPlan) -> None:
        layer, token_map = draft.eagle.layer, draft.token_map
        head = self._decoder.head.weight
        shares_head = not draft.eagle.has("head")
        packed = packed_weights(self.plan.architecture, self.buffers)
        if shares_head and packed.get(self._decoder.head.name) is not None:
            raise UnsupportedError(
                "a draft shares the model's LM head, which is quantized here: use a checkpoint whose head is not",
                field="speculation.draft",
            )
        frequencies = layer.rope.inverse_frequencies(layer.head_dim, self.plan.context_length)
        self._eagle = TorchEagle(
            draft.eagle,
            self.buffers,
            torch.from_numpy(frequencies),
            head=head,
            token_map=None if token_map is None else torch.from_numpy(token_map.astype(np.int64)),
            window=draft.window,
        )
        self._eagle.read(draft.eagle, head)

    @property
    def hidden(self) -> torch.Tensor:
        """The final norm's output of every row of the last step, ``[T, H]``, where it is kept; valid until the next."""
        return self._ops.hidden

    @property
    def head(self) -> torch.Tensor:
        """The LM head, ``[V, H]``, unless it is quantized."""
        return self._decoder.head.weight

    @property
    def draft_model(self) -> TorchEagle | None:
        """The EAGLE draft, where there is one."""
        return self._eagle

    def step(self, batch: StepBatch) -> Int32Array:
        """Run one step and draw a token for each needed row, int32 [R]."""
        drawn = np.full(len(batch.logit_rows), OFF_PATH, np.int32)
        parents = parent_rows(batch)

        def on_path(row: int) -> bool:
            if row not in parents:
                return True
            parent = parents[row]  # was drawn before
            return int(drawn[parent]) == int(batch.token_ids[batch.logit_rows[row]])

        def draw(first: int, logits: torch.Tensor) -> None:
            rows = batch.sampling[first : first + logits.shape[0]]
            # All rows of a tree are many, those on its path are few; only where the largest is taken it costs nothing.
            at_once = [
                index
                for index, row in enumerate(rows)
                if row.simple and (row.temperature == 0 or first + index not in parents)
            ]
            if at_once:
                some = logits if len(at_once) == len(rows) else logits[at_once]
                drawn[[first + index for index in at_once]] = _sample(
                    some, [rows[index] for index in at_once]
                )
            for index in sorted(set(range(len(rows))).difference(at_once)):
                if on_path(first + index):
                    row, values = rows[index], logits[index : index + 1]
                    one = (
                        _sample(values, [row]) if row.simple else draw_on_host(values.float().numpy(), [row])
                    )
                    drawn[first + index] = one[0]

        check_sampling(batch)
        self._run(batch, draw)
        paths = accepted_paths(batch, drawn)
        if parents:
            self._keep(batch, paths)
        if self._eagle is not None and batch.draft_slots:
            self._show(self._eagle, batch, paths)
        return drawn

    def _show(self, eagle: TorchEagle, batch: StepBatch, paths: dict[int, list[int]]) -> None:
        """Show the hidden states of what was stored to the sequences' drafts."""
        starts, lengths = batch.sequence_starts.tolist(), batch.lengths.tolist()
        seen = self._ops.states if self._kept_layers else self._ops.hidden
        for index, slot in enumerate(batch.draft_slots):
            if isinstance(slot, DraftSlot):
                rows = seen[starts[index] : starts[index + 1]]
                path = paths.get(index)
                eagle.observe(slot, rows if path is None else rows[path], lengths[index])

    def logits(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the needed rows' logits, fp32 [R, V]."""
        result = np.empty((len(batch.logit_rows), self._limits.vocabulary), np.float32)

        def keep(first: int, logits: torch.Tensor) -> None:
            result[first : first + logits.shape[0]] = logits.numpy()

        self._run(batch, keep)
        return result

    def hidden_states(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the final norm's output at the needed rows, fp32 [R, H]."""
        result = np.empty((len(batch.logit_rows), self.plan.architecture.hidden), np.float32)

        def keep(_: int, hidden: torch.Tensor) -> None:
            result[:] = hidden.numpy()

        self._run(batch, keep, gives_hidden=True)
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
        self._eagle = None
        self.__dict__.pop("_pages", None)
        self.__dict__.pop("_ops", None)
        self.__dict__.pop("_decoder", None)
        self.buffers = {}

    @torch.inference_mode()
    def _keep(self, batch: StepBatch, paths: dict[int, list[int]]) -> None:
        self._ops.keep(batch, paths)

    @torch.inference_mode()
    def _run(
        self, batch: StepBatch, consume: Callable[[int, torch.Tensor], None], *, gives_hidden: bool = False
    ) -> None:
        check_batch(batch, self._limits)
        self._ops.begin(batch, consume, gives_hidden=gives_hidden)
        self._decoder.forward(self._ops)


def _sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Int32Array:
    """Draw simple rows, ``[n, V]`` to int32 ``[n]``."""
    drawn: Int32Array = sample(
        logits,
        temperatures=[row.temperature for row in rows],
        top_ks=[row.top_k for row in rows],
        top_ps=[row.top_p for row in rows],
        seeds=[row.seed for row in rows],
        positions=[row.position for row in rows],
    ).numpy()
    return drawn
