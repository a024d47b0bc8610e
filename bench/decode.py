"""Whole decode steps on a GPU: MiniCPM4-8B's shape, random bf16 weights, batch 1, beside the ceilings of the same run.

    python bench/decode.py [--json FILE]

Steps run one after the other, as an engine makes them, through all places of a page. `bf16_step_4k_bandwidth` is what a
step must read (weights, and KV at 4K) over the time of its graph and over the bandwidth of a device copy. `host_vs_step` is
how much longer a whole step of the executor takes than its graph, over the graph: what the host does between two launches.
Needs an NVIDIA GPU with 24 GiB, torch with CUDA and PyCUDA.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from _random_model import RandomModel

    from edged.models.operators import Linear

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from _report import add_json_option, environment, report  # noqa: E402 - the path is set above

BOUNDS = {
    "bf16_step_4k_bandwidth": (">=", 0.70),
    "bf16_step_128k_vs_4k": ("<=", 1.25),
    "host_vs_step": ("<=", 0.08),
}


def measure(model: RandomModel, ceilings: dict[str, float]) -> dict[str, float]:
    """All figures; times in milliseconds, bandwidths as shares of the ceiling."""
    copy = ceilings["copy_bytes_per_s"]
    figures: dict[str, float] = {}
    a = model.plan.architecture
    for name, length in (("4k", 4096), ("32k", 32768), ("128k", 131072)):
        graph, whole = model.decode_ms(length)
        figures[f"bf16_step_{name}_ms"] = graph
        figures[f"bf16_step_{name}_with_host_ms"] = whole
    kv = 2 * a.layers * a.kv_width * 2 * 4096
    moved = model.weight_bytes + kv
    seconds = figures["bf16_step_4k_ms"] * 1e-3
    figures["bf16_step_4k_bandwidth"] = moved / seconds / copy
    figures["bf16_step_128k_vs_4k"] = figures["bf16_step_128k_ms"] / figures["bf16_step_4k_ms"]
    figures["host_vs_step"] = figures["bf16_step_4k_with_host_ms"] / figures["bf16_step_4k_ms"] - 1.0
    figures.update(_linears(model, copy))
    return figures


def _linears(model: RandomModel, copy: float) -> dict[str, float]:
    """Each kind of linear in a graph of its own over all layers, by our kernel and by cuBLAS."""
    import torch
    from _random_model import median_ms

    from plugins_trt.contract import DeviceArray
    from plugins_trt.skinny_linear.contract import SkinnyLinear

    of = DeviceArray.of
    decoder = model._decoder  # noqa: SLF001 - what a step runs
    multiply = model._kernels.linear  # noqa: SLF001
    kinds: dict[str, list[Linear[torch.Tensor]]] = {
        "qkv": [layer.qkv for layer in decoder.layers],
        "output": [layer.output for layer in decoder.layers],
        "gate_up": [layer.gate_up for layer in decoder.layers],
        "down": [layer.down for layer in decoder.layers],
        "head": [decoder.head],
    }
    figures: dict[str, float] = {}
    for rows in (1, 2, 4, 16):
        total = {"ours": 0.0, "cublas": 0.0}
        for kind, layers in kinds.items():
            outputs, width = layers[0].weight.shape
            x = torch.randn(rows, width, device="cuda").bfloat16()
            out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
            torch.cuda.synchronize()

            def ours(
                layers: list[Linear[torch.Tensor]] = layers, x: torch.Tensor = x, out: torch.Tensor = out
            ) -> None:
                for layer in layers:
                    multiply(SkinnyLinear(of(x), of(layer.weight), of(out)))

            def cublas(
                layers: list[Linear[torch.Tensor]] = layers, x: torch.Tensor = x, out: torch.Tensor = out
            ) -> None:
                for layer in layers:
                    torch.mm(x, layer.weight.t(), out=out)

            size = sum(layer.weight.nbytes for layer in layers)
            for name, work in (("ours", ours), ("cublas", cublas)):
                ms = median_ms(model.gpu.torch_stream, model.gpu.capture(work), 10)
                total[name] += ms
                figures[f"{kind}_{rows}_{name}_bandwidth"] = size / (ms * 1e-3) / copy
        for name, ms in total.items():
            figures[f"linears_{rows}_{name}_ms"] = ms
    return figures


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    options = parser.parse_args()

    import torch
    from _random_model import open_model
    from attention import ceilings

    model = open_model()
    surroundings = environment(device=torch.cuda.get_device_name(), cuda=torch.version.cuda)
    figures = ceilings(model.gpu.torch_stream)
    figures.update(measure(model, figures))
    model.close()
    return finish(figures, surroundings, BOUNDS, options.json)


def finish(
    figures: dict[str, float],
    surroundings: dict[str, object],
    bounds: dict[str, tuple[str, float]],
    file: Path | None,
) -> int:
    """Print, write, and say what missed its bound."""
    wanted = {name: f"{sign} {bound}" for name, (sign, bound) in bounds.items()}
    report(figures, surroundings, file=file, bounds=wanted, notes=[str(surroundings["device"])])
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
