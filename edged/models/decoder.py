"""The forward of every supported model, written once against :mod:`edged.models.operators`.

H is the hidden size, D the head's, I the MLP's, V the vocabulary's; T tokens are in the step, R rows need logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from edged.models.operators import Linear
from edged.models.weights import EMBEDDING, FINAL_NORM, HEAD, layer_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.models.architecture import Architecture
    from edged.models.operators import Operators

T = TypeVar("T")


@dataclass(frozen=True)
class DecoderLayer(Generic[T]):
    """Weights of one layer, as a back end's handles."""

    attention_norm: T  # [H]
    qkv: Linear[T]  # [(heads + 2 kv_heads) D, H]
    q_norm: T | None  # [D]
    k_norm: T | None  # [D]
    output: Linear[T]  # [H, heads D]
    mlp_norm: T  # [H]
    gate_up: Linear[T]  # [2 I, H]
    down: Linear[T]  # [H, I]


class Decoder(Generic[T]):
    """A model: its hyper-parameters and its weights.

    Args:
        architecture: The hyper-parameters.
        weights: A handle for each name of :func:`edged.models.weights.weight_specs`.
    """

    def __init__(self, architecture: Architecture, weights: Mapping[str, T]) -> None:
        self.architecture = architecture
        self.embedding = weights[EMBEDDING]  # [V, H]
        self.layers = tuple(_layer(weights, layer) for layer in range(architecture.layers))
        self.final_norm = weights[FINAL_NORM]  # [H]
        self.head = Linear(HEAD, HEAD, weights[EMBEDDING if architecture.tied else HEAD])  # [V, H]

    def forward(self, ops: Operators[T]) -> T:
        """Run one step and return the logits of its needed rows, ``[R, V]``.

        After the last layer's keys and values are stored, only the needed rows go on.
        """
        a = self.architecture
        scale = a.residual_scale
        last = len(self.layers) - 1
        hidden = ops.embedding(self.embedding, a.embedding_scale)  # [T, H]
        normed = ops.rms_norm(hidden, self.layers[0].attention_norm)  # [T, H]
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(normed, layer.qkv)  # [T, (heads + 2 kv_heads) D]
            attended = ops.attention(qkv, index, layer.q_norm, layer.k_norm)  # [T, heads D]
            if index == last:
                attended = ops.needed_rows(attended)  # [R, heads D]
                hidden = ops.needed_rows(hidden)  # [R, H]
            branch = ops.linear(attended, layer.output)  # [T, H]
            hidden, normed = ops.add_rms_norm(hidden, branch, scale, layer.mlp_norm)  # [T, H]
            activated = ops.silu_mul(ops.linear(normed, layer.gate_up))  # [T, I]
            branch = ops.linear(activated, layer.down)  # [T, H]
            following = self.final_norm if index == last else self.layers[index + 1].attention_norm
            hidden, normed = ops.add_rms_norm(hidden, branch, scale, following)  # [T, H]
        return ops.logits(normed, self.head, a.logit_divisor)  # [R, V]


def _layer(weights: Mapping[str, T], layer: int) -> DecoderLayer[T]:
    def get(part: str) -> T:
        return weights[layer_name(layer, part)]

    def maybe(part: str) -> T | None:
        return weights.get(layer_name(layer, part))

    def linear(part: str) -> Linear[T]:
        return Linear(layer_name(layer, part), part, get(part), maybe(f"{part}_bias"))

    return DecoderLayer(
        attention_norm=get("attention_norm"),
        qkv=linear("qkv"),
        q_norm=maybe("q_norm"),
        k_norm=maybe("k_norm"),
        output=linear("output"),
        mlp_norm=get("mlp_norm"),
        gate_up=linear("gate_up"),
        down=linear("down"),
    )
