"""What follows the sums of a product with packed weights, and the checkpoint's order of its rows, in plain torch."""

from __future__ import annotations

import torch

from plugins_trt.packed.tiles import rows_of_tiles


def finished(
    sums: torch.Tensor,  # [M, 16 tiles], in the order of the tiles
    outputs: int,
    bias: torch.Tensor | None,  # [outputs], of gated weights [gate; up]
    residual: torch.Tensor | None,  # [M, outputs]
    *,
    gated: bool,
) -> torch.Tensor:
    """The sums with bias and residual, or `silu(gate) * up` of gated weights: float32 `[M, outputs]`."""
    if not gated:
        out = sums[:, :outputs]
        if bias is not None:
            out = out + bias.float()
        return out if residual is None else out + residual.float()
    gate, up = sums.view(len(sums), -1, 2, 8).unbind(2)
    gate, up = (half.reshape(len(sums), -1) for half in (gate, up))
    if bias is not None:
        gate, up = gate + bias[:outputs].float(), up + bias[outputs:].float()
    return torch.nn.functional.silu(gate) * up


def places_of(outputs: int, *, gated: bool) -> torch.Tensor:
    """The row of the tiles that each output of the checkpoint lies in, int64 `[outputs]`."""
    order = torch.from_numpy(rows_of_tiles(outputs, gated=gated))  # [16 tiles]
    place = torch.empty(outputs, dtype=torch.int64)
    place[order[order >= 0]] = torch.nonzero(order >= 0)[:, 0]
    return place
