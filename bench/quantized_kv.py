"""What keys and values in eight bits cost a real model: perplexity of SmolLM2-135M with each type of KV.

    python bench/quantized_kv.py [--json FILE] [--types bf16,int8,fp8] [--tokens 20480] [--model FOLDER]

The model and the text are those of `bench/quantize.py`: the demo's, and every second topic of the language reference that
CPython carries, in windows of 512 tokens. Weights and activations are float32, so that nothing but keys and values differs.
Perplexities are of edged's executor on the CPU.

`perplexity_of_X` are perplexities, `X_vs_bf16` one over the other.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from _report import add_json_option, environment, report
from quantize import cut

from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch

BOUNDS = {"int8_vs_bf16": "<= 1.01", "fp8_vs_bf16": "<= 1.02"}


def main() -> None:
    """Measures each type window by window, and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another model folder")
    parser.add_argument("--types", default="bf16,int8,fp8", help="separated by commas")
    parser.add_argument("--tokens", type=int, default=20480, help="to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as scratch:
        measure(arguments, Path(scratch))


def measure(arguments: argparse.Namespace, scratch: Path) -> None:
    """All of it; the demo's model is unpacked into `scratch` unless another is named."""
    import torch

    from edged.checkpoint.demo import demo_gguf
    from edged.checkpoint.gguf_import import import_gguf
    from edged.config import ModelConfig
    from edged.executor.torch_executor import TorchExecutor

    model = arguments.model
    if model is None:
        model = scratch / "demo"
        import_gguf(demo_gguf(), model)
    documents = [topics[name] for name in sorted(topics)]
    windows = cut(model, documents[1::2], arguments.tokens)
    length = windows.shape[1]
    types = arguments.types.split(",")
    executors = {}
    for kv_dtype in types:
        executors[kv_dtype] = TorchExecutor(
            ModelConfig(
                name="bench",
                path=model,
                kv_dtype=kv_dtype,
                context_length=length,
                prefill_chunk=length,
                threads=torch.get_num_threads(),
            )
        )
        executors[kv_dtype].load(lambda *_: None)
    totals = dict.fromkeys(types, 0.0)
    for index, window in enumerate(windows):
        rows = np.arange(length - 1, dtype=np.int32)
        batch = StepBatch(
            token_ids=window.astype(np.int32),
            positions=np.arange(length, dtype=np.int32),
            sequence_starts=np.array([0, length], np.int32),
            lengths=np.array([0], np.int32),
            page_tables=[np.arange(-(-length // PAGE_TOKENS), dtype=np.int32)],
            logit_rows=rows,
            sampling=tuple(SamplingRow() for _ in rows),
        )
        targets = torch.from_numpy(window[1:]).long()
        for kv_dtype, executor in executors.items():
            logits = torch.from_numpy(executor.logits(batch))
            totals[kv_dtype] += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        seen = (index + 1) * (length - 1)
        print(
            f"{seen} tokens:",
            *(f"{name} {math.exp(total / seen):.4f}" for name, total in totals.items()),
            flush=True,
        )
    figures = {f"perplexity_of_{name}": math.exp(total / seen) for name, total in totals.items()}
    for name in types:
        if name != "bf16" and "bf16" in types:
            figures[f"{name}_vs_bf16"] = figures[f"perplexity_of_{name}"] / figures["perplexity_of_bf16"]
    report(figures, environment(tokens=int(windows.size)), file=arguments.json, bounds=BOUNDS)


if __name__ == "__main__":
    main()
