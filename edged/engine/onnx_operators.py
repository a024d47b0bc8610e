"""The decoder's operators as nodes of an ONNX graph, which TensorRT and TensorRT-RTX import. No torch.

Tensors between operators have the graph's dtype; inside one, sums and products of norms, scales and activations are
fp32 and rounded once, as the kernels of the torch executor do it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edged.models.cuda_weights import cuda_packed
from plugins_trt.tensorrt.names import (
    ATTENTION,
    ATTENTION_VERSION,
    NAMESPACE,
    TERNARY_LINEAR,
    TERNARY_LINEAR_VERSION,
    W4A16_LINEAR,
    W4A16_LINEAR_VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.engine.onnx_nodes import OnnxNodes, Value
    from edged.models.architecture import Architecture
    from edged.models.operators import Linear
    from plugins_trt.contract import SelectionRule

ALWAYS_DENSE = (1 << 31) - 1
"""A ``dense_below`` that no position reaches."""


@dataclass(frozen=True)
class StepInputs:
    """The graph's inputs that say what a step is about. T tokens, S sequences, P pages a sequence, R needed rows."""

    token_ids: Value  # int32 [T]
    positions: Value  # int32 [T]
    sequence_starts: Value  # int32 [S + 1]
    lengths: Value  # int32 [S]
    page_tables: Value  # int32 [S, P]
    tree_masks: Value  # int32 [T, 2]
    logit_rows: Value  # int32 [R]
    rope_cosine: Value  # float32 [positions, D / 2]
    rope_sine: Value  # float32 [positions, D / 2]


