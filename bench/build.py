"""Builds real plans for sm86, sm89 and sm120 without a GPU, and measures it.

    python bench/build.py [--json FILE]

Shapes, each in a process of its own: SmolLM2-135M, and MiniCPM4-8B (32 layers, sparse attention) with dense, 4-bit
(W4A16) and ternary linears. `build_seconds`, `build_peak_rss_mb` and `plan_mb` are those of MiniCPM4-8B in 4 bits.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from _report import add_json_option, environment, report
from _shapes import MINICPM4_8B

BOUNDS = {"build_seconds": "<= 20", "build_peak_rss_mb": "<= 700", "plan_mb": "<= 60"}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "minicpm4_8b": MINICPM4_8B,
    "minicpm4_8b_w4a16": {
        **MINICPM4_8B,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    },
    "minicpm4_8b_ternary": {
        **MINICPM4_8B,
        "quantization_config": {"quant_method": "ternary", "bits": 2, "group_size": 128},
    },
}
LARGE = "minicpm4_8b_w4a16"
TARGETS = ("sm86", "sm89", "sm120")


def measure(name: str, layers: int | None = None) -> dict[str, Any]:
    """Build one shape, or its first layers, in this process."""
    started = time.monotonic()
    from edged.engine.builder import build
    from edged.engine.graph import GraphSpec, emit, serialize
    from edged.engine.shapes import EngineShapes
    from edged.models.architecture import Architecture
    from plugins_trt.contract import SelectionRule
    from plugins_trt.tensorrt.adapter import load

    sparse = None if name == "smollm2" else SelectionRule()
    config = SHAPES[name] if layers is None else {**SHAPES[name], "num_hidden_layers": layers}
    spec = GraphSpec(Architecture.from_config(config), "bfloat16", sparse)
    tensorrt = load("tensorrt_rtx")
    graph = serialize(emit(spec))
    plan = build(tensorrt, graph, spec, EngineShapes(), TARGETS)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "tensorrt": f"{tensorrt.name} {tensorrt.version}",
        "targets": list(TARGETS),
        "layers": spec.architecture.layers,
        # From the interpreter's start of work to the plan: imports, graph, parsing and building.
        "build_seconds": round(time.monotonic() - started, 2),
        "build_cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "build_peak_rss_mb": round(usage.ru_maxrss / 1024, 1),
        "plan_mb": round(len(plan.data) / 1e6, 2),
        "graph_mb": round(len(graph) / 1e6, 3),
        "activation_mb": {key: round(value / 1e6, 1) for key, value in plan.activation_bytes.items()},
    }


def main() -> int:
    """Measure each shape in a process of its own and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help="build the first layers alone")
    parser.add_argument("--only", choices=SHAPES, nargs="+", help="these shapes beside the largest")
    arguments = parser.parse_args()
    if arguments.shape:
        print(json.dumps(measure(arguments.shape, arguments.layers)))
        return 0
    results = {}
    surroundings = environment()
    for name in [each for each in SHAPES if arguments.only is None or each in (*arguments.only, LARGE)]:
        command = [sys.executable, __file__, "--shape", name]
        if arguments.layers is not None:
            command += ["--layers", str(arguments.layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return 1
        results[name] = json.loads(done.stdout.splitlines()[-1])
    figures = {key: results[LARGE][key] for key in BOUNDS}
    notes = [
        f"{name}: {each['build_seconds']} s ({each['build_cpu_seconds']} s of CPU), {each['build_peak_rss_mb']} MB at "
        f"most, a plan of {each['plan_mb']} MB; activations (MB): "
        + ", ".join(f"{key} {value}" for key, value in each["activation_mb"].items())
        for name, each in results.items()
    ]
    report(figures, {**surroundings, "shapes": results}, file=arguments.json, bounds=BOUNDS, notes=notes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
