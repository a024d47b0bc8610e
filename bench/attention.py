"""Attention on a GPU: ours, torch SDPA and the ceilings, all measured in this run.

    python bench/attention.py [--out attention.json] [--only decode|chunk]

Prints a table and saves it as JSON. Needs an NVIDIA GPU, torch with CUDA, PyCUDA and nvcc, NVRTC or `make kernels`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"decode": "attention_decode", "chunk": "attention_chunk"}


def ceilings(stream: torch.cuda.Stream) -> dict[str, float]:
    """Copy bandwidth (bytes read and written) and the rate of a bf16 matrix product, on random data."""
    import torch

    def median(run: Callable[[], object], times: int = 11) -> float:
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
            for begin, end in events:
                begin.record(stream)
                run()
                end.record(stream)
            stream.synchronize()
        return float(sorted(begin.elapsed_time(end) for begin, end in events)[times // 2]) * 1e-3

    source = torch.randn(1 << 30, device="cuda")  # 4 GiB
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / median(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    rate = 2 * 8192**3 / median(lambda: a @ b)
    return {"copy_bytes_per_s": copy, "bf16_flop_per_s": rate}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    parser.add_argument("--only", choices=tuple(PARTS), action="append")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

    import torch
    from pycuda import driver

    from plugins_trt.registry import Kernels

    torch.zeros(1, device="cuda")
    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    try:
        stream = driver.Stream()
        torch_stream = torch.cuda.ExternalStream(stream.handle)
        kernels = Kernels.of_current_device()
        figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        figures.update(ceilings(torch_stream))
        bounds: dict[str, tuple[str, float]] = {}
        for part in options.only or PARTS:
            module = importlib.import_module(PARTS[part])
            figures.update(module.measure(kernels, torch_stream, stream, figures))
            bounds.update(module.BOUNDS)
    finally:
        context.pop()
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    missed = 0
    for name, value in figures.items():
        text = f"{value:12.4g}" if isinstance(value, float) else f"{value:>12}"
        verdict = ""
        if name in bounds:
            sign, bound = bounds[name]
            met = value >= bound if sign == ">=" else value <= bound
            missed += not met
            verdict = f"  {sign} {bound}: {'met' if met else 'MISSED'}"
        print(f"{name:38}{text}{verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
