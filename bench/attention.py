"""Attention on a GPU: ours, torch SDPA and the ceilings, all measured in this run.

    python bench/attention.py [--json FILE] [--only decode|chunk|quantized]

Needs an NVIDIA GPU, torch with CUDA, PyCUDA and nvcc, NVRTC or `make kernels`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from _gpu import ceilings, gpu_environment, opened_gpu
from _report import add_json_option, report_against

PARTS = {"decode": "attention_decode", "chunk": "attention_chunk", "quantized": "attention_quantized"}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument("--only", choices=tuple(PARTS), action="append")
    options = parser.parse_args()
    with opened_gpu() as gpu:
        surroundings = gpu_environment()
        figures: dict[str, Any] = ceilings(gpu.torch_stream)
        bounds: dict[str, tuple[str, float]] = {}
        for part in options.only or PARTS:
            module = importlib.import_module(PARTS[part])
            figures.update(module.measure(gpu.kernels, gpu.torch_stream, gpu.stream, figures))
            bounds.update(module.BOUNDS)
    return report_against(figures, surroundings, bounds, file=options.json)


if __name__ == "__main__":
    sys.exit(main())
