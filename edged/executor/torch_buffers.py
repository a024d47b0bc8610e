"""The torch executor's memory: every buffer of the plan, allocated and touched once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edged.memory.buffers import BufferSpec

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}
"""torch's types by the plan's names."""


def allocate(specs: Iterable[BufferSpec], device: torch.device) -> dict[str, torch.Tensor]:
    """Make the buffers, filled with zeros so that every page of memory is really there.

    Raises:
        LedgerError: The device has less memory than was planned.
    """
    return {spec.name: _allocate(spec, device) for spec in specs}


def _allocate(spec: BufferSpec, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device).fill_(0)
    except (RuntimeError, MemoryError) as error:
        raise LedgerError(
            f"{device} refused {spec.nbytes} bytes for {spec.name} ({spec.row}), which the budget had planned: "
            f"free memory on this machine, or lower context_length or max_sequences ({error})"
        ) from error
