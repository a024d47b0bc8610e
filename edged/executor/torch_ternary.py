"""The reference product of ternary weights: some outputs at a time are widened inside the matrix product.

An octet holds four consecutive inputs, so a product is four: of every fourth input with the weights at its place in the
octets. No more than a tile of a quarter of the weight is ever wide.
"""

from __future__ import annotations

import torch

PLACES = 4
"""Weights of an octet."""


class TernaryWeight:
    """One ternary weight ``[out, in]`` (:mod:`edged.checkpoint.ternary` gives the form).

    Args:
        packed: int32 ``[out, in / 16]``.
        scales: float16 ``[out, groups]``.
    """

    def __init__(self, packed: torch.Tensor, scales: torch.Tensor) -> None:
        self.octets = packed.view(torch.uint8)  # [out, in / 4]
        self.scales = scales

    @property
    def inputs(self) -> int:
        """Inputs."""
        return PLACES * self.octets.shape[1]


class TernaryProduct:
    """Multiplies by ternary weights; scratch as of :class:`edged.executor.torch_packed.PackedProduct`.

    Args:
        inputs: Scratch for an input ``[rows, in]``, flat, of the type that is computed in.
        tile: Scratch for a quarter of the weights of some outputs, flat, of the same type.
        octets: Scratch of the same length in uint8.
    """

    def __init__(self, inputs: torch.Tensor, tile: torch.Tensor, octets: torch.Tensor) -> None:
        self._inputs = inputs
        self._tile = tile
        self._octets = octets

    def __call__(self, x: torch.Tensor, weight: TernaryWeight, out: torch.Tensor) -> None:
        """``x @ weight.T``: ``[rows, in]`` to ``[rows, out]``, in any layout."""
        rows, inputs = x.shape
        quarter = inputs // PLACES
        split = self._inputs[: rows * inputs].view(PLACES, quarter, rows)
        split.copy_(x.t().unflatten(0, (quarter, PLACES)).transpose(0, 1))
        outputs = max(1, self._tile.numel() // quarter)
        for start in range(0, len(weight.octets), outputs):
            some = slice(start, start + outputs)
            result = out[:, some].t()  # [n, rows]
            torch.mm(self._widen(weight, some, 0), split[0], out=result)
            for place in range(1, PLACES):
                result.addmm_(self._widen(weight, some, place), split[place])

    def _widen(self, weight: TernaryWeight, rows: slice, place: int) -> torch.Tensor:
        """The weights at one place of some outputs' octets, ``[n, in / 4]``: ``scale * (code - 1)``."""
        packed = weight.octets[rows]
        octets = self._octets[: packed.numel()].view_as(packed)
        torch.bitwise_right_shift(packed, 2 * place, out=octets)
        octets.bitwise_and_(3)
        tile = self._tile[: packed.numel()].view_as(packed)
        tile.copy_(octets)
        groups = tile.unflatten(1, (weight.scales.shape[1], -1))  # [n, groups, group / 4]
        groups.sub_(1.0).mul_(weight.scales[rows].to(tile.dtype).unsqueeze(2))
        return tile
