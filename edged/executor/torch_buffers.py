"""The torch executor's memory: every buffer of the plan, allocated and touched once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.errors import LedgerError
from edged.memory.huge_pages import ask_for_huge_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import Progress
    from edged.memory.buffers import BufferSpec

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
    buffers = {}
    for index, spec in enumerate(specs):
        if progress is not None:
            progress(f"allocating {spec.row}", index, len(specs))
        buffers[spec.name] = _allocate(spec, device)
    return buffers


def _allocate(spec: BufferSpec, device: torch.device) -> torch.Tensor:
    try:
        buffer = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)
        if device.type == "cpu":
            ask_for_huge_pages(buffer.data_ptr(), spec.nbytes)
        return buffer.fill_(0)
    except (RuntimeError, MemoryError) as error:
        raise LedgerError(
            f"{device} refused {spec.nbytes} bytes for {spec.name} ({spec.row}), which the budget had planned: "
            f"free memory on this machine, or lower context_length or max_sequences ({error})"
        ) from error
