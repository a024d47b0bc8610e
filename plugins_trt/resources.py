"""What each kernel takes of a multiprocessor, as the compiler reports it, and the record of it in docs/kernels.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from plugins_trt.sources import Source

_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_PROPERTIES = re.compile(r"Function properties for (\w+)")

_HEADER = """\
# Registers of the kernels

Registers a thread, of each kernel for each target, by the NVRTC of CUDA {versions}; `+n`: n bytes of stack, for a call \
or an array. No kernel spills: the build refuses one that does. Made by

    python -m plugins_trt.build --compiler nvrtc --record docs/kernels.md

and held against a build by `tests/plugins/test_build.py`: two targets in every run, all of them in `make soak`.
"""


class SpillError(RuntimeError):
    """A kernel keeps values in local memory; the message names it."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor."""

    kernel: str
    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int

    @property
    def cell(self) -> str:
        """As the record writes it."""
        return f"{self.registers}+{self.stack_bytes}" if self.stack_bytes else str(self.registers)


def parse_resources(log: str) -> list[Resources]:
    """The resources of each kernel that ptxas reported, in the order of its report.

    A function that kernels call (rather than have inline) is reported by itself: it is among them if it spills.
    """
    found = []
    kernel = function = ""
    spills = (0, 0, 0)
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            kernel, spills = match[1], (0, 0, 0)
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif match := _SPILLS.search(line):
            numbers = (int(match[1]), int(match[2]), int(match[3]))
            if function in (kernel, ""):
                spills = numbers
            elif numbers[1] or numbers[2]:
                found.append(Resources(function, 0, *numbers, 0))
            function = ""
        elif (match := _REGISTERS.search(line)) and kernel:
            shared = _SHARED.search(line)
            found.append(Resources(kernel, int(match[1]), *spills, int(shared[1]) if shared else 0))
            kernel = ""
    return found


def refuse_spills(source: Source, capability: tuple[int, int], resources: Sequence[Resources]) -> None:
    """Refuses kernels that spill registers.

    Raises:
        SpillError: naming the first such kernel.
    """
    for each in resources:
        if each.spill_stores or each.spill_loads:
            raise SpillError(
                f"{source.name} for sm_{capability[0]}{capability[1]}: {each.kernel} spills {each.spill_stores} bytes "
                f"({each.spill_loads} read back) at {each.registers} registers"
            )


Target = tuple[tuple[int, int], tuple[int, int]]
"""The CUDA version of a compiler and the compute capability it compiled for."""


def column(target: Target) -> str:
    """How the record heads a target's column."""
    (major, minor), capability = target
    return f"{major}.{minor}: sm_{capability[0]}{capability[1]}"


def write_record(file: Path, kernels: Mapping[Target, Iterable[tuple[str, Resources]]]) -> None:
    """Writes the record: `kernels` gives the source's name and the resources of each kernel, by target."""
    targets = sorted(kernels)
    cells: dict[tuple[str, str], dict[Target, str]] = {}
    for target in targets:
        for source, each in kernels[target]:
            cells.setdefault((source, each.kernel), {})[target] = each.cell
    versions = " and ".join(f"{a}.{b}" for a, b in sorted({target[0] for target in targets}))
    lines = [_HEADER.format(versions=versions)]
    lines += [
        "| source | kernel | " + " | ".join(column(target) for target in targets) + " |",
        "|---|---|" + "---|" * len(targets),
    ]
    lines += [
        f"| {source} | `{kernel}` | " + " | ".join(row.get(target, "") for target in targets) + " |"
        for (source, kernel), row in sorted(cells.items())
    ]
    file.write_text("\n".join(lines) + "\n")


def read_record(file: Path) -> dict[str, dict[str, str]]:
    """The record's cells: by column, then by kernel."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in file.read_text().splitlines()
        if line.startswith("|")
    ]
    if not rows:
        return {}
    heads, found = rows[0][2:], rows[2:]
    return {
        head: {row[1].strip("`"): row[2 + index] for row in found if row[2 + index]}
        for index, head in enumerate(heads)
    }
