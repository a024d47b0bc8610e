"""The doctor's checks: each looks at one thing and says what it found and, if it is wrong, what to do."""

from __future__ import annotations

import locale
import os
import platform
import resource
import shutil
import stat
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged import __version__
from edged.cli.machine import has_nvidia_device, meminfo, probe_torch
from edged.cli.requirements import requirements
from edged.config import default_socket
from edged.errors import EdgedError, UnreachableError
from edged.memory.available import available_memory
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.cli.needs import Needs

OK, NOTE, WARNING, FAILURE = "ok", "note", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: What was looked at.
        level: ``ok``, ``note`` (for information), ``warn`` or ``FAIL``.
        found: What is there.
        remedy: What to do; empty when there is nothing to do.
    """

    check: str
    level: str
    found: str
    remedy: str = ""


def check_python() -> Iterator[Finding]:
    """The interpreter and the machine it runs on."""
    version = platform.python_version()
    place = f"{version} ({sys.executable}) on {platform.system()} {platform.machine()}"
    if sys.version_info < (3, 10):  # noqa: UP036 - the doctor also runs where pip's check was switched off
        yield Finding("python", FAILURE, place, "install CPython 3.10 to 3.13 and edged in a new venv of it")
    elif sys.version_info >= (3, 14):
        yield Finding("python", WARNING, place, "edged is tested on CPython 3.10 to 3.13; use one of them")
    else:
        yield Finding("python", OK, place)
    if sys.platform != "linux":
        yield Finding("system", FAILURE, platform.system(), "run edged on Linux")
    encoding = locale.getpreferredencoding(do_setlocale=False)
    if encoding.lower().replace("-", "") != "utf8":
        yield Finding(
            "locale", WARNING, encoding, "set LANG=C.UTF-8, or text outside of it is shown as question marks"
        )


def check_packages() -> Iterator[Finding]:
    """What pip installed against what edged asks for."""
    try:
        # Where torch is left out, check_torch says whether it may be.
        wanted = [
            item for item in requirements() if not item.extra and (item.installed or item.name != "torch")
        ]
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages", FAILURE, "edged is not installed", "run: pip install -e . in the source tree"
        )
        return
    bad = [item for item in wanted if not item.satisfied]
    for item in bad:
        found = (
            f"{item.name} {item.installed or 'is not installed'}, edged wants {item.wanted or 'any version'}"
        )
        yield Finding("packages", FAILURE, found, f"run: pip install '{item.name}{item.wanted}'")
    if not bad:
        shown = ("grpcio", "protobuf", "tokenizers", "safetensors", "gguf", "numpy")
        versions = ", ".join(f"{item.name} {item.installed}" for item in wanted if item.name in shown)
        yield Finding("packages", OK, f"edged {__version__} with all {len(wanted)}: {versions}")


def check_torch(needs: Needs) -> Iterator[Finding]:
    """Run torch on the CPU and look for GPUs, as far as the models need either.

    Args:
        needs: What the models of the configuration need.
    """
    probe = probe_torch()
    if "No module named 'torch'" in probe.problem:
        yield _without_torch(needs)
        return
    level = FAILURE if needs.torch or not needs.known else WARNING
    if probe.problem:
        yield Finding("torch", level, probe.problem, "run: pip install --force-reinstall torch, for this CPU")
        return
    facts = probe.facts
    text = f"{facts['version']}, {facts['cpu']}, {facts['threads']} threads"
    if not facts["right"]:
        yield Finding(
            "torch", level, f"{text}: a matrix product is wrong", "run: pip install --force-reinstall torch"
        )
        return
    yield Finding("torch", OK, text)
    # A GPU that TensorRT alone needs is looked at by the checks of the hardware.
    if needs.torch_gpu or not needs.gpu:
        yield _gpu_finding(facts, wants_gpu=needs.torch_gpu)


def _without_torch(needs: Needs) -> Finding:
    """Whether this installation can do without torch."""
    if needs.torch:
        return Finding(
            "torch",
            FAILURE,
            "not installed, and a model runs on it (executor: torch or auto)",
            "install edged with torch (pip install torch), or write executor: tensorrt with device: cuda",
        )
    if needs.known:
        return Finding("torch", OK, "not installed; executor: tensorrt needs none")
    if any(find_spec(name) is not None for name in ("tensorrt", "tensorrt_rtx")):
        return Finding("torch", NOTE, "not installed: models need executor: tensorrt here")
    return Finding(
        "torch",
        FAILURE,
        "not installed, and TensorRT is not either: no model can run",
        "install edged with torch (pip install torch), or TensorRT (on a Jetson: apt-get install python3-libnvinfer)",
    )


def _gpu_finding(facts: dict[str, Any], *, wants_gpu: bool) -> Finding:
    level = FAILURE if wants_gpu else NOTE
    if facts["gpus"]:
        names = [
            f"{name} (sm_{major}{minor}, {format_size(size)})" for name, (major, minor), size in facts["gpus"]
        ]
        old = [name for name, (major, _), _ in facts["gpus"] if major < 8]
        if old:
            return Finding(
                "gpu", level, ", ".join(names), "edged's kernels need sm_80 or later; use device: cpu"
            )
        return Finding("gpu", OK, ", ".join(names))
    if not has_nvidia_device():
        remedy = "install the NVIDIA driver, or write device: cpu" if wants_gpu else ""
        return Finding("gpu", level, "none; models run on the CPU", remedy)
    if not facts["built_for_cuda"]:
        return Finding(
            "gpu",
            FAILURE if wants_gpu else WARNING,
            "there is one, and this torch is built for the CPU alone",
            "install a torch that is built for CUDA",
        )
    return Finding(
        "gpu",
        FAILURE if wants_gpu else WARNING,
        f"there is one, and torch (CUDA {facts['built_for_cuda']}) cannot use it",
        "compare the driver's CUDA version (nvidia-smi) with torch's, and the rights on /dev/nvidia*",
    )


def check_memory() -> Iterator[Finding]:
    """What is left for a budget."""
    values = meminfo()
    available, total = available_memory(), values.get("MemTotal")
    if available is None or total is None:
        yield Finding(
            "memory", WARNING, "/proc/meminfo cannot be read", "set memory.budget in the configuration"
        )
        return
    swapped = values.get("SwapTotal", 0) - values.get("SwapFree", 0)
    text = f"{format_size(available)} of {format_size(total)} available"
    text += f", {format_size(swapped)} swapped out" if swapped > 2**20 else ""
    if available < 2**30:
        yield Finding(
            "memory", WARNING, text, "stop what is not needed: even the demo model takes most of 1 GiB"
        )
    else:
        yield Finding("memory", OK, text)


def check_limits() -> Iterator[Finding]:
    """Limits of the system on one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        yield Finding("open files", WARNING, f"at most {soft}", f"run: ulimit -n {min(hard, 65536)}")
    else:
        yield Finding("open files", OK, f"at most {soft}")


