"""What every script here reports: named figures, the machine they were measured on, a table and a JSON file.

A figure `x_vs_y` is x's time or size over y's, measured in the same run: smaller is better.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

# A tree that is not installed is measured, too: what is imported after this module finds it.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

_PACKAGES = ("edged", "torch", "transformers", "numpy", "grpcio")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, which every script takes."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures and the environment there"
    )


def environment(**more: object) -> dict[str, object]:
    """The machine and the versions, with what the script adds."""
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
        **more,
    }


def report(
    figures: Mapping[str, float],
    surroundings: Mapping[str, object],
    *,
    file: Path | None,
    bounds: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print the table and write the file.

    Args:
        figures: By name.
        surroundings: What :func:`environment` returned.
        file: Where the JSON goes; None: nowhere.
        bounds: What a figure should be, as text (`<= 0.8`).
        notes: Lines below the table.
    """
    width = max(map(len, ("figure", *figures)))
    print(f"{'figure':<{width}}  {'value':>10}  wanted")
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:>10.4g}  {(bounds or {}).get(name, '')}".rstrip())
    for note in (f"{surroundings['cpu']}, {surroundings['cores']} cores", *notes):
        print(note)
    if file is not None:
        content = {"figures": dict(figures), "environment": dict(surroundings)}
        file.write_text(json.dumps(content, indent=2) + "\n")


def report_against(
    figures: Mapping[str, float],
    surroundings: Mapping[str, object],
    bounds: Mapping[str, tuple[str, float]],
    *,
    file: Path | None,
) -> int:
    """Report figures of a GPU, and say which of them miss their bounds.

    Args:
        figures: By name.
        surroundings: With the `device`.
        bounds: `>=` or `<=`, and the number.
        file: Where the JSON goes; None: nowhere.

    Returns:
        The exit status: 1 when one misses its bound.
    """
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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()
