"""A model of MiniCPM4-8B's shape with random weights, made on the GPU on the spot; bench/decode.py and prefill.py run it.

Random weights move the same bytes and multiply as many numbers as trained ones; the text they give is nonsense.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from _gpu import ceilings, gpu_environment
from _random_draft import minicpm_sizes, write_draft
from _report import add_json_option, report_against
from _shapes import MINICPM4_8B

from edged.config import AttentionConfig, ModelConfig, SpeculationConfig
from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch
from edged.executor.cuda_device import CudaDevice
from edged.executor.cuda_executor import CudaExecutor, has_trees
from edged.models.architecture import Architecture
from edged.models.cuda_weights import GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edged.executor.base import Progress
    from edged.executor.cuda_device import Words
    from edged.models.decoder import Decoder
    from edged.models.operators import Linear

QUANTIZATION = {
    "bf16": None,
    "ternary": {"quant_method": "ternary", "bits": 2, "group_size": 128},
    "w4a16": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
}
"""The `quantization_config` of each kind of weights; embedding and LM head are bf16 in all."""
LONGEST = 131072
CHUNK = 2048
_ENQUEUED, _SLEEP_CYCLES = 5, 60_000_000
"""Runs that are enqueued while the device waits (some 30 ms)."""
TEMPERATURE = 0.02
"""Spreads the logits of random weights, 0.06 apart, as a temperature of 1 does a trained model's."""
LAUNCH_CYCLES = 800_000
"""Some 0.4 ms, in which the host launches a graph."""


class RandomModel(CudaExecutor):
    """The executor of `device: cuda` with weights that come from no file; one sequence."""

    def _fill_weights(self, progress: Progress) -> None:
        generator = torch.Generator(self.device.torch_device).manual_seed(0)
        quantization = self.plan.architecture.quantization
        ternary = quantization is not None and quantization.ternary
        names = [name for name, tensor in self.buffers.items() if self._is_weight(name)]
        for index, name in enumerate(names):
            progress("drawing weights", index, len(names))
            weight = self.buffers[name]
            if name.endswith(GROUPS):
                inputs = self.buffers[name.removesuffix(GROUPS)].shape[1] * (128 if ternary else 64)
                weight.fill_(_group_word(inputs, ternary=ternary))
            elif weight.dtype == torch.int32:
                weight.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
                if ternary:  # a code of 2 stands for nothing: each becomes 0
                    weight &= ~((weight & ~(weight << 1)) & -0x55555556)
            elif weight.dim() == 1:
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

    def visited_bytes(self, length: int) -> int:
        """Bytes of keys and values that a query behind `length` tokens attends to, in all layers."""
        rule, a = self.plan.selection, self.plan.architecture
        tokens = (
            length if rule is None or length < rule.dense_below else min(length, rule.total * PAGE_TOKENS)
        )
        return 2 * a.layers * a.kv_width * 2 * tokens

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

    def fill_draft(self) -> None:
        """Random weights of the draft, where there is one."""
        if self.plan.draft is None:
            return
        with self.device.scope():
            for part, shape in self.plan.draft.eagle.shapes().items():
                weight = self.buffers[f"draft.{part}"]
                if len(shape) == 1:
                    weight.fill_(1.0)
                else:
                    weight.random_(-(1 << 31), (1 << 31) - 1)
                    self.buffers[f"draft.{part}{GROUPS}"].fill_(_group_word(shape[1], ternary=False))
            self.buffers["normed"].normal_()
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

    def measured(self, work: Callable[[], None], times: int = 11) -> float:
        """Median time of a graph of some work, in milliseconds."""
        return median_ms(self.gpu.torch_stream, self.gpu.capture(work), times)

    @property
    def linears(self) -> dict[str, list[Linear[torch.Tensor]]]:
        """Those of all layers, by what they are, and the LM head."""
        layers = self._decoder.layers
        return {
            "qkv": [layer.qkv for layer in layers],
            "output": [layer.output for layer in layers],
            "gate_up": [layer.gate_up for layer in layers],
            "down": [layer.down for layer in layers],
            "head": [self._decoder.head],
        }

    def chunk_ms(self, tokens: int, past: int, times: int = 5) -> float:
        """Median time of a captured step of `tokens` after `past` stored ones, on the device."""
        batch = self.batch(np.arange(tokens, dtype=np.int32), past)
        self.step(batch)
        bucket = self._bucket_of(tokens)
        return median_ms(self.gpu.torch_stream, lambda: self._replay(bucket, batch), times)

    def decode_ms(self, length: int, *, greedy: bool = True, rounds: int = 5) -> tuple[float, float]:
        """Mean times of the steps that bring a sequence to `length` tokens, through all places of a page.

        A step that completes a compressed key takes longer than the others, so one place would not do.

        Args:
            length: Tokens behind the last step.
            greedy: Whether the largest logit is taken; else tokens are drawn, with a temperature and top_p.
            rounds: How often each place is measured.

        Returns:
            Of the graphs on the device, and of the executor's whole step; each place is the median of the rounds.
        """
        stream, bucket = self.gpu.torch_stream, self._bucket_of(1)
        device: dict[int, list[float]] = {}
        whole: dict[int, list[float]] = {}
        for place in [*range(length - PAGE_TOKENS, length)] * rounds:
            batch = self.batch(np.array([place % 97], np.int32), place)
            if not greedy:
                row = SamplingRow(temperature=TEMPERATURE, top_p=0.9, seed=1, position=place + 1)
                batch = replace(batch, sampling=(row,))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            places = self._stage(batch, bucket)
            self._staging.write_sampling(places, batch.sampling)
            self.gpu.upload(self.buffers["step"], self._staging.words)
            with torch.cuda.stream(stream):  # until the graph has been launched, which is the host's time
                torch.cuda._sleep(LAUNCH_CYCLES)  # noqa: SLF001 - torch's own tests keep a stream busy with it
            begin.record(stream)
            self._replay(bucket, batch)
            if not greedy:
                bucket.draw()
            end.record(stream)
            self.gpu.synchronize()
            device.setdefault(place, []).append(begin.elapsed_time(end))
            before = time.perf_counter()
            self.step(batch)
            whole.setdefault(place, []).append((time.perf_counter() - before) * 1e3)

        def mean(times: dict[int, list[float]]) -> float:
            return statistics.mean(statistics.median(each) for each in times.values())

        return mean(device), mean(whole)

    def staged(self, batch: StepBatch) -> Callable[[], None]:
        """Bring a step's data over; what is returned enqueues its graphs."""
        if has_trees(batch):
            bucket = self._trees.bucket_of(len(batch.token_ids))
            self._stage_trees(batch, bucket, verify=True)
            self.gpu.upload(self.buffers["step"], self._staging.words)
            return partial(self._replay, bucket, batch)
        plain = self._bucket_of(len(batch.token_ids))
        warm = self._staging.write_sampling(self._stage(batch, plain), batch.sampling)
        self.gpu.upload(self.buffers["step"], self._staging.words)

        def enqueue() -> None:
            self._replay(plain, batch)
            if warm:
                plain.draw()

        return enqueue

    @property
    def decoder(self) -> Decoder[torch.Tensor]:
        """The forward."""
        return self._decoder

    @property
    def drawn(self) -> Words:
        """Where drawn tokens come to."""
        return self._drawn

    @property
    def gpu(self) -> CudaDevice:
        """The device, as what it is."""
        assert isinstance(self.device, CudaDevice)
        return self.device

    table: np.ndarray


