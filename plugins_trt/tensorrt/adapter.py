"""Chooses the TensorRT of this machine: ``tensorrt`` if it imports, else ``tensorrt_rtx``.

Everything else takes the module from here and asks nothing about which of the two it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plugins_trt.tensorrt.logger import make_logger
from plugins_trt.tensorrt.short_name import ShortNameError, ensure_short_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FLAVOURS = ("tensorrt", "tensorrt_rtx")
FLOORS = {"tensorrt": (10, 3), "tensorrt_rtx": (1, 7)}
"""Oldest version of each: IPluginV3 with what the plugins use; TensorRT-RTX before 1.7 refuses plugin nodes."""

INSTALL = (
    "on a Jetson `apt install python3-libnvinfer` and let the virtual environment see it "
    "(--system-site-packages); on x86-64 `pip install tensorrt` for CUDA serving, or "
    "`pip install tensorrt-rtx-cu13 tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings` (1.7.1.116, 95 MB), which also "
    "builds without a GPU"
)


_loading = threading.Lock()
_repair = functools.cache(ensure_short_name)
"""Once a process: what it opens stays open, also when the import after it fails."""


class TensorRTError(RuntimeError):
    """No TensorRT can be used here; the message says what to install."""


@dataclass(frozen=True)
class TensorRT:
    """The chosen bindings."""

    name: str
    """``tensorrt`` or ``tensorrt_rtx``."""
    version: str
    module: Any
    logger: Any
    cuda_major: int | None
    """Of the CUDA that its packages are built for; None where no package says it (apt)."""

    @property
    def is_rtx(self) -> bool:
        """Whether it is TensorRT-RTX, which builds for named targets without a GPU."""
        return self.name == "tensorrt_rtx"


def load(name: str | None = None) -> TensorRT:
    """Import TensorRT and make its one logger, once a process.

    Args:
        name: One of `FLAVOURS` to take that one alone; None takes the first that imports.

    Raises:
        TensorRTError: None imports, or the one found is too old or installed for two CUDA majors at once.
    """
    reasons = []
    for flavour in FLAVOURS if name is None else (name,):
        try:
            with _loading:
                return _load(flavour)
        except (ImportError, OSError, ShortNameError) as error:
            reasons.append(f"{flavour}: {error}")
    raise TensorRTError(f"no TensorRT can be imported ({'; '.join(reasons)}); {INSTALL}")


@functools.cache
def _load(name: str) -> TensorRT:
    if name == "tensorrt_rtx":
        _repair()
    module = importlib.import_module(name)
    version = str(getattr(module, "__version__", "unknown"))
    check_version(name, version)
    majors = cuda_majors(name, _installed())
    if len(set(majors.values())) > 1:
        packages = ", ".join(f"{package} (CUDA {major})" for package, major in sorted(majors.items()))
        raise TensorRTError(
            f"{name} is installed for several CUDA majors at once, and which libraries a process gets is chance: "
            f"{packages}; uninstall all of them and install one"
        )
    return TensorRT(
        name=name,
        version=version,
        module=module,
        logger=make_logger(module),
        cuda_major=next(iter(majors.values()), None),
    )


def check_version(name: str, version: str) -> None:
    """Refuse a version below the floor.

    Raises:
        TensorRTError: It is below the floor, or no version.
    """
    floor = FLOORS[name]
    wanted = ".".join(str(part) for part in floor)
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None:
        raise TensorRTError(f"{name} calls its version {version!r}, which cannot be compared with {wanted}")
    if (int(parts[1]), int(parts[2])) < floor:
        raise TensorRTError(
            f"{name} {version} is too old: edged needs {wanted} or later "
            f"({'JetPack 6.1 brings 10.3' if name == 'tensorrt' else 'older ones refuse plugins'}); {INSTALL}"
        )


def cuda_majors(name: str, distributions: Iterable[str]) -> dict[str, int]:
    """The CUDA major of each installed package that belongs to the bindings ``name``."""
    pattern = re.compile(name.replace("_", "[-_]") + r"[-_]cu(\d+)(?:[-_](?:libs|bindings))?", re.IGNORECASE)
    return {
        package: int(match[1])
        for package in distributions
        if (match := pattern.fullmatch(package)) is not None
    }


def check_cuda(majors: Mapping[str, int | None]) -> None:
    """Refuse parts of one process that were made for different CUDA majors.

    Args:
        majors: CUDA major of each part, by the name to show; None where it is unknown.

    Raises:
        TensorRTError: They differ; lists them.
    """
    known = {part: major for part, major in majors.items() if major is not None}
    if len(set(known.values())) > 1:
        parts = ", ".join(f"{part} for CUDA {major}" for part, major in known.items())
        raise TensorRTError(f"mixed CUDA majors in one process: {parts}; install all of them for one major")


def _installed() -> list[str]:
    return [
        str(each.metadata["Name"]) for each in importlib.metadata.distributions() if each.metadata["Name"]
    ]