class OnnxOperators:
    """:class:`edged.models.operators.Operators` that adds nodes to a graph.

    Args:
        nodes: The graph.
        architecture: The model's hyper-parameters.
        step: The step's inputs.
        dtype: Of activations and weights.
        selection: Which blocks a query attends to; None attends densely everywhere.
        head: The input that holds the LM head's weight, also where it is the embedding's.
        scales: The inputs that hold the scales of packed weights, by the weight's name.
    """

    def __init__(
        self,
        nodes: OnnxNodes,
        architecture: Architecture,
        step: StepInputs,
        *,
        dtype: str,
        selection: SelectionRule | None,
        head: Value,
        scales: Mapping[str, Value],
    ) -> None:
        self._nodes = nodes
        self._a = architecture
        self._step = step
        self._dtype = dtype
        self._selection = selection
        self._head = head
        self._scales = scales
        self._packed = {each.name: each for each in cuda_packed(architecture)}
        self._activated: set[str] = set()
        """Values that went through the activation already."""

    def embedding(self, table: Value, scale: float) -> Value:
        """``[V, H]`` to ``[T, H]``."""
        rows = self._nodes.add("Gather", [table, self._step.token_ids], table.dtype, "embedding", axis=0)
        return self._scaled(rows, scale, "embedding")

    def rms_norm(self, hidden: Value, weight: Value) -> Value:
        """``[.., H]`` to ``[.., H]``."""
        nodes, scope = self._nodes, weight.name
        x = nodes.cast(hidden, "float32", scope)
        squares = nodes.add("Mul", [x, x], "float32", scope)
        mean = nodes.add("ReduceMean", [squares, nodes.integers(-1)], "float32", scope, keepdims=1)  # [.., 1]
        shifted = nodes.add("Add", [mean, nodes.scalar(self._a.norm_eps)], "float32", scope)
        root = nodes.add("Sqrt", [shifted], "float32", scope)
        normed = nodes.add("Div", [x, root], "float32", scope)
        weighted = nodes.add("Mul", [normed, nodes.cast(weight, "float32", scope)], "float32", scope)
        return nodes.cast(weighted, self._dtype, scope)

    def add_rms_norm(self, hidden: Value, branch: Value, scale: float, weight: Value) -> tuple[Value, Value]:
        """``[.., H]`` twice."""
        nodes, scope = self._nodes, weight.name
        if scale == 1.0:
            total = nodes.add("Add", [hidden, branch], self._dtype, scope)
        else:
            x = nodes.cast(hidden, "float32", scope)
            scaled = nodes.add(
                "Mul", [nodes.cast(branch, "float32", scope), nodes.scalar(scale)], "float32", scope
            )
            total = nodes.cast(nodes.add("Add", [x, scaled], "float32", scope), self._dtype, scope)
        return total, self.rms_norm(total, weight)

    def linear(self, x: Value, layer: Linear[Value]) -> Value:
        """``[.., in]`` to ``[.., out]``; with packed weights, :meth:`silu_mul` of gate and up comes along."""
        if layer.name in self._packed:
            return self._packed_linear(x, layer)
        inputs = [x, layer.weight] if layer.bias is None else [x, layer.weight, layer.bias]
        return self._nodes.add("Gemm", inputs, self._dtype, layer.name, transB=1)

    def _packed_linear(self, x: Value, layer: Linear[Value]) -> Value:
        """One node of ours."""
        packed = self._packed[layer.name]
        kind, version = (
            (TERNARY_LINEAR, TERNARY_LINEAR_VERSION)
            if packed.ternary
            else (W4A16_LINEAR, W4A16_LINEAR_VERSION)
        )
        bias = [] if layer.bias is None else [layer.bias]
        out = self._nodes.add(
            kind,
            [x, layer.weight, self._scales[layer.name], *bias],
            self._dtype,
            layer.name,
            domain=NAMESPACE,
            plugin_version=version,
            plugin_namespace=NAMESPACE,
            weight=layer.name,
            outputs_of_row=packed.outputs,
            inputs_of_row=packed.inputs,
            group=packed.group,
            gated=int(packed.gated),
            bias=len(bias),
        )
        # Of the last layer only the needed rows go on: the rows' number has no one name.
        self._nodes.describe(out, [None, packed.outputs // 2 if packed.gated else packed.outputs])
        if packed.gated:
            self._activated.add(out.name)
        return out

    def attention(self, qkv: Value, layer: int, q_norm: Value | None, k_norm: Value | None) -> Value:
        """``[T, (heads + 2 kv_heads) D]`` to ``[T, heads D]``: one node of ours."""
        a, step, rule = self._a, self._step, self._selection
        if (q_norm is None) != (k_norm is None):
            raise ValueError(f"layer {layer}: q_norm and k_norm come together")
        norms = [] if q_norm is None else [q_norm, k_norm]
        out = self._nodes.add(
            ATTENTION,
            [
                qkv,
                step.positions,
                step.sequence_starts,
                step.lengths,
                step.page_tables,
                step.tree_masks,
                step.rope_cosine,
                step.rope_sine,
                *norms,
            ],
            self._dtype,
            f"layers.{layer}",
            domain=NAMESPACE,
            plugin_version=ATTENTION_VERSION,
            plugin_namespace=NAMESPACE,
            layer=layer,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            qk_norm=int(q_norm is not None),
            epsilon=a.norm_eps,
            dense_below=ALWAYS_DENSE if rule is None else rule.dense_below,
            init_blocks=0 if rule is None else rule.init_blocks,
            window=0 if rule is None else rule.window,
            top_k=0 if rule is None else rule.top_k,
            local_blocks=0 if rule is None else rule.local,
            lse="approximate" if rule is None else rule.lse,
        )
        self._nodes.describe(out, ["tokens", a.q_width])
        return out

    def silu_mul(self, gate_up: Value) -> Value:
        """``[.., 2 I]`` to ``[.., I]``."""
        if gate_up.name in self._activated:
            return gate_up
        nodes, scope, size = self._nodes, gate_up.name, self._a.intermediate
        gate, up = nodes.add_many(
            "Split", [gate_up, nodes.integers(size, size)], [self._dtype] * 2, scope, axis=-1
        )
        gate = nodes.cast(gate, "float32", scope)
        opened = nodes.add("Sigmoid", [gate], "float32", scope)
        activated = nodes.add("Mul", [gate, opened], "float32", scope)
        product = nodes.add("Mul", [activated, nodes.cast(up, "float32", scope)], "float32", scope)
        return nodes.cast(product, self._dtype, scope)

    def needed_rows(self, x: Value) -> Value:
        """``[T, ..]`` to ``[R, ..]``."""
        return self._nodes.add("Gather", [x, self._step.logit_rows], x.dtype, f"{x.name}.needed", axis=0)

    def logits(self, hidden: Value, head: Linear[Value], divisor: float) -> Value:
        """``[R, H]`` to ``[R, V]``, fp32."""
        head = replace(head, weight=self._head)
        logits = self.linear(self._scaled(hidden, 1.0 / divisor, head.name), head)
        return self._nodes.cast(logits, "float32", head.name)

    def _scaled(self, x: Value, scale: float, scope: str) -> Value:
        """``scale * x``, rounded once."""
        if scale == 1.0:
            return x
        wide = self._nodes.cast(x, "float32", scope)
        scaled = self._nodes.add("Mul", [wide, self._nodes.scalar(scale)], "float32", scope)
        return self._nodes.cast(scaled, x.dtype, scope)
