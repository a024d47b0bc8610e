"""An EAGLE draft's layer over whole sequences, with gradients, in MiniCPM4's layout of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.models.architecture import Architecture


def first_weights(a: Architecture) -> dict[str, torch.Tensor]:
    """A draft that hands the hidden state on, in MiniCPM4's layout: what is added begins near nothing."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = torch.randn(rows, columns) * (scale / columns**0.5)
        return made

    fc = torch.cat([matrix(a.hidden, a.hidden, 0.1), torch.eye(a.hidden)], 1)
    layer = "eagle_layers.0."
    return {
        "fc.weight": fc,
        "input_norm1.weight": torch.ones(a.hidden),
        "input_norm2.weight": torch.ones(a.hidden),
        f"{layer}input_layernorm.weight": torch.ones(a.hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(a.hidden),
        f"{layer}self_attn.q_proj.weight": matrix(a.q_width, a.hidden),
        f"{layer}self_attn.k_proj.weight": matrix(a.kv_width, a.hidden),
        f"{layer}self_attn.v_proj.weight": matrix(a.kv_width, a.hidden),
        f"{layer}self_attn.o_proj.weight": matrix(a.hidden, a.q_width, 0.1),
        f"{layer}mlp.gate_proj.weight": matrix(a.intermediate, a.hidden),
        f"{layer}mlp.up_proj.weight": matrix(a.intermediate, a.hidden),
        f"{layer}mlp.down_proj.weight": matrix(a.hidden, a.intermediate, 0.1),
    }


def eagle_layer(
    weights: Mapping[str, torch.Tensor],
    a: Architecture,
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    angles: torch.Tensor,
) -> torch.Tensor:
    """The draft's forward over whole sequences, ``[B, n, H]``, for its gradients."""
    layer = "eagle_layers.0."
    scale = 1.0 if a.residual_scale == 1.0 else a.residual_scale * (a.layers / (a.layers + 1)) ** 0.5

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.norm_eps) * weights[name]

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:  # [B, heads, n, D]
        product: torch.Tensor = x @ weights[f"{layer}self_attn.{name}_proj.weight"].t()
        split: torch.Tensor = product.unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
        return split

    factor = a.rope.attention_factor
    cos, sin = angles.cos() * factor, angles.sin() * factor

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = torch.cat([norm(embedded, "input_norm1.weight"), norm(hidden, "input_norm2.weight")], -1)
    x = x @ weights["fc.weight"].t()
    y = norm(x, f"{layer}input_layernorm.weight")
    q, k, v = rotate(heads(y, "q")), rotate(heads(y, "k")), heads(y, "v")
    k, v = (each.repeat_interleave(a.group, 1) for each in (k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + scale * (attended @ weights[f"{layer}self_attn.o_proj.weight"].t())
    y = norm(x, f"{layer}post_attention_layernorm.weight")
    gated = functional.silu(y @ weights[f"{layer}mlp.gate_proj.weight"].t())
    up = y @ weights[f"{layer}mlp.up_proj.weight"].t()
    out: torch.Tensor = x + scale * ((gated * up) @ weights[f"{layer}mlp.down_proj.weight"].t())
    return out
