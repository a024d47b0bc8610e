"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round column by column and let later columns make up for the error.

With the Hessian ``H = X.T X`` of a linear's inputs and the upper Cholesky factor U of its inverse, the error that is left
of rounding column i is ``(w - q) / U[i, i]``, and the columns after it move by that times ``U[i, i+1:]``. What remains in
the end is ``sum((w - q)² / U[i, i]²)``: that is what scales are chosen for.

P-GPTQ (arXiv 2506.07900) leaves the first positions out of H. Channels that they alone use then look unused: their weights,
which make the massive activations of attention sinks, would be cut off for finer steps of their group (by half, in one
layer of SmolLM2-135M, and attention with them). So what the first positions bring is kept on the diagonal, up to a few times
its mean: enough to hold a channel's own weights, too little to hide others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edged.quantize.grid import Grid, find_grid, round_to_grid, widen
from edged.quantize.recipe import FREE, PLAIN, RTN
from edged.quantize.state import SourceError

if TYPE_CHECKING:
    from edged.quantize.recipe import Recipe

BLOCK = 128
"""Columns after which all later ones are moved together."""
_MOST_DAMPING = 1.0
_KEPT = 4.0
"""Most that is kept of a channel at the positions left out, in parts of the diagonal's mean (docs/quantization.md)."""
_SOURCE = "download or convert the source again (bfloat16 or float32 hold what float16 cannot)"


@dataclass
class QuantizedWeight:
    """A 4-bit weight ``[N, K]`` and what it stands for.

    Attributes:
        numbers: uint8 ``[N, K]``, 0 to 15, in the order of the inputs.
        grid: Scales and zero points ``[N, groups]``.
        groups: The group of each input, int64 ``[K]``.
        dense: ``scale * (q - zero)``, ``[N, K]``.
    """

    numbers: torch.Tensor
    grid: Grid
    groups: torch.Tensor
    dense: torch.Tensor

    def divide_rows(self, start: int, divisors: torch.Tensor) -> torch.Tensor:
        """Divide outputs from ``start`` on by numbers of their own, through their scales.

        Scales are rounded to float16 again, so that each group is divided by nearly its divisor.

        Returns:
            Whether every scale is still a number that float16 has, as a tensor of one flag.
        """
        rows = slice(start, start + len(divisors))
        scales = (self.grid.scales[rows] / divisors.unsqueeze(1)).to(torch.float16)
        held = scales.isfinite().all() & (scales > 0).all()
        self.grid.scales[rows] = scales.to(self.grid.scales.dtype)
        self.dense[rows] = widen(
            self.numbers[rows].to(self.dense.dtype),
            self.grid.scales[rows][:, self.groups],
            self.grid.zeros[rows][:, self.groups],
        )
        return held


