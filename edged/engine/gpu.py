"""The GPU of this machine as the driver sees it, asked without loading a CUDA runtime."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR and CU_DEVICE_ATTRIBUTE_INTEGRATED."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    capability: tuple[int, int]
    driver: int
    """CUDA version of the driver, 13000 for 13.0."""
    memory: int = 0
    """Bytes that it has, or that it shares with the host."""
    integrated: bool = False
    """Its memory is the host's (Jetson)."""

    @property
    def target(self) -> str:
        """Its name as a build target: ``sm87``."""
        return f"sm{self.capability[0]}{self.capability[1]}"

    @property
    def driver_name(self) -> str:
        """``13.0``."""
        return f"{self.driver // 1000}.{self.driver % 1000 // 10}"


@functools.cache
def find_gpu() -> Gpu | None:
    """The first GPU; None without a driver or a GPU. No context is made."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, driver, major, minor, integrated = (ctypes.c_int(0) for _ in range(5))
    memory = ctypes.c_size_t(0)
    failed = (
        cuda.cuInit(0)
        or cuda.cuDriverGetVersion(ctypes.byref(driver))
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(integrated), _INTEGRATED, device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    )
    if failed:
        return None
    return Gpu((major.value, minor.value), driver.value, memory.value, bool(integrated.value))
