"""Times of drawing tokens on a GPU, from CUDA graphs of some draws that take turns among several sets of logits.

`normal` and `flat` are draws at temperature 1 from logits of a normal distribution (deviation 3) and from nearly equal
ones, which come out of memory; `written` is `normal` with logits that lie in the L2 cache, as the head leaves them; `top` has top_k 50 and top_p 0.95, `options` has penalties over 2000 tokens, a bias, a mask, min_p, typical_p and 20
log probabilities. `NAME_rows_ms` is the time of one launch; bounds are those of 73448 logits.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from _gpu import Gpu, gpu_environment, opened_gpu
from _report import add_json_option, report

from plugins_trt.contract import DeviceArray
from plugins_trt.sample.contract import WORKSPACE, Options, Sample
from plugins_trt.sample.launch import Sampler
from plugins_trt.sample.rows import LOGPROB_WORDS, ROW_WORDS, RowWriter, Terms, mask_words

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 73448
ROWS = (1, 4, 16, 64)
SETS = 4
DRAWS = 16
BOUNDS = {
    **{f"normal_{rows}_ms": "<= 0.05" for rows in ROWS},
    **{f"flat_{rows}_ms": "<= 0.15" for rows in ROWS},
}

_of = DeviceArray.of


def terms(vocabulary: int, rng: np.random.Generator) -> Terms:
    """What a demanding request says."""
    seen = rng.permutation(vocabulary)[:2000].astype(np.int64)
    mask = np.packbits(rng.random(vocabulary) < 0.5, bitorder="little").tobytes()
    return Terms(
        min_p=0.001,
        typical_p=0.9,
        repetition=1.1,
        presence=0.2,
        frequency=0.1,
        bias_ids=seen[:10],
        biases=np.ones(10, np.float32),
        seen=seen,
        answered=seen[:500],
        counts=np.ones(500, np.int64),
        mask=mask,
        logprobs=20,
    )


class Case:
    """One kind of draw of some rows: several sets of logits, one set of arguments beside them."""

    def __init__(self, name: str, rows: int, sampler: Sampler, stream: Any) -> None:  # noqa: ANN401
        generator = torch.Generator("cuda").manual_seed(rows)
        normal = torch.randn(SETS, rows, VOCABULARY, generator=generator, device="cuda")
        self._logits = {"flat": 1.0 + 1e-3 * normal, "equal": torch.ones_like(normal)}.get(name, 3.0 * normal)
        if name == "written":
            self._logits = self._logits[:1].expand(SETS, rows, VOCABULARY)
        options = name == "options"
        top = name in {"top", "flat_top", "options"}
        if name == "flat_top":
            self._logits = 1.0 + 1e-3 * normal
        self._sampler, self._stream = sampler, stream
        largest = self._logits.argmax(2).int()  # [SETS, rows]
        self._largest = torch.stack([largest[draw % SETS] for draw in range(DRAWS)])
        self._ids = self._largest.clone()
        self._columns = {
            "temperatures": torch.ones(rows, device="cuda"),
            "top_ks": torch.full((rows,), 50 if top else 0, dtype=torch.int32, device="cuda"),
            "top_ps": torch.full((rows,), 0.95 if top else 1.0, dtype=torch.float64, device="cuda"),
            "numbers": torch.rand(rows, generator=generator, dtype=torch.float64, device="cuda"),
            "workspace": torch.zeros(rows * WORKSPACE, dtype=torch.uint8, device="cuda"),
        }
        self._options = self._make_options(rows) if options else None

    def _make_options(self, rows: int) -> Options:
        words = np.zeros((rows, ROW_WORDS), np.int32)
        entries = np.zeros((rows * 4096, 2), np.int32)
        masks = np.zeros((rows, mask_words(VOCABULARY)), np.int32)
        writer, rng = RowWriter(words, entries, masks), np.random.default_rng(0)
        writer.clear()
        for row in range(rows):
            writer.write(row, terms(VOCABULARY, rng))
        self._kept = [torch.from_numpy(each).cuda() for each in (words, entries, masks)]
        self._kept.append(torch.zeros(len(entries), device="cuda"))
        self._kept.append(torch.zeros(rows, LOGPROB_WORDS, dtype=torch.int32, device="cuda"))
        found, listed, bits, raw, logprobs = map(_of, self._kept)
        return Options(found, listed, raw, bits, logprobs)

    def run(self) -> None:
        """Enqueue the draws."""
        self._ids.copy_(self._largest)  # as argmax leaves them
        for draw in range(DRAWS):
            columns = {name: _of(tensor) for name, tensor in self._columns.items()}
            self._sampler(
                Sample(
                    logits=_of(self._logits[draw % SETS]),
                    ids=_of(self._ids[draw]),
                    **columns,
                    options=self._options,
                    largest_known=True,
                ),
                self._stream,
            )


def milliseconds(run: Callable[[], None], stream: torch.cuda.Stream, repeats: int) -> float:
    """Of one draw, the median over replays of the captured ones."""
    run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / DRAWS)
    return float(statistics.median(times))


def main() -> None:
    """Time every kind of draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[], metavar="N", help="thread blocks of a launch, at most"
    )
    add_json_option(parser)
    options = parser.parse_args()

    with opened_gpu() as gpu:
        torch.cuda.set_stream(gpu.torch_stream)
        measure(gpu, options)


def measure(gpu: Gpu, options: argparse.Namespace) -> None:
    """Time, print, write."""
    kernels, stream, torch_stream = gpu.kernels, gpu.stream, gpu.torch_stream
    sampler = Sampler(
        kernels.operator("sample"), multiprocessors=kernels.multiprocessors, capability=kernels.capability
    )
    resident = sampler._resident  # noqa: SLF001

    figures: dict[str, float] = {}
    for most in options.blocks or [resident]:
        sampler._resident = min(most, resident)  # noqa: SLF001
        suffix = f"_{most}_blocks" if options.blocks else ""
        for name in ("normal", "written", "top", "flat", "equal", "flat_top", "options"):
            for rows in ROWS:
                case = Case(name, rows, sampler, stream)
                figures[f"{name}_{rows}_ms{suffix}"] = milliseconds(case.run, torch_stream, options.repeats)
    report(
        figures,
        gpu_environment(vocabulary=VOCABULARY),
        file=options.json,
        bounds={} if options.blocks else BOUNDS,
    )


if __name__ == "__main__":
    main()
