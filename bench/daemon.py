"""Figures of the daemon and its CPU executor with the demo model.

    python bench/daemon.py [--json FILE] [--model FOLDER] [--threads N] [--rounds N]

`decode_vs_transformers` and `prefill_vs_transformers` are times over transformers' (the worse of float32 and bfloat16).
`token_overhead_ms` is what a client sees between two tokens less the executor's step, `status_seconds` a whole
`edgectl status` process, `restart_seconds` the time from a SIGKILL of the engine amid an answer to the next answer,
`memory_vs_ledger` the peak of both processes (proportional set size) over the ledger's total.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from _report import add_json_option, environment, report

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUNDS = {
    "decode_vs_transformers": "<= 0.8",
    "prefill_vs_transformers": "<= 1.0",
    "token_overhead_ms": "<= 0.5",
    "status_seconds": "<= 0.6",
    "restart_seconds": "<= 10",
    "memory_vs_ledger": "0.8 to 1.0",
}


@contextmanager
def demo_model(given: Path | None) -> Iterator[Path]:
    """The folder that was given, or the demo model imported for this run."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise SystemExit(f"--model {given}: no model folder (config.json is not in it)")
        yield given
        return
    from edged.checkpoint.demo import demo_gguf
    from edged.checkpoint.gguf_import import import_gguf

    with tempfile.TemporaryDirectory(prefix="edged-bench-") as name:
        folder = Path(name) / "model"
        import_gguf(demo_gguf(), folder)
        yield folder


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a model folder (default: the demo model)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each measurement (default: 5)")
    options = parser.parse_args()
    surroundings = environment(threads=options.threads, rounds=options.rounds)
    import _serving

    with demo_model(options.model) as model:
        figures = _serving.measure(model)
        # Imported now because it imports torch, whose pages the daemon's memory must not be seen to share.
        from _executor_speed import executor_figures

        figures |= executor_figures(model, options.threads, options.rounds)
    report(figures, surroundings, file=options.json, bounds=BOUNDS)


if __name__ == "__main__":
    main()
