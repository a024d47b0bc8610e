"""A small step of each kind, for the sanitizer, which slows every kernel down:

compute-sanitizer --tool memcheck (or racecheck) python tests/plugins/sanitize_case.py [int8 or float8_e4m3fn]
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import torch


def on_gpu(case):
    """The case, made on the CPU, so that the sanitizer sees few kernels that are not ours."""
    pages = type(case.pages)(**{name: pool.cuda() for name, pool in vars(case.pages).items()})
    moved = {
        name: getattr(case, name).cuda() for name in ("tables", "q", "k", "v", "node_fine", "node_coarse")
    }
    return replace(case, pages=pages, device=torch.device("cuda"), **moved)


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent.parent), str(here)]
    from decode_cases import gpu, make_case, random_parents
    from quantized_cases import quantized_case
    from step_cases import run

    from plugins_trt.contract import SelectionRule

    kv_dtype = sys.argv[1] if len(sys.argv) > 1 else None
    rng = random.Random(0)
    rule = SelectionRule(init_blocks=1, window=128, top_k=4, dense_below=300)
    for rules in (None, rule):
        for sequences, tokens, parents in (
            ([(1030, 1)], 1, None),
            ([(1023, 1), (200, 9), (0, 3)], 16, None),
            ([(600, 100), (0, 20)], 128, None),
            ([(1000, 40), (250, 20)], 64, [random_parents(40, rng, 0.9), random_parents(20, rng, 0.5)]),
        ):
            case = make_case(
                sequences, heads=16, kv_heads=2, dim=64, tokens=tokens, parents=parents, appended=False
            )
            if kv_dtype is not None:
                case = quantized_case(case, kv_dtype)
            out = run(on_gpu(case), rules)
            assert not out.isnan().any()
    torch.cuda.synchronize()
    gpu().stream.synchronize()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
