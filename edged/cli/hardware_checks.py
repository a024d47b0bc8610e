"""The doctor's checks of GPU, driver, board and power; each reads below a root, so that recorded trees can be tried."""

from __future__ import annotations

import grp
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edged.cli.checks import FAILURE, NOTE, OK, WARNING, Finding
from edged.cli.machine import meminfo
from edged.jetson import is_jetson, read_board
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.cli.needs import Needs
    from edged.jetson import Board

_PROBE_SECONDS = 60.0
_JETSON_NODES = (
    "nvmap",
    "nvgpu/igpu0/ctrl",
    "nvgpu/igpu0/as",
    "nvgpu/igpu0/channel",
    "nvhost-gpu",
    "nvhost-ctrl-gpu",
)
_DESKTOP_NODES = ("nvidia0", "nvidiactl", "nvidia-uvm")
_GROUPS = ("video", "render")
# Runs in a process of its own: a driver that does not fit may end it.
_CUDA_PROBE = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
code, version = cuda.cuInit(0), ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
print(json.dumps({"code": code, "version": version.value}))
"""
_MODULE_PROBE = (
    "import importlib, sys; print(getattr(importlib.import_module(sys.argv[1]), '__version__', '') or '')"
)
_CUDA_REMEDIES = {
    100: "no GPU that CUDA can use: check nvidia-smi, and the device nodes above",
    304: "the operating system refused a call: a sandbox without memfd_create does this",
    803: "driver and library do not fit: reboot after a driver upgrade",
    804: "this driver is older than the library's CUDA: upgrade the driver",
    999: "nvidia-uvm is missing or closed: run: sudo modprobe nvidia-uvm (rtx.conf does it for the service)",
}


def check_hardware(needs: Needs, root: Path = Path("/")) -> Iterator[Finding]:
    """Everything about GPU, board and power.

    Args:
        needs: What the models of the configuration need.
        root: Where the file system begins.
    """
    wants_gpu = needs.gpu
    board = read_board(root)
    jetson = is_jetson(root)
    has_gpu = jetson or any((root / "dev" / name).exists() for name in _DESKTOP_NODES)
    yield from check_driver(root, jetson=jetson, wants_gpu=wants_gpu)
    if has_gpu:
        yield from check_nodes(root, jetson=jetson, wants_gpu=wants_gpu)
    if has_gpu or wants_gpu:
        yield from check_cuda(wants_gpu=wants_gpu)
        yield check_module("tensorrt", "executor: tensorrt", wanted=needs.tensorrt)
        yield check_module("pycuda", "models on a GPU", wanted=wants_gpu)
    if board is not None:
        yield from check_board(board)
    yield from check_power(root)
    yield from check_swap(root, jetson=jetson)


def check_driver(root: Path, *, jetson: bool, wants_gpu: bool) -> Iterator[Finding]:
    """The kernel's driver."""
    try:
        line = (root / "proc/driver/nvidia/version").read_text("utf-8", "replace").splitlines()[0].strip()
    except (OSError, IndexError):
        line = ""
    if jetson:
        if (root / "dev/nvmap").exists():
            yield Finding("driver", OK, "nvgpu and nvmap of L4T")
        else:
            yield Finding(
                "driver", FAILURE, "/dev/nvmap is missing", "reboot; if it stays so, flash the board anew"
            )
    elif line:
        yield Finding("driver", OK, line)
    elif wants_gpu:
        yield Finding(
            "driver", FAILURE, "no NVIDIA driver is loaded", "install it: ubuntu-drivers install, then reboot"
        )
    else:
        yield Finding("driver", NOTE, "no NVIDIA driver is loaded; models run on the CPU")


