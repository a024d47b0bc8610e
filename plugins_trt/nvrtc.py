"""NVRTC, NVIDIA's run-time compiler, through ctypes: enough to turn a source file into a cubin or PTX.

`cuda-python` binds one version; the kernels are compiled by the NVRTC of CUDA 12.6 and of 13 side by side, as the
packages `nvidia-cuda-nvrtc-cu12` and `nvidia-cuda-nvrtc` install them, without a toolkit or a GPU.
"""

from __future__ import annotations

import ctypes
import site
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

_PATTERNS = ("nvidia/cuda_nvrtc/lib/libnvrtc.so.*", "nvidia/cu*/lib/libnvrtc.so.*")
_SYSTEM = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/aarch64-linux/lib", "/usr/lib/aarch64-linux-gnu")


class CompileError(RuntimeError):
    """The compiler refused a source; the message holds its log."""


def target_of(capability: tuple[int, int]) -> str:
    """What compilers call a compute capability: "87".

    Of 9.0 it is the target with that capability's own instructions, "90a": its code runs on no other, but no other could
    run plain code of 9.0 either.
    """
    return f"{capability[0]}{capability[1]}{'a' if capability == (9, 0) else ''}"


@dataclass(frozen=True)
class Compiled:
    """What a compilation gave: the image and the compiler's words (registers and spills of each kernel)."""

    image: bytes
    log: str


@dataclass(frozen=True)
class Library:
    """One loaded NVRTC."""

    path: str
    version: tuple[int, int]
    capabilities: frozenset[tuple[int, int]]
    _handle: ctypes.CDLL = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: str) -> Library:
        """Loads the library at `path`.

        Raises:
            OSError: It is not there or not a library.
        """
        # NVRTC opens its builtins by name alone, and finds them if they are open already.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))
        handle = ctypes.CDLL(path)
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        handle.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        handle.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        handle.nvrtcGetSupportedArchs(numbers)
        capabilities = frozenset((number // 10, number % 10) for number in numbers)
        return cls(path, (major.value, minor.value), capabilities, handle)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Another process opens the library for itself."""
        return Library.open, (self.path,)

    def compile(
        self, source: Path, capability: tuple[int, int], *, include: Path, ptx: bool = False
    ) -> Compiled:
        """Compiles one file for one compute capability.

        Raises:
            CompileError: with the compiler's log.
        """
        options = [
            f"--gpu-architecture={'compute' if ptx else 'sm'}_{target_of(capability)}",
            "--std=c++17",
            f"--include-path={include}",
            "--ptxas-options=-v",
        ]
        program = ctypes.c_void_p()
        status = self._handle.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
        )
        if status:
            raise CompileError(f"{source}: NVRTC {self.version} made no program (error {status})")
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._handle.nvrtcCompileProgram(program, len(options), arguments)
            log = self._read(program, "ProgramLog").decode(errors="replace").rstrip("\0")
            if status:
                raise CompileError(f"{source}: NVRTC {self.version} for {options[0]} failed:\n{log}")
            return Compiled(self._read(program, "PTX" if ptx else "CUBIN"), log)
        finally:
            self._handle.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._handle, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._handle, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


@lru_cache(maxsize=1)
def libraries() -> tuple[Library, ...]:
    """Every NVRTC of Python's packages and of the system, the newest first; one of each version."""
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    paths = [
        path for folder in folders for pattern in _PATTERNS for path in sorted(Path(folder).glob(pattern))
    ]
    paths += [path for folder in _SYSTEM for path in sorted(Path(folder).glob("libnvrtc.so*"))]
    found: dict[tuple[int, int], Library] = {}
    for path in paths:
        if "builtins" in path.name or path.suffix == ".alt":
            continue
        try:
            library = Library.open(str(path))
        except (OSError, AttributeError):
            continue
        found.setdefault(library.version, library)
    return tuple(found[version] for version in sorted(found, reverse=True))
