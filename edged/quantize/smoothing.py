"""Input channels scaled before rounding, as in AWQ (arXiv 2306.00978): ``W x = (W s) (x / s)``.

Channels with large activations get finer steps. The scales are a power of the channels' mean activation; the power is
the one with the least error over the whole calibration, which the Hessian gives exactly: ``trace(E H E.T)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.quantize.grid import find_grid, round_to_grid, widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.quantize.recipe import Recipe

POWERS = tuple(step / 20 for step in range(20))
_MOST = 64.0
"""Channels are scaled by at most this and at least its inverse."""


def find_scales(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    activation: torch.Tensor,
    recipe: Recipe,
    tie: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The scale of each input channel, ``[K]``; all ones where none is better.

    Args:
        weight: ``[N, K]``.
        hessian: ``X.T X`` of its inputs times any number, ``[K, K]``.
        activation: Mean size of each input channel, ``[K]``.
        recipe: Group and symmetry.
        tie: Makes channels equal that can only be scaled together.
    """
    best = torch.ones_like(activation)
    if not bool((activation > 0).any()):
        return best
    activation = tie(activation.clamp(min=activation[activation > 0].min()))
    least = None
    for power in POWERS:
        scales = activation.pow(power)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp_(1 / _MOST, _MOST)
        error = _error(weight, scales, hessian, recipe)
        if least is None or error < least:
            least, best = error, scales
    return best


def _error(weight: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor, recipe: Recipe) -> float:
    group = recipe.group_of(weight.shape[1])
    scaled = weight * scales
    grid = find_grid(scaled, group, symmetric=recipe.symmetric, steps=1)
    wide = (grid.scales.unsqueeze(2), grid.zeros.unsqueeze(2))
    cut = scaled.unflatten(1, (-1, group))
    rounded = widen(round_to_grid(cut, *wide), *wide).flatten(1)
    error = rounded.div_(scales).sub_(weight)  # [N, K]
    return float(((error @ hessian) * error).sum())