def check_nodes(root: Path, *, jetson: bool, wants_gpu: bool) -> Iterator[Finding]:
    """The GPU's device nodes, for this user."""
    level = FAILURE if wants_gpu else WARNING
    names = _JETSON_NODES if jetson else _DESKTOP_NODES
    there = [root / "dev" / name for name in names if (root / "dev" / name).exists()]
    closed = [str(path) for path in there if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        groups = [name for name in _GROUPS if _has_group(name)]
        yield Finding(
            "device nodes",
            level,
            f"this user may not use {', '.join(closed)}",
            f"run: sudo usermod -aG {','.join(groups) or 'video'} USER, and log in again (the service's user: edged)",
        )
    elif not jetson and not (root / "dev/nvidia-uvm").exists():
        yield Finding(
            "device nodes",
            level,
            "/dev/nvidia-uvm is missing: CUDA would fail with 999",
            "run: sudo modprobe nvidia-uvm",
        )
    else:
        yield Finding("device nodes", OK, ", ".join(path.name for path in there))


def check_cuda(*, wants_gpu: bool) -> Iterator[Finding]:
    """The driver's library, initialized in a process of its own."""
    level = FAILURE if wants_gpu else WARNING
    output, problem = _run(_CUDA_PROBE)
    if problem:
        missing = "libcuda.so.1" in problem
        remedy = (
            "install the driver's library (libcuda1, nvidia-l4t-cuda), or add its folder to ld.so.conf"
            if missing
            else "compare driver and library: nvidia-smi"
        )
        yield Finding("cuda", level, problem, remedy)
        return
    found = json.loads(output)
    version = f"{found['version'] // 1000}.{found['version'] % 1000 // 10}"
    if found["code"]:
        remedy = _CUDA_REMEDIES.get(found["code"], "see cuInit's error codes, and dmesg")
        yield Finding("cuda", level, f"cuInit fails with {found['code']} (driver for CUDA {version})", remedy)
    else:
        yield Finding("cuda", OK, f"the driver is for CUDA {version}")


def check_module(module: str, why: str, *, wanted: bool) -> Finding:
    """A Python package of the GPU's, imported in a process of its own."""
    output, problem = _run(_MODULE_PROBE, module)
    if module == "tensorrt" and "No module named" in problem:  # TensorRT for RTX does as well
        output, other = _run(_MODULE_PROBE, "tensorrt_rtx")
        if "No module named" not in other:
            module, problem = "tensorrt_rtx", other
    if not problem:
        return Finding(module, OK, output or "there")
    missing = "No module named" in problem
    remedy = {
        "tensorrt": "on a Jetson: apt-get install python3-libnvinfer, and a venv with --system-site-packages; else: "
        "pip install tensorrt",
        "tensorrt_rtx": "pip install --force-reinstall tensorrt-rtx",
        "pycuda": "pip install pycuda, with /usr/local/cuda/bin in PATH and CUDA_ROOT=/usr/local/cuda",
    }[module]
    level = FAILURE if wanted else NOTE if missing else WARNING
    return Finding(module, level, f"{'not installed' if missing else problem}; needed for {why}", remedy)


def check_board(board: Board) -> Iterator[Finding]:
    """A Jetson's release, faults, power mode and heat."""
    release = tuple(int(part) for part in board.l4t.split(".") if part.isdecimal())
    text = ", ".join(part for part in (board.module or board.model, board.l4t and f"L4T {board.l4t}") if part)
    if not release:
        yield Finding(
            "board", WARNING, f"{text or 'a Jetson'} without /etc/nv_tegra_release", "use JetPack 6.2 or 7.2"
        )
    elif release[0] < 36:
        yield Finding("board", FAILURE, text, "edged needs JetPack 6 or later (L4T 36): upgrade the board")
    else:
        yield Finding("board", OK, text + (f", JetPack {board.jetpack}" if board.jetpack else ""))
    for fault in board.faults:
        yield Finding("board", WARNING, fault.found, fault.remedy)
    yield from _check_speed(board)
    yield from _check_stress(board)


def _check_speed(board: Board) -> Iterator[Finding]:
    """Power mode and clocks."""
    if board.power_mode and not board.power_mode.startswith("MAXN"):
        yield Finding(
            "power mode",
            NOTE,
            f"{board.power_mode}: prefill is slower than in MAXN",
            "see docs/operations.md; sudo nvpmodel -m ID changes it (the ids stand in /etc/nvpmodel.conf)",
        )
    elif board.power_mode:
        yield Finding("power mode", OK, board.power_mode)
    low, high = board.clocks.get("gpu_min"), board.clocks.get("gpu_max")
    if low is not None and high is not None:
        if low == high:
            yield Finding("clocks", OK, f"the GPU is pinned to {high / 1e6:.0f} MHz")
        else:
            yield Finding(
                "clocks",
                NOTE,
                f"the GPU's clock moves between {low / 1e6:.0f} and {high / 1e6:.0f} MHz",
                "sudo jetson_clocks pins it, for steady latency",
            )


def _check_stress(board: Board) -> Iterator[Finding]:
    """Heat and power supply."""
    if board.thermal_margin is not None:
        found = f"{board.thermal_margin:.0f} °C below throttling"
        if board.thermal_margin < 10:
            yield Finding(
                "heat", WARNING, found, "fan, air, a lower power mode; thermal.max_requests caps admission"
            )
        else:
            yield Finding("heat", OK, found)
    events = {
        name: count for name, count in board.throttle_events.items() if count and name != "peak_over_current"
    }
    if events:
        said = ", ".join(f"{count} x {name.replace('_', ' ')}" for name, count in events.items())
        yield Finding("power", WARNING, f"since boot: {said}", "check the power supply and its cable")


def check_power(root: Path) -> Iterator[Finding]:
    """The CPU's governor."""
    governors = set()
    for path in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))[:512]:
        try:
            governors.add(path.read_text("ascii", "replace").strip())
        except OSError:
            continue
    if "powersave" in governors:
        yield Finding(
            "cpu governor",
            NOTE,
            "powersave",
            "sudo cpupower frequency-set -g performance, where latency matters more than power",
        )


def check_swap(root: Path, *, jetson: bool) -> Iterator[Finding]:
    """Swap, which GPU memory never uses."""
    values = meminfo(root)
    total = values.get("SwapTotal", 0)
    used = total - values.get("SwapFree", total)
    try:
        zram = "/dev/zram" in (root / "proc/swaps").read_text("ascii", "replace")
    except OSError:
        zram = False
    if used > 2**30:
        yield Finding(
            "swap",
            WARNING,
            f"{format_size(used)} are swapped out: steps may wait for the disk",
            "lower memory.budget, or stop what else uses memory",
        )
    elif zram and jetson:
        yield Finding(
            "swap",
            NOTE,
            f"{format_size(total)} of zram, which takes the memory that the GPU shares",
            "for large models: sudo systemctl disable nvzramconfig, and a swap file on NVMe",
        )
    else:
        yield Finding("swap", OK, f"{format_size(total)}, {format_size(used)} in use")


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _run(code: str, *arguments: str) -> tuple[str, str]:
    """Output of a piece of Python in a process of its own, and what went wrong."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and a constant
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it takes longer than {_PROBE_SECONDS:.0f} s"
    except OSError as error:
        return "", f"no process can be started: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return "", lines[-1] if lines else f"it ends with {done.returncode}"
    return done.stdout.strip(), ""
