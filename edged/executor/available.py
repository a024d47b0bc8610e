"""Which executors this version has, and where they run. Imports none of them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edged.config import AttentionConfig
from edged.engine.gpu import find_gpu
from edged.errors import ConfigError

if TYPE_CHECKING:
    from edged.config import ModelConfig

_DEVICES: dict[str, tuple[str, ...]] = {"torch": ("cpu", "cuda"), "tensorrt": ("cuda",)}
"""Devices of each executor; ``auto`` takes the first."""

_LEAST_CAPABILITY = (8, 0)


def choose_executor(config: ModelConfig) -> str:
    """Name of the executor that runs a model: its own choice, or for ``auto`` the first that has its device.

    Raises:
        ConfigError: There is no such executor, none that runs on the device, no such device, no torch for it, or keys of
            ``attention`` that would have no effect.
    """
    if config.executor != "auto" and config.executor not in _DEVICES:
        raise ConfigError(
            f"model {config.name}: executor {config.executor} is not part of this version: use {' or '.join(_DEVICES)} "
            "or auto",
            field="executor",
        )
    attention = config.attention
    if attention.mode != "sparse" and replace(attention, mode="auto", lse="approximate") != AttentionConfig():
        raise ConfigError(
            f"model {config.name}: dense_below, top_k, window and init_blocks have no effect with attention mode "
            f"{attention.mode}: write mode: sparse, or leave them out",
            field="attention",
        )
    if config.executor != "tensorrt" and find_spec("torch") is None:
        raise ConfigError(
            f"model {config.name}: executor {config.executor} needs torch, which is not installed: pip install torch, or "
            "write executor: tensorrt with device: cuda",
            field="executor",
        )
    if config.device == "cuda":
        _check_cuda(config)
    for name, devices in _DEVICES.items():
        if config.executor in ("auto", name) and config.device in devices:
            return name
    known = sorted({device for each in _DEVICES.values() for device in each})
    raise ConfigError(
        f"model {config.name}: executor {config.executor} does not run on device {config.device} in this version: set "
        f"device to {' or '.join(known)}",
        field="device",
    )


def _check_cuda(config: ModelConfig) -> None:
    """Refuse a device that is not there."""
    gpu = find_gpu()
    problem = None
    if gpu is None:
        problem = "and this machine has no NVIDIA GPU with a driver: install the driver"
    elif gpu.capability < _LEAST_CAPABILITY:
        problem = f"and this GPU is an {gpu.target}: the kernels need sm_80 or later"
    elif find_spec("pycuda") is None:
        problem = "which needs PyCUDA: pip install 'edged[gpu]'"
    if problem is not None:
        # Of the executors only torch has a CPU to go to.
        also = "" if config.executor in ("auto", "torch") else " and executor to torch"
        raise ConfigError(
            f"model {config.name}: device is cuda, {problem}, or set device to cpu{also}", field="device"
        )
