"""Memory and time of loading a model: how far the peak of a loading process lies above the model's own size.

    python bench/load.py [--json FILE] [--size GB] [--rounds N]

A bfloat16 safetensors checkpoint of random bytes is made on the spot (2 GB by default, in --folder), and one with 4-bit
GPTQ linears. Each is loaded in a child process with the torch executor, which then runs one step.

`load_peak_over_size_mb` is the peak of that process's resident memory (interpreter, torch and all) less the size of the
weight file, `load_peak_over_ledger_mb` the same less what the ledger plans for the model's buffers; `packed_..` are those of a
4-bit checkpoint of the same shape. The files are dropped from the page cache before each load.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _report import add_json_option, environment, report

if TYPE_CHECKING:
    from collections.abc import Iterable

BOUNDS = {
    "load_peak_over_size_mb": "<= 300",
    "packed_peak_over_size_mb": "<= 300",
}
MB = 10**6
_SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}


def main() -> None:
    """Make the checkpoints, load each in a child, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument("--size", type=float, default=2.0, metavar="GB", help="of the bfloat16 weights")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="loads; the worst peak counts")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints are made (default: a temporary one)"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _load(options.child)
        return
    with tempfile.TemporaryDirectory(prefix="edged-bench-", dir=options.folder) as name:
        dense, packed = Path(name) / "dense", Path(name) / "packed"
        _make(dense, options.size, {})
        _make(packed, options.size, {"quantization_config": _GPTQ})
        runs = [_measure(dense) for _ in range(options.rounds)]
        packed_runs = [_measure(packed) for _ in range(options.rounds)]
        size, packed_size = _bytes_of(dense), _bytes_of(packed)
    peak = max(run["peak"] for run in runs)
    figures = {
        "load_peak_over_size_mb": (peak - size) / MB,
        "load_peak_over_ledger_mb": (peak - runs[0]["ledger"]) / MB,
        "packed_peak_over_size_mb": (max(run["peak"] for run in packed_runs) - packed_size) / MB,
        "packed_peak_over_ledger_mb": (max(run["peak"] for run in packed_runs) - packed_runs[0]["ledger"])
        / MB,
        "load_gb_per_second": size / min(run["seconds"] for run in runs) / 1e9,
        "packed_gb_per_second": packed_size / min(run["seconds"] for run in packed_runs) / 1e9,
        "size_mb": size / MB,
        "packed_size_mb": packed_size / MB,
    }
    report(figures, environment(rounds=options.rounds), file=options.json, bounds=BOUNDS)


def _bytes_of(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def _make(folder: Path, gigabytes: float, more: dict[str, Any]) -> None:
    """A checkpoint with as many layers as make up the size; the 4-bit one has the same shape."""
    from edged.models.architecture import Architecture
    from edged.models.weights import parameter_count

    def architecture(layers: int, keys: dict[str, Any]) -> Architecture:
        return Architecture.from_config({**_SHAPE, **keys, "num_hidden_layers": layers})

    one = 2 * parameter_count(architecture(1, {}))
    layer = 2 * parameter_count(architecture(2, {})) - one
    layers = max(1, math.ceil((gigabytes * 1e9 - one) / layer) + 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**_SHAPE, **more, "num_hidden_layers": layers}))
    _write(folder / "model.safetensors", _tensors(architecture(layers, more)))


def _tensors(architecture: Any) -> Iterable[tuple[str, str, tuple[int, ...]]]:  # noqa: ANN401 - imported late
    """Name, element type and shape of every tensor."""
    from edged.models.weights import weight_specs

    for spec in weight_specs(architecture):
        for source in spec.sources:
            if spec.packing is None:
                yield source.name, "BF16", source.shape
                continue
            outputs, inputs = source.shape
            groups = inputs // spec.packing.group
            yield f"{source.module}.qweight", "I32", (inputs // 8, outputs)
            yield f"{source.module}.qzeros", "I32", (groups, outputs // 8)
            yield f"{source.module}.scales", "F16", (groups, outputs)


def _write(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
    """Random bytes, small numbers where they are floats, a tensor at a time."""
    random = np.random.default_rng(0)
    header, pieces, end = {}, [], 0
    for name, dtype, shape in tensors:
        size = int(np.prod(shape)) * {"BF16": 2, "F16": 2, "I32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        pieces.append((dtype, size))
        end += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for dtype, size in pieces:
            if dtype == "I32":
                file.write(random.bytes(size))
            elif dtype == "F16":
                file.write(np.full(size // 2, 0.01, np.float16).tobytes())
            else:  # bfloat16 between 0.0078 and 0.0156, both signs
                bits = random.integers(0, 2**8, size // 2, np.uint16)
                file.write((0x3C00 | (bits & 0x7F) | ((bits & 0x80) << 8)).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _measure(folder: Path) -> dict[str, float]:
    """Load in a child of its own, the file dropped from the page cache."""
    descriptor = os.open(folder / "model.safetensors", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _load(folder: Path) -> None:
    """The child: load, run one step, print the peak."""
    from edged.config import ModelConfig
    from edged.executor.base import SamplingRow, StepBatch
    from edged.executor.torch_executor import TorchExecutor
    from edged.memory.buffers import step_buffers, weight_buffers

    config = ModelConfig(
        name="m", path=folder, dtype="bfloat16", context_length=512, prefill_chunk=64, threads=1
    )
    executor = TorchExecutor(config)
    start = time.perf_counter()
    executor.load(lambda _what, _done, _total: None)
    seconds = time.perf_counter() - start
    zero = np.zeros(1, np.int32)
    executor.step(StepBatch(zero, zero, np.array([0, 1], np.int32), zero, [zero], zero, (SamplingRow(),)))
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    planned = sum(spec.nbytes for spec in (*weight_buffers(executor.plan), *step_buffers(executor.plan)))
    print(json.dumps({"peak": peak, "seconds": seconds, "ledger": planned}))


if __name__ == "__main__":
    main()
