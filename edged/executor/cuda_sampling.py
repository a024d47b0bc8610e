"""Drawing tokens on the device, so that only their ids come back: all rows of a step in one captured piece of work.

The meaning is that of :mod:`plugins_trt.sample.reference`; the random number of a row, which depends on its seed and
position alone, is made on the host and travels with the step's data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugins_trt.sample.reference import ROWS, SMALLEST_TEMPERATURE, draw_from_all

if TYPE_CHECKING:
    from edged.executor.cuda_operators import StepData


def draw_warm(data: StepData, logits: torch.Tensor, drawn: torch.Tensor) -> None:
    """Replace the largest logit's id by a drawn one in the rows that have a temperature.

    Args:
        data: Temperatures, top_k, top_p and numbers of R rows.
        logits: fp32 ``[R, V]``.
        drawn: int32 ``[R]``, the largest logits' ids.
    """
    for first in range(0, len(logits), ROWS):
        rows = slice(first, first + ROWS)
        temperatures = data.temperatures[rows]
        warm = temperatures >= SMALLEST_TEMPERATURE
        ids = draw_from_all(
            logits[rows],
            temperatures=torch.where(warm, temperatures, 1.0),
            top_ks=data.top_ks[rows].long(),
            top_ps=torch.where(warm, data.top_ps[rows], 1.0),
            numbers=data.numbers[rows],
        )
        drawn[rows] = torch.where(warm, ids.int(), drawn[rows])
