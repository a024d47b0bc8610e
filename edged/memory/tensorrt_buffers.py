"""What the TensorRT executor holds on a GPU beside the weights.

Activations and the scratch memory of layers are the engine's: one block for all its execution contexts, as large as the
build said. Before there is an engine, that is estimated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.memory.cuda_buffers import (
    StepLayout,
    attention_workspace,
    bucket_sizes,
    kv_buffers,
    logit_rows,
)
from edged.memory.sample_buffers import sample_buffers
from edged.memory.specs import ACTIVATIONS, ELEMENT_BYTES, ENGINE, LOGITS, PAGE_TOKENS, BufferSpec
from edged.models.cuda_weights import cuda_packed
from plugins_trt.contract import round_up
from plugins_trt.tensorrt.linear_plugins import packed_workspace

if TYPE_CHECKING:
    from edged.memory.buffers import ModelPlan

CONTEXT = "engine_context"
"""Name of the block that all execution contexts share."""

CONTEXT_ALIGNMENT = 256

_PRODUCTS = 9 << 20
"""What TensorRT-RTX keeps for its own products, in the smallest model too (8 MiB)."""


def tensorrt_step_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """Pages, compressed keys, the engine's block, scratch of attention, a step's data, logits."""
    a = plan.architecture
    sizes = bucket_sizes(plan)
    rows = logit_rows(plan, sizes[-1])
    positions = plan.pages_per_sequence * PAGE_TOKENS
    workspace = max(attention_workspace(plan, size) for size in sizes)
    return (
        *kv_buffers(plan),
        BufferSpec("rope_cosine", ACTIVATIONS, (positions, a.head_dim // 2), "float32"),
        BufferSpec("rope_sine", ACTIVATIONS, (positions, a.head_dim // 2), "float32"),
        BufferSpec("step", ACTIVATIONS, (StepLayout.of(plan).words,), "int32"),
        BufferSpec("tree_masks", ACTIVATIONS, (sizes[-1], 2), "int32"),
        BufferSpec("attention_workspace", ACTIVATIONS, (round_up(workspace, 16),), "uint8"),
        BufferSpec("arrived", ACTIVATIONS, (plan.max_sequences, a.kv_heads), "int32"),
        BufferSpec(CONTEXT, ENGINE, (round_up(context_bytes(plan), CONTEXT_ALIGNMENT),), "uint8"),
        BufferSpec("logits", LOGITS, (rows, a.vocabulary), "float32"),
        BufferSpec("drawn", LOGITS, (rows,), "int32"),
        *sample_buffers(plan, rows, rows),
    )


def context_bytes(plan: ModelPlan) -> int:
    """Bytes that the engine's contexts need: what its build said, or an estimate."""
    return estimated_context_bytes(plan) if plan.engine_bytes is None else plan.engine_bytes


def estimated_context_bytes(plan: ModelPlan) -> int:
    """Every tensor between two products of a layer, once, as if none shared its place; logits; scratch of products.

    For the models of bench/build.py that is 10 to 40 % above what their builds say.
    """
    a, size = plan.architecture, ELEMENT_BYTES[plan.dtype]
    packed = cuda_packed(a)
    gated = any(each.gated for each in packed)
    width = 3 * a.hidden + a.qkv_width + a.q_width + (1 if gated else 3) * a.intermediate
    rows = logit_rows(plan, bucket_sizes(plan)[-1])
    scratch = max(
        (packed_workspace(each.outputs, each.inputs, ternary=each.ternary) for each in packed), default=0
    )
    return bucket_sizes(plan)[-1] * width * size + rows * a.vocabulary * size + scratch + _PRODUCTS
