"""Which executors this version has, and where they run. Imports none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edged.config import AttentionConfig
from edged.errors import ConfigError

if TYPE_CHECKING:
    from edged.config import ModelConfig

_DEVICES: dict[str, tuple[str, ...]] = {"torch": ("cpu",)}
"""Devices of each executor."""


def choose_executor(config: ModelConfig) -> str:
    """Name of the executor that runs a model: its own choice, or for ``auto`` the first that has its device.

    Raises:
        ConfigError: There is no such executor, none that runs on the device, or none that attends as asked.
    """
    if config.executor != "auto" and config.executor not in _DEVICES:
        raise ConfigError(
            f"model {config.name}: executor {config.executor} is not part of this version: use {' or '.join(_DEVICES)} "
            "or auto",
            field="executor",
        )
    attention = config.attention
    if attention.mode == "sparse" or replace(attention, mode="auto") != AttentionConfig():
        raise ConfigError(
            f"model {config.name}: no executor of this version attends sparsely, so attention can only be "
            "{mode: auto} or {mode: dense}, and both attend densely; leave the other keys of attention out",
            field="attention",
        )
    for name, devices in _DEVICES.items():
        if config.executor in ("auto", name) and config.device in devices:
            return name
    known = sorted({device for each in _DEVICES.values() for device in each})
    raise ConfigError(
        f"model {config.name}: executor {config.executor} does not run on device {config.device} in this version: set "
        f"device to {' or '.join(known)}",
        field="device",
    )