def open_model(
    weights: str = "bf16", *, rows: int = 1, tree_size: int = 1, draft_levels: int = 0
) -> RandomModel:
    """Loads it, with sparse attention at the published numbers.

    Args:
        weights: One of :data:`QUANTIZATION`.
        rows: Most sequences.
        tree_size: Most tokens of a tree of drafts; 1: there are none.
        draft_levels: Levels that an EAGLE draft grows; 0: there is none.
    """
    method = "off" if tree_size == 1 else "prompt_lookup"
    draft: dict[str, Any] = {}
    quantization = QUANTIZATION[weights]
    config = MINICPM4_8B if quantization is None else {**MINICPM4_8B, "quantization_config": quantization}
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        if draft_levels:
            method, a = "eagle", Architecture.from_config(MINICPM4_8B)
            sizes = minicpm_sizes(a.hidden, a.intermediate, a.q_width, a.kv_width)
            where = Path(folder) / "draft"
            tokens = write_draft(where, MINICPM4_8B, sizes)
            draft = {"draft": where, "token_map": tokens, "depth": draft_levels}
        model = RandomModel(
            ModelConfig(
                name="bench",
                path=Path(folder),
                device="cuda",
                dtype="bfloat16",
                context_length=LONGEST + CHUNK,
                max_sequences=rows,
                prefill_chunk=CHUNK,
                attention=AttentionConfig(mode="sparse"),
                speculation=SpeculationConfig(method, tree_size, **draft),
            )
        )
        model.load(lambda *_: None)
    model.fill_draft()
    pages = -(-(LONGEST + CHUNK) // PAGE_TOKENS)
    model.table = np.random.default_rng(0).permutation(model.limits.pages)[:pages].astype(np.int32)
    model.fill_pages()
    return model


def run(
    description: str | None,
    bounds: Mapping[str, Mapping[str, tuple[str, float]]],
    measure: Callable[[RandomModel, argparse.Namespace, dict[str, float]], dict[str, float]],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _parser: None,
    *,
    weights: str = "bf16",
    tree_size: int = 1,
    draft_levels: int = 0,
) -> int:
    """What the scripts' `main` does: read the options, load, measure, print.

    Args:
        description: Of the script.
        bounds: What figures should be, by the kind of weights.
        measure: Gives the figures of a model, from the options and the ceilings.
        add_options: Adds the script's own.
        weights: What linears have unless the options say otherwise.
        tree_size: Most tokens of a tree of drafts.
        draft_levels: Levels that an EAGLE draft grows; 0: there is none.

    Returns:
        1 when a figure misses its bound.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument(
        "--weights", choices=tuple(QUANTIZATION), default=weights, help=f"of the linears ({weights})"
    )
    add_options(parser)
    options = parser.parse_args()
    model = open_model(options.weights, tree_size=tree_size, draft_levels=draft_levels)
    surroundings = gpu_environment(weights=options.weights)
    figures = ceilings(model.gpu.torch_stream)
    figures.update(measure(model, options, figures))
    model.close()
    return report_against(figures, surroundings, bounds[options.weights], file=options.json)


def _group_word(inputs: int, *, ternary: bool) -> int:
    """Scale and zero point, or two scales, that keep what goes through packed weights at its size."""
    scale = torch.full((1,), (1.2 if ternary else 0.2) * inputs**-0.5, dtype=torch.float16)
    bits = int(scale.view(torch.int16).item())
    return bits | (bits if ternary else 8) << 16


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
