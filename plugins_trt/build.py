"""Compiles every CUDA source for every target: `python -m plugins_trt.build`, which is `make kernels`.

nvcc is used where it is installed, else every NVRTC that is found; `--compiler nvrtc` asks for the latter, which makes
one set of kernels for each CUDA version. What a compiler lacks a target for (CUDA 12.6: sm_120) is left out and said.
Registers and spills of each kernel are recorded in the set's `manifest.json`; a kernel that spills is an error. What a set
holds already, made from the sources as they are, is not compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plugins_trt import nvrtc
from plugins_trt.registry import CUBINS, MANIFEST, parse_version
from plugins_trt.resources import Resources, SpillError, Target, parse_resources, refuse_spills, write_record
from plugins_trt.sources import FOLDER, Source, sources

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPABILITIES: tuple[tuple[int, int], ...] = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0))
"""Compute capabilities that get a cubin: Orin is 8.7, RTX cards are 8.6, 8.9 and 12.0."""

PTX_CAPABILITY = (8, 0)
"""What the PTX is made for: any later device can run it."""


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
        target = nvrtc.target_of(capability)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "image"
            kind = "-ptx" if ptx else "-cubin"
            arch = f"-gencode=arch=compute_{target},code={'compute' if ptx else 'sm'}_{target}"
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
    def key(self) -> str:
        """Tells it from every other, also from itself before its source changed."""
        return f"{self.file} {self.source.hash}"

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
    """Everything to compile: each source for each capability that it suits and the compiler knows, and PTX."""
    chosen = [each for each in sources() if not operators or each.operator in operators]
    jobs = [
        Job(source, capability, ptx=False)
        for source in chosen
        for capability in capabilities
        if capability in compiler.capabilities and source.suits(capability)
    ]
    return jobs + [Job(source, PTX_CAPABILITY, ptx=True) for source in chosen if source.suits(PTX_CAPABILITY)]


def build(compiler: Compiler, jobs: Sequence[Job], folder: Path, workers: int = 2) -> list[dict[str, object]]:
    """Compiles into `folder` those of `jobs` that it does not hold yet, and writes the set's manifest.

    What the folder holds of other jobs stays in the manifest for as long as its source is as it was.

    Returns:
        The manifest's entries of `jobs`, in their order.

    Raises:
        CompileError: A source does not compile.
        SpillError: A kernel spills.
    """
    held = _held(folder)
    missing = [job for job in jobs if job.key not in held]
    try:
        with _pool(compiler, workers) as pool:
            for job, entry, image in pool.map(_compile, [compiler] * len(missing), missing):
                path = folder / job.file
                path.parent.mkdir(parents=True, exist_ok=True)
                _replace(path, image)
                held[job.key] = entry
    finally:
        # Also when a source is refused or the run is ended: what was compiled until then is not compiled again.
        current = {source.hash for source in sources()} | {job.source.hash for job in jobs}
        manifest = {
            "cuda": f"{compiler.version[0]}.{compiler.version[1]}",
            "binaries": [entry for key, entry in sorted(held.items()) if entry["hash"] in current],
        }
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return [held[job.key] for job in jobs]


def _compile(compiler: Compiler, job: Job) -> tuple[Job, dict[str, object], bytes]:
    compiled = compiler.compile(job.source.path, job.capability, include=FOLDER, ptx=job.ptx)
    resources = [] if job.ptx else parse_resources(compiled.log)
    if not job.ptx and not resources:
        raise nvrtc.CompileError(f"{job.source.name}: the compiler reported no kernel:\n{compiled.log}")
    refuse_spills(job.source, job.capability, resources)
    entry: dict[str, object] = {
        "source": job.source.name,
        "hash": job.source.hash,
        "file": job.file,
        "kind": "ptx" if job.ptx else "cubin",
        "capability": f"{job.capability[0]}.{job.capability[1]}",
        "image": hashlib.sha256(compiled.image).hexdigest(),
        "kernels": {each.kernel: vars(each) for each in resources},
    }
    return job, entry, compiled.image


def _held(folder: Path) -> dict[str, dict[str, object]]:
    """The entries of a set whose images are there, whole, by `Job.key`."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())["binaries"]
    except (OSError, ValueError, KeyError):
        return {}
    found = {}
    for entry in entries:
        try:
            image = (folder / entry["file"]).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(image).hexdigest() == entry.get("image"):
            found[f"{entry['file']} {entry['hash']}"] = entry
    return found


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that another process may be reading."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)  # of a disk that is full


def _pool(compiler: Compiler, workers: int) -> Executor:
    # nvcc is a process of its own; an NVRTC compiles one program at a time in a process.
    if workers == 1 or isinstance(compiler, Nvcc):
        return ThreadPoolExecutor(workers)
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def resources_of(entries: Sequence[dict[str, Any]]) -> list[tuple[str, Resources]]:
    """The source's name and the resources of every kernel of a manifest's entries."""
    return [
        (entry["source"], Resources(**kernel)) for entry in entries for kernel in entry["kernels"].values()
    ]


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
    parser.add_argument("--record", type=Path, help="write the registers of every kernel to this file")
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
    recorded: dict[Target, list[tuple[str, Resources]]] = {}
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
        for capability in capabilities:
            of_target = [
                each
                for each in entries
                if each["kernels"] and parse_version(str(each["capability"])) == capability
            ]
            if of_target:
                recorded[compiler.version, capability] = resources_of(of_target)
    if options.record is not None:
        write_record(options.record, recorded)
    return 0


if __name__ == "__main__":
    sys.exit(main())
