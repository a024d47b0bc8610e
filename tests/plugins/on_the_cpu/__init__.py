"""Runs CUDA sources on the CPU: the text that the GPU's compiler takes, with the device's instructions stood in for.

It shows that a kernel computes what it should, with the fragments of tensor-core products and the order of asynchronous
copies as they are defined; it says nothing of speed, and it is not a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from plugins_trt.sources import included

HERE = Path(__file__).resolve().parent
PLUGINS = HERE.parents[2] / "plugins_trt"
CACHE = HERE.parents[2] / ".cache" / "on_the_cpu"
"""What one run compiled, the next one finds."""


class Kernels:
    """The kernels of some sources, which take one struct each.

    Args:
        sources: `.cu` files.
        folder: Where they are compiled.
    """

    def __init__(self, sources: list[Path], folder: Path) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler here")
        files = [HERE / "run.cpp"]
        shared = (PLUGINS / "common.cuh").read_text()
        (folder / "arena.cuh").write_text(
            "#pragma once\n" + shared[shared.index("// One pool of one layer") :]
        )
        for source in sources:
            text = re.sub(
                r"extern __shared__ __align__\(\d+\) (.+) (\w+)\[\];", r"\1* \2 = g_ring;", source.read_text()
            )
            # ctypes passes no structs of unknown layout: each kernel gets a caller that takes a pointer to one.
            text = re.sub(_STRUCTS, _one_pointer, text)
            text = re.sub(
                r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?([\w#]+)\(const (\w+) args\)(\s*)\{',
                r'extern "C" void \1(const void* pointer)\3{ const \2& args = *static_cast<const \2*>(pointer);',
                text,
            )
            files.append(folder / f"{source.stem}.cpp")
            files[-1].write_text(text)
        digest = hashlib.sha256()
        of_sources = (file for source in sources for file in included(source))
        for path in sorted({*files, *HERE.rglob("*.cuh"), *of_sources}):
            digest.update(path.read_bytes())
        library = CACHE / f"{digest.hexdigest()[:16]}.so"
        if not library.exists():
            _compile(compiler, files, folder, library)
        self._library = ctypes.CDLL(str(library))

    def run(
        self,
        name: str,
        layout: str,
        values: tuple[float, ...],
        grid: tuple[int, int],
        *,
        lazy: bool,
        threads: int = 256,
        together: int = 1,
    ) -> None:
        """Runs one kernel: `values` are its struct, in the letters of `struct`; thread blocks `together` at a time."""
        arguments = ctypes.create_string_buffer(struct.pack(layout, *values))
        left = self._library.run(getattr(self._library, name), arguments, threads, *grid, int(lazy), together)
        assert not left, f"{left} threads of {name} wait for others that never come"


_STRUCTS = re.compile(
    r'(extern "C" __global__ void (?:__launch_bounds__\((?:[^()]|\([^()]*\))*\))?[\s\\]*[\w#]+)'
    r"\(\s*((?:const (?:__grid_constant__ )?\w+ \w+,?\s*){2,})\)\s*\{"
)


def _one_pointer(kernel: re.Match[str]) -> str:
    """A kernel that takes several structs, as one that takes a pointer to all of them, one behind the other."""
    structs = re.findall(r"(\w+) (\w+)(?:,|$)", " ".join(kernel[2].split()))
    members = " ".join(f"{kind} {name};" for kind, name in structs)
    names = " ".join(f"const {kind}& {name} = of.{name};" for kind, name in structs)
    head = f"{kernel[1]}(const void* pointer) {{ struct Of {{ {members} }};"
    return f"{head} const Of& of = *static_cast<const Of*>(pointer); {names}"


def _compile(compiler: str, files: list[Path], folder: Path, library: Path) -> None:
    made = folder / "kernels.so"
    # The stand-in is found before the header whose name it has.
    includes = [f"-I{HERE}", f"-I{PLUGINS}", f"-I{folder}"]
    options = ["-O2", "-std=c++20", "-fPIC", "-shared", "-fno-strict-aliasing", "-w"]
    command = [compiler, *options, *includes, "-o", str(made), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library.parent.mkdir(parents=True, exist_ok=True)
    fresh = library.with_suffix(f".{os.getpid()}")
    shutil.copyfile(made, fresh)
    fresh.replace(library)
