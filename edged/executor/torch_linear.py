"""Linear layers on the CPU: the fastest product that torch has here for each dtype, shape and number of rows.

What is fastest is measured when the model is loaded (:mod:`edged.executor.torch_choice`), among the ways of
:mod:`edged.executor.torch_products`: fp32 by MKL in one product or many, or by oneDNN; bfloat16 as it is, where the CPU has
instructions for it, or widened to fp32. 4-bit and ternary weights have products of their own
(:mod:`edged.executor.torch_packed`, :mod:`edged.executor.torch_ternary`), whatever the plan's dtype is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.executor.torch_choice import BY_ROWS, ONEDNN, Choice
from edged.executor.torch_packed import PackedProduct, PackedWeight
from edged.executor.torch_ternary import TernaryProduct, TernaryWeight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from edged.executor.torch_views import LinearViews
    from edged.models.operators import Linear


class CpuLinear:
    """Runs the linears of one model.

    Args:
        linears: Every linear of the model.
        buffers: The flat buffers; ``weight_tile`` is there when weights are half precision, ``packed_in``,
            ``packed_tile`` and ``packed_octets`` when some are in 4 bits.
        packed: The weights that are in 4 bits or ternary, by the linear's name.
    """

    def __init__(
        self,
        linears: Sequence[Linear[torch.Tensor]],
        buffers: Mapping[str, torch.Tensor],
        packed: Mapping[str, PackedWeight | TernaryWeight] | None = None,
    ) -> None:
        self._packed = packed or {}
        self._choice = Choice(
            [layer for layer in linears if layer.name not in self._packed], buffers.get("weight_tile")
        )
        self.wants_rows = not self._packed and self._choice.many in (ONEDNN, BY_ROWS)
        """Whether results of many rows should lie row by row."""
        self.wants_narrow = not self._packed and self._choice.many == BY_ROWS
        """And what only products read of many rows should be bfloat16."""
        if self._packed:
            scratch = (buffers["packed_in"], buffers["packed_tile"], buffers["packed_octets"])
            self._packed_product = PackedProduct(*scratch)
            self._ternary_product = TernaryProduct(*scratch)

    def ways(self, layer: Linear[torch.Tensor]) -> tuple[str, ...]:
        """The way of a linear that is not packed for each class of rows."""
        return tuple(chosen.way for chosen in self._choice.chosen[layer.name])

    def __call__(self, views: LinearViews, layer: Linear[torch.Tensor]) -> torch.Tensor:
        """``x @ weight.T + bias`` of the views' input into their output: ``[rows, in]`` to ``[rows, out]``.

        Of a narrow product's logits the largest are those of fp32.
        """
        out = views.out
        packed = self._packed.get(layer.name)
        if isinstance(packed, TernaryWeight):
            self._ternary_product(views.x, packed, out)
        elif packed is not None:
            self._packed_product(views.x, packed, out)
        else:
            chosen = self._choice.chosen[layer.name][views.row_class]
            chosen.product(views, chosen.weight)
        if layer.bias is not None:
            out.add_(layer.bias)
        return out

    def gated(self, views: LinearViews, layer: Linear[torch.Tensor], activated: torch.Tensor) -> None:
        """``silu(x @ gate.T) * (x @ up.T)`` of many rows as bfloat16, rounded where torch's own layers round.

        Args:
            views: Input, ``[rows, in]``; the output is not written.
            layer: Gate and up, ``[2 I, in]``, without a bias.
            activated: ``[rows, I]``, bfloat16, where the result goes.
        """
        self._choice.tiles.gated(views, layer.weight, activated)
