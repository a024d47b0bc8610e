"""The operators that the decoder is written against.

A back end gives each operator and the meaning of a tensor handle ``T``: the torch back end computes, an emitter adds a
node to a graph. Handles are opaque to the decoder; shapes in the comments are logical. T stands for the tokens of the
step, R for the rows whose logits are needed, H for the hidden size.

What a step is about (positions, sequence boundaries, page tables, needed rows) is the back end's, not an argument: the
decoder is the same for every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Linear(Generic[T]):
    """``y = x @ weight.T + bias`` with a name that says which one it is (``layers.3.qkv``)."""

    name: str
    part: str
    """``qkv``, ``output``, ``gate_up``, ``down`` or ``head``."""
    weight: T  # [out, in]
    bias: T | None = None  # [out]


class Operators(Protocol[T]):
    """One step's worth of operators. Results may lie in buffers that a later call of the same operator reuses."""

    def embedding(self, table: T, scale: float) -> T:
        """Rows of ``table`` ``[V, H]`` for the step's token ids, times ``scale``: ``[T, H]``."""

    def rms_norm(self, hidden: T, weight: T) -> T:
        """``hidden / sqrt(mean(hidden ** 2) + eps) * weight`` over the last dimension: ``[.., H]``."""

    def add_rms_norm(self, hidden: T, branch: T, scale: float, weight: T) -> tuple[T, T]:
        """``hidden + scale * branch`` and its :meth:`rms_norm`; ``hidden`` is not used afterwards."""

    def linear(self, x: T, layer: Linear[T]) -> T:
        """``[.., in]`` to ``[.., out]``."""

    def attention(self, qkv: T, layer: int, q_norm: T | None, k_norm: T | None) -> T:
        """Append to a layer's pages and attend: ``[T, (heads + 2 kv_heads) * D]`` to ``[T, heads * D]``.

        q and k are normed a head (:meth:`rms_norm` with these weights ``[D]``, where given) and rotated to their
        positions; k and v are stored in the pages; each query attends causally to everything its sequence has stored.
        """

    def silu_mul(self, gate_up: T) -> T:
        """``silu(gate) * up`` of ``[gate; up]``: ``[.., 2 I]`` to ``[.., I]``."""

    def needed_rows(self, x: T) -> T:
        """The rows whose logits are needed: ``[T, ..]`` to ``[R, ..]``."""

    def logits(self, hidden: T, head: Linear[T], divisor: float) -> T:
        """The LM head on ``hidden / divisor``: ``[R, H]`` to ``[R, V]``."""
