"""`edged::Attention`: one layer's append, selection and attention as a TensorRT node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from plugins_trt.contract import (
    ELEMENT_BYTES,
    Batch,
    DeviceArray,
    SelectionRule,
    check_at_least,
    check_heads,
)
from plugins_trt.tensorrt.names import ATTENTION, ATTENTION_VERSION
from plugins_trt.tensorrt.operator import PluginOperator, Port
from plugins_trt.tensorrt.sessions import AttentionCall, session_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALWAYS_DENSE = (1 << 31) - 1


@dataclass(frozen=True)
class AttentionOperator(PluginOperator):
    """Fields of the node.

    Attributes:
        layer: Index into the arena.
        heads: Query heads.
        kv_heads: Key (and value) heads.
        head_dim: Elements of a head.
        qk_norm: 1 if queries and keys are normed a head; two more inputs then hold the weights.
        epsilon: Of that norm.
        dense_below: A query below this position attends densely; 2^31 - 1: everywhere.
        init_blocks: First blocks that are always attended.
        window: Local window in tokens.
        top_k: Blocks chosen by score.
        local_blocks: Blocks, the query's own the last of them, that are always attended.
        lse: Where the softmax over compressed keys takes its maximum and sum: approximate or exact.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: int
    epsilon: float
    dense_below: int
    init_blocks: int
    window: int
    top_k: int
    local_blocks: int
    lse: str

    NAME: ClassVar[str] = ATTENTION
    VERSION: ClassVar[str] = ATTENTION_VERSION
    TYPE_VARIABLES: ClassVar[Mapping[str, tuple[str, ...]]] = {"$element": ("float16", "bfloat16")}

    def __post_init__(self) -> None:
        """Refuse what the kernels do not take.

        Raises:
            LaunchError: Naming the field.
        """
        check_at_least("layer", self.layer, 0)
        check_heads(self.heads, self.kv_heads, self.head_dim)
        if self.qk_norm not in (0, 1):
            raise ValueError(f"qk_norm: {self.qk_norm}, must be 0 or 1")
        if self.selection is not None:
            check_at_least("local_blocks", self.local_blocks, 1)

    @property
    def selection(self) -> SelectionRule | None:
        """Which blocks a query attends to; None where every query is dense."""
        if self.dense_below == ALWAYS_DENSE:
            return None
        return SelectionRule(
            init_blocks=self.init_blocks,
            window=self.window,
            top_k=self.top_k,
            dense_below=self.dense_below,
            lse=self.lse,
            local_blocks=self.local_blocks,
        )

    @property
    def title(self) -> str:
        """With the layer: every layer has such a node."""
        return f"edged::{self.NAME} (layer {self.layer})"

    @property
    def inputs(self) -> tuple[Port, ...]:
        """T tokens, S sequences, P pages a sequence."""
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        element, half = ("$element",), self.head_dim // 2
        ports = [
            Port("qkv", element, ("T", width)),
            Port("positions", ("int32",), ("T",)),
            Port("sequence_starts", ("int32",), ("S+1",)),
            Port("lengths", ("int32",), ("S",)),
            Port("page_tables", ("int32",), ("S", "P")),
            Port("tree_masks", ("int32",), ("T", 2)),
            Port("rope_cosine", ("float32",), ("max_positions", half)),
            Port("rope_sine", ("float32",), ("max_positions", half)),
        ]
        if self.qk_norm:
            ports += [Port(name, element, (self.head_dim,)) for name in ("q_norm", "k_norm")]
        return tuple(ports)

    @property
    def outputs(self) -> tuple[Port, ...]:
        """What each token attended to, all heads side by side."""
        return (Port("attended", ("$element",), ("T", self.heads * self.head_dim)),)

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:  # noqa: ARG002
        """None of TensorRT's: scratch lies beside the pages, where the ledger planned it."""
        return 0

    def enqueue(
        self, inputs: Sequence[DeviceArray], outputs: Sequence[DeviceArray], workspace: int, stream: int
    ) -> None:
        """Append, select and attend: the session's kernels on this node's memory.

        Raises:
            SessionError: No executor runs on this stream.
            LaunchError: The kernels refuse an argument.
        """
        del workspace
        session = session_of(stream)
        arrays = {port.name: array for port, array in zip(self.inputs, inputs, strict=True)}
        qkv, out = arrays["qkv"], outputs[0]
        tokens = qkv.shape[0]
        batch = Batch(
            sequence_starts=arrays["sequence_starts"],
            lengths=arrays["lengths"],
            page_tables=arrays["page_tables"],
            positions=arrays["positions"],
            # Two halves in the graph, one word in the kernels.
            tree_masks=DeviceArray(arrays["tree_masks"].pointer, "int64", (tokens,))
            if session.tree
            else None,
        )
        first_key = self.heads
        first_value = self.heads + self.kv_heads
        session.attend(
            AttentionCall(
                layer=self.layer,
                batch=batch,
                q=self._heads_of(qkv, 0, self.heads),
                k=self._heads_of(qkv, first_key, self.kv_heads),
                v=self._heads_of(qkv, first_value, self.kv_heads),
                cosine=arrays["rope_cosine"],
                sine=arrays["rope_sine"],
                q_norm=arrays.get("q_norm"),
                k_norm=arrays.get("k_norm"),
                epsilon=self.epsilon,
                selection=self.selection,
                out=DeviceArray(out.pointer, out.dtype, (tokens, self.heads, self.head_dim)),
            )
        )

    def _heads_of(self, qkv: DeviceArray, first: int, count: int) -> DeviceArray:
        """Some heads of the fused projection: ``[T, count, D]``."""
        offset = first * self.head_dim * ELEMENT_BYTES[qkv.dtype]
        return DeviceArray(
            qkv.pointer + offset,
            qkv.dtype,
            (qkv.shape[0], count, self.head_dim),
            (qkv.shape[1], self.head_dim, 1),
        )
