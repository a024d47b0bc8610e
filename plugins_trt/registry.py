"""Finds and loads the compiled kernels that suit a device and its driver.

Three kinds are tried in order: a cubin made for the device's compute capability (or a lower minor of the same major),
PTX of a lower capability that the driver can compile, and the sources themselves, compiled with NVRTC. A cubin or PTX
made by a CUDA newer than the driver does not load: JetPack 6.2, for instance, has a driver of CUDA 12.6. `make kernels`
fills `_cubins/<cuda version>/<operator>/`, beside each file's hash of the sources it was made from; what was made from
other sources is passed over.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from plugins_trt import nvrtc, overlap
from plugins_trt.sources import FOLDER, Source, sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

CUBINS = FOLDER / "_cubins"
MANIFEST = "manifest.json"

OVERLAP = (9, 0)
"""From this compute capability on, a kernel can be launched before the one before it has ended."""

Version = tuple[int, int]


class KernelsError(RuntimeError):
    """No compiled kernels suit this device, or the ones asked for do not exist."""


@dataclass(frozen=True)
class Binary:
    """One compiled source file.

    Attributes:
        path: Where it lies.
        cuda: Version of the compiler.
        capability: Compute capability it was made for.
        ptx: Whether it is PTX, which the driver compiles further.
    """

    path: Path
    cuda: Version
    capability: Version
    ptx: bool

    def suits(self, capability: Version, driver: Version) -> bool:
        """Whether a device of this capability and a driver of this CUDA version run it."""
        if self.ptx:
            return self.cuda <= driver and self.capability <= capability
        # A driver loads cubins of every compiler of its major version.
        return (
            self.cuda[0] <= driver[0]
            and self.capability[0] == capability[0]
            and self.capability[1] <= capability[1]
        )


def parse_version(text: str) -> Version:
    """(12, 6) of "12.6".

    Raises:
        ValueError: The text has another form.
    """
    major, minor = text.split(".")
    return int(major), int(minor)


def binaries(source: Source, folder: Path = CUBINS) -> list[Binary]:
    """Every compiled form of a source file under `folder` that was made from the sources as they are."""
    found = []
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        entries = json.loads(manifest.read_text())
        cuda = parse_version(entries["cuda"])
        for entry in entries["binaries"]:
            if entry["source"] == source.name and entry["hash"] == source.hash:
                capability = parse_version(entry["capability"])
                found.append(
                    Binary(manifest.parent / entry["file"], cuda, capability, entry["kind"] == "ptx")
                )
    return found


def choose(candidates: Sequence[Binary], capability: Version, driver: Version) -> Binary | None:
    """The best of the compiled forms: a cubin before PTX, the nearest capability, then the newest compiler."""
    suitable = [each for each in candidates if each.suits(capability, driver)]
    return max(suitable, key=lambda each: (not each.ptx, each.capability, each.cuda), default=None)


class Kernel:
    """One kernel, launched as PyCUDA's prepared functions are."""

    def __init__(self, function: Any, overlapped: Callable[[], Any] | None = None) -> None:  # noqa: ANN401
        """Wraps a kernel.

        Args:
            function: PyCUDA's function.
            overlapped: Gives the same kernel for launches that may overlap the kernel before, where the device can.
        """
        self._function = function
        self._overlapped = overlapped
        self._handle: Any = None
        self._layout = ""
        self._aligned = False

    def prepare(
        self, arguments: str, *, overlaps: bool = False, beside_others: bool = False, aligned: bool = False
    ) -> Kernel:
        """Fixes the argument types, in the letters of `struct`; returns itself.

        Args:
            arguments: One letter an argument.
            overlaps: The kernel waits for the one before it by itself: it may be launched before that one ends.
            beside_others: Its thread blocks leave shared memory for those of the next launch, which L1 is not to take.
            aligned: It takes one struct, which is aligned to more than 16 bytes (tensor maps); it must overlap.
        """
        self._function.prepare(arguments)
        self._layout, self._aligned = arguments, aligned
        self._handle = self._overlapped() if overlaps and self._overlapped is not None else None
        if beside_others and self._handle is not None:
            overlap.prefer_shared_memory(self._handle)
        return self

    def clusters_at_once(self, threads: int, shared_bytes: int, size: int) -> int:
        """Clusters of `size` thread blocks that run at the same time; 0 where it does not `overlap`."""
        if self._handle is None:
            return 0
        return overlap.clusters_at_once(self._handle, threads, shared_bytes, size)

    @property
    def overlaps(self) -> bool:
        """Whether it is launched so that it may overlap the kernel before; such launches may be of clusters."""
        return self._handle is not None

    def prepared_async_call(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        stream: Any,  # noqa: ANN401 -- PyCUDA is untyped
        *arguments: float | bytes,
        shared_size: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        """Enqueues the kernel.

        Args:
            grid: Thread blocks.
            block: Threads of a block.
            stream: A PyCUDA stream, or None for the default one.
            *arguments: As `prepare` was told.
            shared_size: Bytes of dynamic shared memory.
            cluster: Thread blocks of a cluster, where the kernel `overlaps`.
        """
        if self._handle is None:
            if cluster != (1, 1, 1):
                raise KernelsError(f"a cluster of {cluster} thread blocks: this device has none")
            self._function.prepared_async_call(grid, block, stream, *arguments, shared_size=shared_size)
        else:
            packed = overlap.pack(self._layout, arguments)
            overlap.launch(
                self._handle,
                grid,
                block,
                stream,
                arguments=packed,
                shared_bytes=shared_size,
                cluster=cluster,
                aligned=self._aligned,
            )


@dataclass
class _Module:
    """A loaded image, and the same one loaded once more for overlapping launches, when one is asked for."""

    image: bytes
    loaded: Any
    _again: overlap.Module | None = None

    def holds(self, kernel: str) -> bool:
        """Whether the image has a symbol of this name: to ask the driver and be refused counts as an error."""
        return re.search(rb"(?<![\w])" + re.escape(kernel.encode()) + rb"(?![\w])", self.image) is not None

    def overlapped(self, kernel: str, shared_bytes: int) -> Any:  # noqa: ANN401 -- a handle of the driver
        if self._again is None:
            self._again = overlap.Module(self.image)
        return self._again.function(kernel, shared_bytes)


class Kernels:
    """The kernels of one device, loaded when first asked for, in the context that is current then."""

    def __init__(
        self,
        capability: Version,
        driver: Version,
        multiprocessors: int,
        shared_bytes: int,
        *,
        folder: Path = CUBINS,
    ) -> None:
        """Describes the device.

        Args:
            capability: Compute capability, (9, 0) for an H200.
            driver: CUDA version of the driver, (12, 6) on JetPack 6.2.
            multiprocessors: Multiprocessors of the device.
            shared_bytes: Shared memory that one block may ask for.
            folder: Where the compiled kernels lie.
        """
        self.capability = capability
        self.driver = driver
        self.multiprocessors = multiprocessors
        self.shared_bytes = shared_bytes
        self._folder = folder
        self._modules: dict[str, list[_Module]] = {}

    @classmethod
    def of_current_device(cls) -> Kernels:
        """The kernels of the device whose context is current in this thread (PyCUDA's or one it shares)."""
        driver = importlib.import_module("pycuda.driver")
        device = driver.Context.get_device()
        attribute = driver.device_attribute
        version = driver.get_driver_version()
        return cls(
            device.compute_capability(),
            (version // 1000, version % 1000 // 10),
            device.get_attribute(attribute.MULTIPROCESSOR_COUNT),
            device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        )

    def operator(self, name: str) -> Callable[[str, int], Kernel]:
        """A finder of the kernels of one operator: by name, with the dynamic shared memory it may ask for.

        Raises:
            KernelsError: The operator has no sources, or nothing made from them suits the device.
        """
        modules = self._load(name)

        def function(kernel: str, shared_bytes: int = 0) -> Kernel:
            driver = importlib.import_module("pycuda.driver")
            for module in modules:
                if not module.holds(kernel):
                    continue
                found = module.loaded.get_function(kernel)
                if shared_bytes > self.shared_bytes:
                    raise KernelsError(
                        f"{name}: {kernel} needs {shared_bytes} bytes of shared memory, "
                        f"this device gives a block {self.shared_bytes}"
                    )
                if shared_bytes:
                    found.set_attribute(driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
                if self.capability < OVERLAP:
                    return Kernel(found)
                return Kernel(found, partial(module.overlapped, kernel, shared_bytes))
            raise KernelsError(f"{name}: no kernel named {kernel}")

        return function

    def image(self, source: Source) -> bytes:
        """The compiled form of one source file that suits the device, made with NVRTC when no file does.

        Raises:
            KernelsError: None suits, and NVRTC is missing or too new.
        """
        candidates = binaries(source, self._folder)
        best = choose(candidates, self.capability, self.driver)
        if best is not None:
            return best.path.read_bytes()
        made_for = ", ".join(
            sorted(
                f"{'compute' if each.ptx else 'sm'}_{each.capability[0]}{each.capability[1]} by CUDA "
                f"{each.cuda[0]}.{each.cuda[1]}"
                for each in candidates
            )
        )
        reason = (
            f"{source.name}: no compiled kernels suit compute capability {self.capability[0]}.{self.capability[1]} "
            f"with a driver of CUDA {self.driver[0]}.{self.driver[1]} "
            f"(found: {made_for or f'nothing made from these sources in {self._folder}'})"
        )
        for library in nvrtc.libraries():
            if library.version[0] <= self.driver[0] and self.capability in library.capabilities:
                return library.compile(source.path, self.capability, include=FOLDER).image
        raise KernelsError(
            f"{reason}, and no NVRTC of CUDA {self.driver[0]} was found to compile them. Run `make kernels` with a "
            f"CUDA toolkit no newer than the driver, or install nvidia-cuda-nvrtc-cu12 (12.6 for JetPack 6.2)"
        )

    def _load(self, operator: str) -> list[_Module]:
        if operator not in self._modules:
            files = [each for each in sources() if each.operator == operator]
            if not files:
                raise KernelsError(f"{operator}: no such operator with CUDA sources")
            driver = importlib.import_module("pycuda.driver")
            images = [self.image(each) for each in files if each.suits(self.capability)]
            self._modules[operator] = [_Module(image, driver.module_from_buffer(image)) for image in images]
        return self._modules[operator]
