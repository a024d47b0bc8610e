"""The reference product of 4-bit weights: some outputs at a time are widened inside the matrix product.

The lower and the higher four bits of each octet are the even and the odd inputs, so a product is two: of the even inputs
with the lower halves and of the odd ones with the higher. Nothing is interleaved again, and no more than a tile of the
weight is ever wide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.executor.torch_ternary import TernaryWeight
from edged.models.weights import ORDER, SCALES, ZEROS, weight_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.models.architecture import Architecture
    from edged.models.weights import WeightSpec


class PackedWeight:
    """One 4-bit weight ``[out, in]`` (:mod:`edged.checkpoint.packed` gives the form).

    Args:
        packed: int32 ``[out, in / 8]``.
        scales: float16 ``[out, groups]``.
        zeros: uint8 ``[out, groups]``.
        parts: Outputs of each checkpoint module, one below the other.
        order: Of each module's inputs, int32 ``[modules, in]``; None without act-order.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        parts: tuple[int, ...],
        order: torch.Tensor | None = None,
    ) -> None:
        self.octets = packed.view(torch.uint8)  # [out, in / 2]
        self.scales = scales
        self.zeros = zeros
        self.parts: tuple[tuple[int, int, torch.Tensor | None], ...]
        """First output, end and order of inputs (even columns', then odd columns') of each run of outputs."""
        if order is None or all(torch.equal(each, order[0]) for each in order):
            halves = None if order is None else _halves(order[0])
            self.parts = ((0, packed.shape[0], halves),)
        else:
            ends = torch.tensor(parts).cumsum(0).tolist()
            self.parts = tuple(
                (end - rows, end, _halves(each)) for rows, end, each in zip(parts, ends, order, strict=True)
            )

    @property
    def inputs(self) -> int:
        """Inputs."""
        return 2 * self.octets.shape[1]


def packed_weights(
    architecture: Architecture, buffers: Mapping[str, torch.Tensor]
) -> dict[str, PackedWeight | TernaryWeight]:
    """The 4-bit and ternary weights of a model, by name."""
    return {
        spec.name: TernaryWeight(buffers[spec.name], buffers[spec.name + SCALES])
        if spec.packing.ternary
        else _packed_weight(spec, buffers)
        for spec in weight_specs(architecture)
        if spec.packing is not None
    }


def _packed_weight(spec: WeightSpec, buffers: Mapping[str, torch.Tensor]) -> PackedWeight:
    return PackedWeight(
        buffers[spec.name],
        buffers[spec.name + SCALES],
        buffers[spec.name + ZEROS],
        tuple(source.shape[0] for source in spec.sources),
        buffers.get(spec.name + ORDER),
    )


class PackedProduct:
    """Multiplies by 4-bit weights.

    Args:
        inputs: Scratch for an input ``[rows, in]``, flat, of the type that is computed in.
        tile: Scratch for half of the weights of some outputs, flat, of the same type.
        octets: Scratch of the same length in uint8.
    """

    def __init__(self, inputs: torch.Tensor, tile: torch.Tensor, octets: torch.Tensor) -> None:
        self._inputs = inputs
        self._tile = tile
        self._octets = octets

    def __call__(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        """``x @ weight.T``: ``[rows, in]`` to ``[rows, out]``, in any layout."""
        half = weight.inputs // 2
        outputs = max(1, self._tile.numel() // half)
        for first, end, order in weight.parts:
            even, odd = self._split(x, order)  # [in / 2, rows]
            for start in range(first, end, outputs):
                rows = slice(start, min(start + outputs, end))
                result = out[:, rows].t()  # [n, rows]
                torch.mm(self._widen(weight, rows, odd=False), even, out=result)
                result.addmm_(self._widen(weight, rows, odd=True), odd)

    def _split(self, x: torch.Tensor, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of the even and of the odd columns, ``[in / 2, rows]`` each."""
        rows, inputs = x.shape
        split = self._inputs[: rows * inputs].view(inputs, rows)
        if order is None:
            split.view(2, inputs // 2, rows).copy_(x.t().unflatten(0, (inputs // 2, 2)).transpose(0, 1))
        else:
            torch.index_select(x.t(), 0, order, out=split)
        return split[: inputs // 2], split[inputs // 2 :]

    def _widen(self, weight: PackedWeight, rows: slice, *, odd: bool) -> torch.Tensor:
        """Half of the weights of some outputs, ``[n, in / 2]``: ``scale * (q - zero)``."""
        packed = weight.octets[rows]
        octets = self._octets[: packed.numel()].view_as(packed)
        if odd:
            torch.bitwise_right_shift(packed, 4, out=octets)
        else:
            torch.bitwise_and(packed, 15, out=octets)
        tile = self._tile[: packed.numel()].view_as(packed)
        tile.copy_(octets)
        groups = tile.unflatten(1, (weight.scales.shape[1], -1))  # [n, groups, group / 2]
        groups.sub_(weight.zeros[rows].to(tile.dtype).unsqueeze(2))
        groups.mul_(weight.scales[rows].to(tile.dtype).unsqueeze(2))
        return tile


def _halves(order: torch.Tensor) -> torch.Tensor:
    """Inputs of the even columns, then of the odd ones."""
    return torch.cat([order[0::2], order[1::2]])
