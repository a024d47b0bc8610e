"""An EAGLE draft's layer over whole sequences, with gradients, in MiniCPM4's layout of weights.

It runs level by level as a tree is drafted (training-time test: EAGLE-3, arXiv 2503.01840, section 3.2; HASS, 2408.15766): on
level 1 a row sees the target's hidden states, on each further level the draft's own output of the level above at the row
before it. A row of level d attends to rows of level 1 up to the d-th before it, and to one row of each level between: those
are its ancestors in a tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.models.architecture import Architecture

_LAYER = "eagle_layers.0."


def first_weights(a: Architecture) -> dict[str, torch.Tensor]:
    """A draft that hands the hidden state on, in MiniCPM4's layout: what is added begins near nothing."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = torch.randn(rows, columns) * (scale / columns**0.5)
        return made

    fc = torch.cat([matrix(a.hidden, a.hidden, 0.1), torch.eye(a.hidden)], 1)
    return {
        "fc.weight": fc,
        "input_norm1.weight": torch.ones(a.hidden),
        "input_norm2.weight": torch.ones(a.hidden),
        f"{_LAYER}input_layernorm.weight": torch.ones(a.hidden),
        f"{_LAYER}post_attention_layernorm.weight": torch.ones(a.hidden),
        f"{_LAYER}self_attn.q_proj.weight": matrix(a.q_width, a.hidden),
        f"{_LAYER}self_attn.k_proj.weight": matrix(a.kv_width, a.hidden),
        f"{_LAYER}self_attn.v_proj.weight": matrix(a.kv_width, a.hidden),
        f"{_LAYER}self_attn.o_proj.weight": matrix(a.hidden, a.q_width, 0.1),
        f"{_LAYER}mlp.gate_proj.weight": matrix(a.intermediate, a.hidden),
        f"{_LAYER}mlp.up_proj.weight": matrix(a.intermediate, a.hidden),
        f"{_LAYER}mlp.down_proj.weight": matrix(a.hidden, a.intermediate, 0.1),
    }


class EagleLevels:
    """The levels of one batch of sequences.

    Args:
        weights: The draft's, by their names in MiniCPM4's layout.
        a: The target's hyper-parameters.
        embedded: Scaled embeddings of the token after each row's position, ``[B, n, H]``.
        angles: Of the rotary embedding by row, fp32 ``[n, D / 2]``.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        a: Architecture,
        embedded: torch.Tensor,
        angles: torch.Tensor,
    ) -> None:
        self._w, self._a = weights, a
        self._scale = (
            1.0 if a.residual_scale == 1.0 else a.residual_scale * (a.layers / (a.layers + 1)) ** 0.5
        )
        self._embedded = self._norm(embedded, "input_norm1.weight")
        factor = a.rope.attention_factor
        self._cos, self._sin = angles.cos() * factor, angles.sin() * factor
        self._keys: list[torch.Tensor] = []  # of each level, [B, heads, n, D]
        self._values: list[torch.Tensor] = []
        count = angles.shape[0]
        places = torch.arange(count, device=angles.device)
        self._distance = places[:, None] - places  # [n, n]

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next level.

        Args:
            hidden: What each row sees as the hidden state of its position, ``[B, n, H]``: the target's on level 1, and
                :meth:`shifted` outputs below. The first rows of deeper levels have no ancestors; what they give is to be
                left out.

        Returns:
            The layer's outputs, ``[B, n, H]``.
        """
        w, scale = self._w, self._scale
        x = torch.cat([self._embedded, self._norm(hidden, "input_norm2.weight")], -1)
        x = functional.linear(x, w["fc.weight"]).float()
        y = self._norm(x, f"{_LAYER}input_layernorm.weight")
        q, k, v = self._rotated(self._heads(y, "q")), self._rotated(self._heads(y, "k")), self._heads(y, "v")
        k, v = (each.repeat_interleave(self._a.group, 1) for each in (k, v))
        self._keys.append(k)
        self._values.append(v)
        attended = self._attended(q).transpose(1, 2).flatten(2)
        x = x + scale * functional.linear(attended, w[f"{_LAYER}self_attn.o_proj.weight"])
        y = self._norm(x, f"{_LAYER}post_attention_layernorm.weight")
        gated = functional.silu(functional.linear(y, w[f"{_LAYER}mlp.gate_proj.weight"]))
        up = functional.linear(y, w[f"{_LAYER}mlp.up_proj.weight"])
        out: torch.Tensor = x + scale * functional.linear(gated * up, w[f"{_LAYER}mlp.down_proj.weight"])
        return out

    @staticmethod
    def shifted(out: torch.Tensor) -> torch.Tensor:
        """Outputs as the next level's hidden states: each row has that of the row before it, the first one zeros."""
        return functional.pad(out[:, :-1], (0, 0, 1, 0))

    def _attended(self, q: torch.Tensor) -> torch.Tensor:
        """``[B, heads, n, D]`` of the level whose keys came last."""
        depth = len(self._keys)
        if depth == 1:
            return functional.scaled_dot_product_attention(q, self._keys[0], self._values[0], is_causal=True)
        root = q @ self._keys[0].transpose(2, 3)  # [B, heads, n, n]
        root = root.masked_fill(self._distance < depth - 1, -torch.inf)
        # The row of level e that is an ancestor stands depth - e rows before.
        keys, values = (
            [functional.pad(each, (0, 0, back, 0))[:, :, : q.shape[2]] for back, each in _backwards(found)]
            for found in (self._keys, self._values)
        )
        between = torch.stack([(q * each).sum(-1) for each in keys], -1)  # [B, heads, n, depth - 1]
        scores = torch.cat([root, between], -1).float() / self._a.head_dim**0.5
        weights = scores.softmax(-1).to(q.dtype)
        near, far = weights[..., -len(keys) :], weights[..., : -len(keys)]
        attended: torch.Tensor = far @ self._values[0]
        for index, each in enumerate(values):
            attended = attended + near[..., index : index + 1] * each
        return attended

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self._w[name], self._a.norm_eps)

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """``[B, heads, n, D]``."""
        product = functional.linear(x, self._w[f"{_LAYER}self_attn.{name}_proj.weight"])
        split: torch.Tensor = product.unflatten(-1, (-1, self._a.head_dim)).transpose(1, 2)
        return split

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        turned = torch.cat(
            [first * self._cos - second * self._sin, second * self._cos + first * self._sin], -1
        )
        return turned.to(x.dtype)


def _backwards(found: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """The levels below the first one, with how many rows before a row of the last one its ancestor stands."""
    depth = len(found)
    return [(depth - level, each) for level, each in enumerate(found[1:], 2)]