def quantize_weight(
    weight: torch.Tensor,
    hessian: torch.Tensor | None,
    recipe: Recipe,
    where: str,
    left_out: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Make a weight 4-bit.

    Args:
        weight: ``[N, K]``, float32 or float64; overwritten.
        hessian: ``X.T X`` of its inputs times any positive number, ``[K, K]``; overwritten. None rounds to nearest.
        recipe: Group, symmetry and order.
        where: Name of the weight, for messages.
        left_out: What positions that the Hessian leaves out would add to its diagonal, ``[K]``.

    Raises:
        SourceError: The weight or its inputs hold NaN or infinity, or weights that float16 scales do not reach.
    """
    if not bool(weight.isfinite().all()):
        raise SourceError(f"{where}: the weights hold NaN or infinity; {_SOURCE}")
    group = recipe.group_of(weight.shape[1])
    if hessian is None or recipe.method == RTN:
        result = _round(weight, group, symmetric=recipe.symmetric)
    else:
        if left_out is not None:
            hessian.diagonal().add_(torch.minimum(left_out, _KEPT * hessian.diagonal().mean()))
        result = _solve(weight, hessian, group, recipe, where)
    if not bool(result.grid.scales.isfinite().all()):
        raise SourceError(
            f"{where}: holds weights that 4 bits with a float16 scale cannot, above half a million; download the source again"
        )
    return result


def _round(weight: torch.Tensor, group: int, *, symmetric: bool) -> QuantizedWeight:
    grid = find_grid(weight, group, symmetric=symmetric)
    groups = torch.arange(weight.shape[1], device=weight.device) // group
    scales, zeros = grid.scales[:, groups], grid.zeros[:, groups]
    numbers = round_to_grid(weight, scales, zeros)
    return QuantizedWeight(numbers.to(torch.uint8), grid, groups, widen(numbers, scales, zeros))


def _solve(
    weight: torch.Tensor, hessian: torch.Tensor, group: int, recipe: Recipe, where: str
) -> QuantizedWeight:
    inputs = weight.shape[1]
    diagonal = hessian.diagonal()
    if not bool(diagonal.isfinite().all()):
        raise SourceError(f"{where}: its inputs hold NaN or infinity; {_SOURCE}")
    # An input that the calibration never moves is rounded by itself.
    diagonal.masked_fill_(diagonal == 0, 1.0)
    order = torch.arange(inputs, device=weight.device)
    if recipe.act_order != PLAIN:
        order = torch.argsort(diagonal, descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order], recipe.damping, where)  # [K, K]
    importance = factor.diagonal().square().reciprocal()  # [K]
    place = torch.empty_like(order)
    place[order] = torch.arange(inputs, device=weight.device)
    groups = (torch.arange(inputs, device=weight.device) if recipe.act_order != FREE else place) // group
    columns = weight.t()[order].contiguous()  # [K, N], in the order of the work
    fixed = None
    if recipe.act_order not in (FREE, PLAIN):
        fixed = find_grid(weight, group, symmetric=recipe.symmetric, importance=importance[place])
    grid = _Columns(columns, factor, group, symmetric=recipe.symmetric, importance=importance)
    numbers = grid.run(fixed, groups[order])
    scales = grid.scales if fixed is None else fixed.scales
    zeros = grid.zeros if fixed is None else fixed.zeros
    in_order = numbers[place].t().contiguous()  # [N, K]
    dense = widen(in_order, scales[:, groups], zeros[:, groups])
    return QuantizedWeight(in_order.to(torch.uint8), Grid(scales, zeros), groups, dense)


class _Columns:
    """Goes through the columns ``[K, N]`` of a weight."""

    def __init__(
        self,
        columns: torch.Tensor,
        factor: torch.Tensor,
        group: int,
        *,
        symmetric: bool,
        importance: torch.Tensor,
    ) -> None:
        self._columns = columns
        self._factor = factor
        self._group = group
        self._symmetric = symmetric
        self._importance = importance
        inputs, outputs = columns.shape
        self.scales = columns.new_ones(outputs, inputs // group)
        self.zeros = columns.new_zeros(outputs, inputs // group)

    def run(self, fixed: Grid | None, groups: torch.Tensor) -> torch.Tensor:
        """The numbers of every column ``[K, N]``; ``groups`` gives each column's group of a fixed grid."""
        columns, factor = self._columns, self._factor
        inputs = len(columns)
        numbers = torch.empty_like(columns)
        # A block never ends inside a group whose scale is found on the way.
        step = self._group * (BLOCK // self._group) if fixed is None and self._group <= BLOCK else BLOCK
        of_column = groups.tolist()
        for start in range(0, inputs, step):
            end = min(start + step, inputs)
            errors = torch.empty_like(columns[start:end])
            for column in range(start, end):
                if fixed is not None:
                    scale, zero = fixed.scales[:, of_column[column]], fixed.zeros[:, of_column[column]]
                else:
                    scale, zero = self._found(column)
                value = columns[column]
                numbers[column] = round_to_grid(value, scale, zero)
                error = (value - widen(numbers[column], scale, zero)) / factor[column, column]
                columns[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
                errors[column - start] = error
            columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
        return numbers

    def _found(self, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of a column, found at the first of its group, from weights that have moved so far."""
        index, inside = divmod(column, self._group)
        if not inside:
            own = slice(column, column + self._group)
            found = find_grid(
                self._columns[own].t(),
                self._group,
                symmetric=self._symmetric,
                importance=self._importance[own],
            )
            self.scales[:, index], self.zeros[:, index] = found.scales[:, 0], found.zeros[:, 0]
        return self.scales[:, index], self.zeros[:, index]


def _inverse_factor(hessian: torch.Tensor, damping: float, where: str) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian, ``[K, K]``."""
    mean = hessian.diagonal().mean()
    if not bool(mean.isfinite()) or not bool(hessian.isfinite().all()):
        raise SourceError(f"{where}: its inputs hold NaN or infinity; {_SOURCE}")
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        factor, fault = torch.linalg.cholesky_ex(damped)
        if not int(fault):
            inverse = torch.cholesky_inverse(factor)
            upper: torch.Tensor
            upper, fault = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(fault) and bool(upper.isfinite().all()):
                return upper
        if damping >= _MOST_DAMPING:
            raise SourceError(
                f"{where}: the Hessian of its inputs has no inverse, however damped; give more or other calibration text"
            )
        damping = min(10 * damping, _MOST_DAMPING)
