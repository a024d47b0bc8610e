"""Facts of this machine that the doctor looks at; every reader returns None where the system does not say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TORCH_SECONDS = 120.0
# Runs in a process of its own: a torch that was built for another CPU or driver ends its process, not the doctor.
_TORCH_PROBE = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append([properties.name, [properties.major, properties.minor], properties.total_memory])
product = (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
print(json.dumps({
    "version": torch.__version__,
    "built_for_cuda": torch.version.cuda,
    "gpus": gpus,
    "cpu": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "right": product == 512.0,
}))
"""


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none."""
    values: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdecimal():
            values[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return values


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def has_nvidia_device(root: Path = Path("/")) -> bool:
    """Whether the system shows an NVIDIA GPU, with a driver or on a Jetson."""
    places = ("dev/nvidia0", "dev/nvhost-gpu", "dev/nvgpu", "proc/driver/nvidia/version")
    return any((root / place).exists() for place in places)


@dataclass(frozen=True)
class TorchProbe:
    """What torch says of itself in a process of its own.

    Attributes:
        facts: What it found; empty when it did not run.
        problem: Why it did not run; empty when it did.
    """

    facts: dict[str, Any]
    problem: str = ""


def probe_torch() -> TorchProbe:
    """Import torch and multiply two matrices with it."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and a constant
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchProbe({}, f"importing it takes longer than {_TORCH_SECONDS:.0f} s")
    except OSError as error:
        return TorchProbe({}, f"no process can be started: {error}")
    if done.returncode < 0:
        return TorchProbe({}, f"importing it ends the process with signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return TorchProbe({}, lines[-1] if lines else f"importing it exits with {done.returncode}")
    try:
        return TorchProbe(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return TorchProbe({}, "it says nothing that can be read")
