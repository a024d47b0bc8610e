"""The torch executor's memory: every buffer of the plan, allocated and touched once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.errors import LedgerError
from edged.memory.huge_pages import ask_for_huge_pages
from edged.memory.specs import WEIGHTS, BufferSpec
from plugins_trt.contract import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import Progress

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
"""torch's types by the plan's names."""
_ALIGNMENT = 64
"""Bytes: of a cache line, and of the widest registers."""


def allocate(
    specs: Sequence[BufferSpec], device: torch.device, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Make the buffers, filled with zeros so that every page of memory is really there.

    Args:
        specs: What the plan holds.
        device: Where.
        progress: Is told the ledger row of each buffer before it is made: a system without memory may answer with a
            kill instead of a refusal, and the daemon then knows at which row.

    Raises:
        LedgerError: The device has less memory than was planned.
    """
    if device.type != "cpu":
        blocks: dict[str, torch.Tensor] = {}
    else:
        blocks = _in_one_block([spec for spec in specs if spec.row == WEIGHTS])
    buffers = {}
    for index, spec in enumerate(specs):
        if progress is not None:
            progress(f"allocating {spec.row}", index, len(specs))
        buffer = blocks.get(spec.name)
        if buffer is None:
            buffer = _allocate(spec, device)
        buffers[spec.name] = buffer.fill_(0)
    return buffers


def _in_one_block(specs: Sequence[BufferSpec]) -> dict[str, torch.Tensor]:
    """Buffers that lie one after the other in memory of huge pages, which most of them are too small to fill."""
    places = [0]
    for spec in specs:
        places.append(places[-1] + round_up(spec.nbytes, _ALIGNMENT))
    whole = BufferSpec("all weights", WEIGHTS, (places[-1],), "uint8")
    block = _allocate(whole, torch.device("cpu"))
    return {
        spec.name: block[place : place + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
        for spec, place in zip(specs, places, strict=False)
    }


def _allocate(spec: BufferSpec, device: torch.device) -> torch.Tensor:
    """A buffer that nothing was written to yet."""
    try:
        buffer = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)
    except (RuntimeError, MemoryError) as error:
        raise LedgerError(
            f"{device} refused {spec.nbytes} bytes for {spec.name} ({spec.row}), which the budget had planned: "
            f"free memory on this machine, or lower context_length or max_sequences ({error})"
        ) from error
    if device.type == "cpu":
        ask_for_huge_pages(buffer.data_ptr(), spec.nbytes)
    return buffer
