"""The grid of a 4-bit linear: a float16 scale and a zero point for each group of each output, and rounding to it."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEVELS = 15
ZERO = 8
"""Zero point of symmetric grids."""
_SMALLEST_SCALE = 2.0**-24  # of float16
_STEPS = 16
_RANGE = 0.5
_PIECE = 1 << 16  # elements that are tried together, in the caches


class Grid(NamedTuple):
    """Scales (exact in float16) and zero points of consecutive groups."""

    scales: torch.Tensor  # [N, groups]
    zeros: torch.Tensor  # [N, groups]


def find_grid(
    weight: torch.Tensor,
    group: int,
    *,
    symmetric: bool,
    importance: torch.Tensor | None = None,
    steps: int = _STEPS,
) -> Grid:
    """The grid on which rounding to nearest does least harm, among ranges from the whole down to half of it.

    Args:
        weight: ``[N, K]``.
        group: Columns of a group; divides K.
        symmetric: The zero point is 8.
        importance: What a column's squared error counts, ``[K]``; None: all the same.
        steps: Ranges that are tried; 1: the whole range alone.
    """
    outputs, inputs = weight.shape
    groups = inputs // group
    scales = torch.empty(outputs, groups, dtype=weight.dtype, device=weight.device)
    zeros = torch.empty_like(scales)
    counts = None if importance is None else importance.view(groups, 1, group).movedim(2, 0).transpose(1, 2)
    rows = max(1, _PIECE // inputs)
    for start in range(0, outputs, rows):
        # Groups lie across: what is common to one is then a vector, and every operation runs along memory.
        piece = weight[start : start + rows].unflatten(1, (groups, group)).movedim(2, 0).contiguous()
        found = _search(piece, counts, symmetric=symmetric, steps=steps)
        scales[start : start + rows], zeros[start : start + rows] = found
    return Grid(scales, zeros)


def round_to_grid(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The numbers 0 to 15 nearest to a weight; all three broadcast."""
    return torch.round(weight / scales).add_(zeros).clamp_(0, LEVELS)


def widen(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The weights of numbers: ``scale * (q - zero)``; all three broadcast."""
    return (numbers - zeros) * scales


def _search(
    weight: torch.Tensor, importance: torch.Tensor | None, *, symmetric: bool, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points ``[n, groups]`` of weights ``[group, n, groups]``."""
    high = weight.amax(dim=0).clamp_(min=0)  # [n, groups]
    low = weight.amin(dim=0).clamp_(max=0)
    if symmetric:
        # Seven steps above zero, eight below it: whatever is larger is held at the start.
        high = torch.maximum(high, -low)
    best_error = torch.full_like(high, float("inf"))
    # Where not even the smallest range has a float16 scale, infinity stays and is refused.
    best_scales, best_zeros = torch.full_like(high, float("inf")), torch.full_like(high, ZERO)
    error = torch.empty_like(weight)  # [group, n, groups], reused
    for step in range(steps):
        kept = 1 - step * _RANGE / steps
        if symmetric:
            scales = _as_float16(high * (kept / (LEVELS - ZERO)))
            zeros = best_zeros
        else:
            scales = _as_float16((high - low) * (kept / LEVELS))
            # From 1 on: the first GPTQ format stores zero points less one, and not all its readers take 16 for 0.
            zeros = torch.round(-low * kept / scales).clamp_(1, LEVELS)
        torch.div(weight, scales, out=error).round_()
        if symmetric:
            error.clamp_(-ZERO, LEVELS - ZERO)
        else:
            torch.clamp(error, -zeros, LEVELS - zeros, out=error)
        error.mul_(scales).sub_(weight)
        if importance is None:
            total = torch.linalg.vector_norm(error, dim=0)
        else:
            total = error.square_().mul_(importance).sum(dim=0)
        better = total < best_error
        best_error = torch.where(better, total, best_error)
        best_scales = torch.where(better, scales, best_scales)
        if not symmetric:
            best_zeros = torch.where(better, zeros, best_zeros)
    # A group of zeros has any scale.
    empty = (high - low) == 0
    return best_scales.masked_fill_(empty, 1.0), best_zeros.masked_fill_(empty, ZERO)


def _as_float16(scales: torch.Tensor) -> torch.Tensor:
    return scales.to(torch.float16).to(scales.dtype).clamp_(min=_SMALLEST_SCALE)
