"""Compiles every CUDA source for every target: `python -m plugins_trt.build`, which is `make kernels`.

nvcc is used where it is installed, else every NVRTC that is found; `--compiler nvrtc` asks for the latter, which makes
one set of kernels for each CUDA version. What a compiler lacks a target for (CUDA 12.6: sm_120) is left out and said.
Registers and spills of each kernel are recorded in the set's `manifest.json`; a kernel that spills is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plugins_trt import nvrtc
from plugins_trt.registry import CUBINS, MANIFEST
from plugins_trt.sources import FOLDER, Source, sources

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPABILITIES: tuple[tuple[int, int], ...] = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0))
"""Compute capabilities that get a cubin: Orin is 8.7, RTX cards are 8.6, 8.9 and 12.0."""

PTX_CAPABILITY = (8, 0)
"""What the PTX is made for: any later device can run it."""

_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


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


def parse_resources(log: str) -> list[Resources]:
    """The resources of each kernel that ptxas reported, in the order of its report."""
    found = []
    kernel, spills = "", (0, 0, 0)
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            kernel, spills = match[1], (0, 0, 0)
        elif match := _SPILLS.search(line):
            spills = (int(match[1]), int(match[2]), int(match[3]))
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


class Compiler(Protocol):
    """nvcc or one NVRTC."""

    @property
    def version(self) -> tuple[int, int]:
        """CUDA version."""

    @property
    def capabilities(self) -> frozenset[tuple[int, int]]:
        """What it can compile for."""

    def compile(
        self, source: Path, capability: tuple[int, int], *, include: Path, ptx: bool = False
    ) -> nvrtc.Compiled:
        """Compiles one file for one compute capability."""


@dataclass(frozen=True)
class Nvcc:
    """The toolkit's compiler."""

    path: str
    version: tuple[int, int]
    capabilities: frozenset[tuple[int, int]]

    @classmethod
    def find(cls) -> Nvcc | None:
        """The nvcc of the search path, or None."""
        path = shutil.which("nvcc")
        if path is None:
            return None
        release = re.search(r"release (\d+)\.(\d+)", _output([path, "--version"]))
        codes = re.findall(r"sm_(\d+)(\d)\b", _output([path, "--list-gpu-code"]))
        if release is None:
            return None
        return cls(path, (int(release[1]), int(release[2])), frozenset((int(a), int(b)) for a, b in codes))

    def compile(
        self, source: Path, capability: tuple[int, int], *, include: Path, ptx: bool = False
    ) -> nvrtc.Compiled:
        """Compiles one file for one compute capability.

        Raises:
            CompileError: with the compiler's log.
        """
        target = f"{capability[0]}{capability[1]}"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "image"
            kind = "-ptx" if ptx else "-cubin"
            arch = f"-arch={'compute' if ptx else 'sm'}_{target}"
            command = [
                self.path,
                kind,
                arch,
                "-std=c++17",
                f"-I{include}",
                "-Xptxas=-v",
                "-o",
                str(out),
                str(source),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode:
                raise nvrtc.CompileError(f"{source}: nvcc {arch} failed:\n{done.stderr}{done.stdout}")
            return nvrtc.Compiled(out.read_bytes(), done.stderr)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603


def compilers(kind: str | None = None) -> list[Compiler]:
    """The compilers to use: nvcc if there is one, else each NVRTC; `kind` asks for one of the two."""
    found = Nvcc.find() if kind in (None, "nvcc") else None
    if found is not None:
        return [found]
    return [] if kind == "nvcc" else list(nvrtc.libraries())


@dataclass(frozen=True)
class Job:
    """One source for one target."""

    source: Source
    capability: tuple[int, int]
    ptx: bool

    @property
    def file(self) -> str:
        """Where the image lies in its set."""
        target = f"{self.capability[0]}{self.capability[1]}"
        name = (
            f"{self.source.path.stem}.compute_{target}.ptx"
            if self.ptx
            else f"{self.source.path.stem}.sm_{target}.cubin"
        )
        return f"{self.source.operator}/{name}"


def jobs_of(
    compiler: Compiler, capabilities: Sequence[tuple[int, int]], operators: Sequence[str] = ()
) -> list[Job]:
    """Everything to compile: each source for each capability the compiler knows, and PTX."""
    chosen = [each for each in sources() if not operators or each.operator in operators]
    jobs = [
        Job(source, capability, ptx=False)
        for source in chosen
        for capability in capabilities
        if capability in compiler.capabilities
    ]
    return jobs + [Job(source, PTX_CAPABILITY, ptx=True) for source in chosen]


def build(compiler: Compiler, jobs: Sequence[Job], folder: Path, workers: int = 2) -> list[dict[str, object]]:
    """Compiles `jobs` into `folder` and writes the set's manifest.

    Raises:
        CompileError: A source does not compile.
        SpillError: A kernel spills.
    """

    def run(job: Job) -> dict[str, object]:
        compiled = compiler.compile(job.source.path, job.capability, include=FOLDER, ptx=job.ptx)
        resources = [] if job.ptx else parse_resources(compiled.log)
        if not job.ptx and not resources:
            raise nvrtc.CompileError(f"{job.source.name}: the compiler reported no kernel:\n{compiled.log}")
        refuse_spills(job.source, job.capability, resources)
        path = folder / job.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compiled.image)
        return {
            "source": job.source.name,
            "hash": job.source.hash,
            "file": job.file,
            "kind": "ptx" if job.ptx else "cubin",
            "capability": f"{job.capability[0]}.{job.capability[1]}",
            "kernels": {each.kernel: vars(each) for each in resources},
        }

    with ThreadPoolExecutor(workers) as pool:
        entries = list(pool.map(run, jobs))
    manifest = {"cuda": f"{compiler.version[0]}.{compiler.version[1]}", "binaries": entries}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return entries


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles everything and prints what was made."""
    parser = argparse.ArgumentParser(prog="python -m plugins_trt.build", description=__doc__)
    parser.add_argument(
        "--compiler", choices=("nvcc", "nvrtc"), help="default: nvcc where installed, else nvrtc"
    )
    parser.add_argument(
        "--capability", action="append", help="only this compute capability, such as 8.7 (repeatable)"
    )
    parser.add_argument("--operator", action="append", default=[], help="only this operator (repeatable)")
    parser.add_argument("--out", type=Path, default=CUBINS, help="folder of the sets, default %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="compilations at a time, default %(default)s")
    options = parser.parse_args(arguments)
    capabilities = CAPABILITIES
    if options.capability:
        capabilities = tuple(
            (int(text.split(".")[0]), int(text.split(".")[1])) for text in options.capability
        )
    found = compilers(options.compiler)
    if not found:
        print(  # noqa: T201
            "No CUDA compiler: install a CUDA toolkit (nvcc), or its run-time compiler with "
            "pip install nvidia-cuda-nvrtc-cu12==12.6.* (or nvidia-cuda-nvrtc for CUDA 13)",
            file=sys.stderr,
        )
        return 1
    for compiler in found:
        name = f"cuda-{compiler.version[0]}.{compiler.version[1]}"
        jobs = jobs_of(compiler, capabilities, options.operator)
        try:
            entries = build(compiler, jobs, options.out / name, options.workers)
        except (nvrtc.CompileError, SpillError) as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 1
        missing = [f"sm_{a}{b}" for a, b in capabilities if (a, b) not in compiler.capabilities]
        left_out = f"; without {', '.join(missing)}, which this compiler does not know" if missing else ""
        print(f"{options.out / name}: {len(entries)} images{left_out}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
