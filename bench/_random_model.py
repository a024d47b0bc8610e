"""A model of MiniCPM4-8B's shape with random weights, made on the GPU on the spot, for bench/decode.py and prefill.py.

Random weights move the same bytes and multiply as many numbers as trained ones; the text they give is nonsense.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.config import AttentionConfig, ModelConfig
from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch
from edged.executor.cuda_device import CudaDevice
from edged.executor.cuda_executor import CudaExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.executor.base import Progress

SHAPE = {
    "model_type": "minicpm",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "vocab_size": 73448,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
LONGEST = 131072
CHUNK = 2048
_ENQUEUED, _SLEEP_CYCLES = 5, 60_000_000
"""Runs that are enqueued while the device waits (some 30 ms)."""


class RandomModel(CudaExecutor):
    """The executor of `device: cuda` with weights that come from no file; one sequence."""

    def _fill_weights(self, progress: Progress) -> None:
        generator = torch.Generator(self.device.torch_device).manual_seed(0)
        names = [name for name, tensor in self.buffers.items() if self._is_weight(name)]
        for index, name in enumerate(names):
            progress("drawing weights", index, len(names))
            weight = self.buffers[name]
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)

    def _is_weight(self, name: str) -> bool:
        from edged.memory.buffers import weight_buffers

        return name in {spec.name for spec in weight_buffers(self.plan)}

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step of one token reads: all but the embedding's other rows."""
        matrices = sum(self.buffers[name].nbytes for name in self.buffers if self._is_weight(name))
        embedding = self.buffers["embedding"]
        return int(matrices - embedding.nbytes + embedding[0].nbytes)

    def fill_pages(self) -> None:
        """Independent random keys and values in every page, and compressed keys as large as their means would be."""
        with self.device.scope():
            for name, deviation in (
                ("keys", 1.0),
                ("values", 1.0),
                ("fine", 32**-0.5),
                ("coarse", 128**-0.5),
            ):
                self.buffers[name].normal_(0.0, deviation)
            self.device.synchronize()

    def batch(self, tokens: np.ndarray, past: int) -> StepBatch:
        """A step of the one sequence, in pages of random order, that draws its last token."""
        count = len(tokens)
        return StepBatch(
            token_ids=tokens,
            positions=np.arange(past, past + count, dtype=np.int32),
            sequence_starts=np.array([0, count], np.int32),
            lengths=np.array([past], np.int32),
            page_tables=[self.table],
            logit_rows=np.array([count - 1], np.int32),
            sampling=(SamplingRow(position=past + count),),
        )

    def chunk_ms(self, tokens: int, past: int, times: int = 5) -> float:
        """Median time of a captured step of `tokens` after `past` stored ones, on the device."""
        batch = self.batch(np.arange(tokens, dtype=np.int32), past)
        self.step(batch)
        bucket = self._bucket_of(tokens)
        return median_ms(self.gpu.torch_stream, lambda: self._replay(bucket, batch), times)

    def decode_ms(self, length: int, rounds: int = 5) -> tuple[float, float]:
        """Mean times of the steps that bring a sequence to `length` tokens, through all places of a page.

        A step that completes a compressed key takes longer than the others, so one place would not do.

        Returns:
            Of the graph on the device, and of the executor's whole step; each place is the median of the rounds.
        """
        stream, bucket = self.gpu.torch_stream, self._bucket_of(1)
        device: dict[int, list[float]] = {}
        whole: dict[int, list[float]] = {}
        for place in [*range(length - PAGE_TOKENS, length)] * rounds:
            batch = self.batch(np.array([place % 97], np.int32), place)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._stage(batch, bucket)
            self.gpu.upload(self.buffers["step"], self._staging.words)
            begin.record(stream)
            self._replay(bucket, batch)
            end.record(stream)
            self.gpu.synchronize()
            device.setdefault(place, []).append(begin.elapsed_time(end))
            before = time.perf_counter()
            self.step(self.batch(np.array([place % 97], np.int32), place))
            whole.setdefault(place, []).append((time.perf_counter() - before) * 1e3)

        def mean(times: dict[int, list[float]]) -> float:
            return statistics.mean(statistics.median(each) for each in times.values())

        return mean(device), mean(whole)

    @property
    def gpu(self) -> CudaDevice:
        """The device, as what it is."""
        assert isinstance(self.device, CudaDevice)
        return self.device

    table: np.ndarray


def open_model(*, rows: int = 1) -> RandomModel:
    """Loads it, with sparse attention at the published numbers."""
    folder = Path(tempfile.mkdtemp(prefix="edged-bench-"))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    model = RandomModel(
        ModelConfig(
            name="bench",
            path=folder,
            device="cuda",
            dtype="bfloat16",
            context_length=LONGEST + CHUNK,
            max_sequences=rows,
            prefill_chunk=CHUNK,
            attention=AttentionConfig(mode="sparse"),
        )
    )
    model.load(lambda *_: None)
    pages = -(-(LONGEST + CHUNK) // PAGE_TOKENS)
    model.table = np.random.default_rng(0).permutation(model.limits.pages)[:pages].astype(np.int32)
    model.fill_pages()
    return model


def median_ms(stream: torch.cuda.Stream, run: Callable[[], object], times: int) -> float:
    """Median time between events around each run, after three that do not count.

    The device is kept waiting while the runs are enqueued, so that a host that launches slowly is not measured.
    """
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for first in range(0, times, _ENQUEUED):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - torch's own tests keep a stream busy with it
        for begin, end in events[first : first + _ENQUEUED]:
            begin.record(stream)
            run()
            end.record(stream)
        stream.synchronize()
    return float(sorted(begin.elapsed_time(end) for begin, end in events)[times // 2])
