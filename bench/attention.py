"""Attention on a GPU: ours, torch SDPA and the ceilings, all measured in this run.

    python bench/attention.py [--json FILE] [--only decode|chunk|quantized]

Needs an NVIDIA GPU, torch with CUDA, PyCUDA and nvcc, NVRTC or `make kernels`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _report import add_json_option, environment, report

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"decode": "attention_decode", "chunk": "attention_chunk", "quantized": "attention_quantized"}


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
    add_json_option(parser)
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
        surroundings = environment(device=torch.cuda.get_device_name(), cuda=torch.version.cuda)
        figures: dict[str, Any] = ceilings(torch_stream)
        bounds: dict[str, tuple[str, float]] = {}
        for part in options.only or PARTS:
            module = importlib.import_module(PARTS[part])
            figures.update(module.measure(kernels, torch_stream, stream, figures))
            bounds.update(module.BOUNDS)
    finally:
        context.pop()
    wanted = {name: f"{sign} {bound}" for name, (sign, bound) in bounds.items()}
    report(figures, surroundings, file=options.json, bounds=wanted, notes=[str(surroundings["device"])])
    missed = [
        name
        for name, (sign, bound) in bounds.items()
        if not (figures[name] >= bound if sign == ">=" else figures[name] <= bound)
    ]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