def check_socket(address: str | None, place: Path | None = None) -> Iterator[Finding]:
    """The daemon, if one runs, and the place of its socket, if none does.

    Args:
        address: What the user named; None looks at ``place``, where a missing daemon is no fault.
        place: The socket of the configuration; None: the default one.
    """
    try:
        # The doctor has to work where grpc is what is broken.
        from edged.client import Client  # noqa: PLC0415
        from edged.client.readiness import describe_state  # noqa: PLC0415
        from edged.v1.control_pb2 import STATE_SERVING  # noqa: PLC0415
    except ImportError as error:
        yield Finding(
            "daemon",
            FAILURE,
            f"grpc cannot be imported: {error}",
            "run: pip install --force-reinstall grpcio",
        )
        return
    try:
        with Client(f"unix:{place}" if address is None and place is not None else address) as client:
            status = client.status(timeout=5.0)
    except UnreachableError as error:
        if address is not None:
            yield Finding("daemon", FAILURE, error.message, "start it, or correct the address")
            return
        if place is not None:
            yield Finding("daemon", NOTE, error.message, "start it with: edged --config FILE")
            return
        yield Finding(
            "daemon", NOTE, "none runs at the default address", "start it with: edged --config FILE"
        )
        yield _place_finding(default_socket())
    except EdgedError as error:
        yield Finding("daemon", FAILURE, error.message, "correct the address, or see the daemon's log")
    else:
        text = f"edged {status.version} at {client.address}: {describe_state(status)}"
        if status.state == STATE_SERVING and status.version != __version__:
            yield Finding("daemon", WARNING, text, f"restart it: this edgectl is {__version__}")
        elif status.state == STATE_SERVING:
            yield Finding("daemon", OK, text)
        else:
            yield Finding("daemon", WARNING, text, "see edgectl status, and the daemon's log")


def _place_finding(path: Path) -> Finding:
    """Whether a daemon of this user could make its socket at ``path``."""
    folder = path.parent
    if not folder.exists():
        folder = folder.parent
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        return Finding("socket", FAILURE, f"{path} is no socket", f"remove it: rm {path}")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(
            "socket",
            FAILURE,
            f"this user may not write in {folder}",
            "set listen.unix to a path in a folder that it may",
        )
    left = "; a daemon that ended left its socket, the next one replaces it" if path.exists() else ""
    return Finding("socket", OK, f"a daemon of this user would listen at {path}{left}")


def check_disk() -> Iterator[Finding]:
    """Room for an import in the folder that the user is in."""
    try:
        folder = Path.cwd()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding(
            "disk", WARNING, f"this folder cannot be used: {error.strerror}", "go to one that exists"
        )
        return
    if free < 2**30:
        yield Finding("disk", WARNING, f"{format_size(free)} free in {folder}", "make room before an import")
    else:
        yield Finding("disk", OK, f"{format_size(free)} free in {folder}")
