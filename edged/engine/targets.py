"""Which TensorRT builds for which GPU, decided before anything is built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from edged.engine.gpu import Gpu, find_gpu
from edged.errors import FailedPreconditionError, InvalidArgumentError
from plugins_trt.tensorrt import adapter
from plugins_trt.tensorrt.adapter import TensorRT, TensorRTError

if TYPE_CHECKING:
    from collections.abc import Sequence

RTX_TARGETS = ("sm80", "sm86", "sm89", "sm120", "sm121")
"""What TensorRT-RTX 1.7 builds for, wherever it runs, and edged has kernels for."""

_LEAST_CAPABILITY = 80

_FORM = re.compile(r"(?:sm|sm_)?(\d{2,3})")


def parse_targets(texts: Sequence[str]) -> tuple[str, ...]:
    """Names such as ``sm89`` in ascending order, each once.

    Raises:
        InvalidArgumentError: A text is no name of a target.
    """
    numbers = set()
    for text in texts:
        match = _FORM.fullmatch(text.strip().lower())
        if match is None:
            raise InvalidArgumentError(
                f"target {text!r}: write a compute capability such as sm89 (RTX 40) or sm87 (Orin)",
                field="target",
            )
        numbers.add(int(match[1]))
    return tuple(f"sm{number}" for number in sorted(numbers))


def choose(targets: Sequence[str], gpu: Gpu | None = None) -> tuple[TensorRT, tuple[str, ...]]:
    """Take the TensorRT that can build for these targets.

    Args:
        targets: As :func:`parse_targets` gives them; empty means this machine's GPU.
        gpu: This machine's GPU; found when None.

    Returns:
        The bindings and the targets, never empty.

    Raises:
        FailedPreconditionError: No TensorRT of this machine builds for them; says which would.
    """
    gpu = find_gpu() if gpu is None else gpu
    if not targets:
        if gpu is None:
            raise FailedPreconditionError(
                "there is no GPU in this machine, so name what to build for: --target with one of "
                f"{', '.join(RTX_TARGETS)}, or several times",
                field="target",
            )
        targets = (gpu.target,)
    too_old = [target for target in targets if int(target.removeprefix("sm")) < _LEAST_CAPABILITY]
    if too_old:
        raise FailedPreconditionError(
            f"no engine runs on {', '.join(too_old)}: the kernels of its nodes are for sm80 and later",
            field="target",
        )
    local = gpu is not None and tuple(targets) == (gpu.target,)
    try:
        tensorrt = adapter.load() if local else adapter.load("tensorrt_rtx")
    except TensorRTError as error:
        raise FailedPreconditionError(
            f"cannot build for {', '.join(targets)}: {error}" + ("" if local else _elsewhere(gpu))
        ) from None
    if tensorrt.is_rtx:
        foreign = [target for target in targets if target not in RTX_TARGETS]
        if foreign:
            raise FailedPreconditionError(
                f"TensorRT-RTX builds for {', '.join(RTX_TARGETS)}, not for {', '.join(foreign)}: build there on the "
                "machine itself with plain TensorRT (JetPack brings it for Orin, sm87)",
                field="target",
            )
    return tensorrt, tuple(targets)


def _elsewhere(gpu: Gpu | None) -> str:
    here = "which has no GPU" if gpu is None else f"whose GPU is {gpu.target}"
    return f" (plain TensorRT builds for the GPU of its own machine alone; this is one {here})"
