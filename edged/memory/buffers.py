"""Every buffer that an executor holds for its life: computed from the plan alone, allocated from the same list.

The ledger adds these up and the executor makes exactly these, so that what is planned is what is held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edged.engine.selection import selection_of
from edged.memory.cuda_buffers import cuda_step_buffers
from edged.memory.cuda_draft import check_cuda_draft, cuda_draft_buffers
from edged.memory.cuda_limits import check_cuda_plan
from edged.memory.draft_plan import DraftPlan
from edged.memory.specs import (
    ACTIVATIONS,
    COMPRESSED_KEYS,
    ELEMENT_BYTES,
    ENGINE,
    KV_NAMES,
    KV_PAGES,
    KV_TYPES,
    LOGITS,
    PAGE_TOKENS,
    QUANTIZED_STORAGE,
    TENSORRT,
    WEIGHTS,
    BufferSpec,
)
from edged.memory.tensorrt_buffers import tensorrt_step_buffers
from edged.models.cuda_weights import cuda_weight_parts
from edged.models.weights import weight_parts, weight_specs
from plugins_trt.arena import COARSE_SLOTS, FINE_SLOTS

if TYPE_CHECKING:
    from edged.config import ModelConfig
    from edged.models.architecture import Architecture
    from plugins_trt.contract import SelectionRule

__all__ = [
    "ACTIVATIONS",
    "COMPRESSED_KEYS",
    "ELEMENT_BYTES",
    "ENGINE",
    "HISTORY_TILE",
    "KV_NAMES",
    "KV_PAGES",
    "LOGITS",
    "NARROW_TOKENS",
    "PAGE_TOKENS",
    "SHARPENED",
    "SPARSE_QUERIES",
    "TENSORRT",
    "WEIGHTS",
    "WEIGHT_TILE",
    "BufferSpec",
    "ModelPlan",
    "draft_buffers",
    "step_buffers",
    "weight_buffers",
]

HISTORY_TILE = 1024
"""Tokens of scattered (or converted) history that attention looks at in one piece."""

WEIGHT_TILE = 1 << 20
"""Elements of a half-precision weight that are widened to fp32 at a time (4 MiB, which stays in the caches); or, of twice as
many, what is multiplied in half precision."""

PACKED_TILE = 1 << 18
"""4-bit weights that are widened at a time, half of them in each of two products."""

SHARPENED = 64
"""Logits a row that a narrow product computes again in fp32."""

SPARSE_QUERIES = 8
"""Sparse queries that are looked at together on the CPU."""

MOST_LOGIT_ROWS = 64
"""Rows of logits of trees that lie side by side on the CPU; more come in turn."""

NARROW_TOKENS = 2
"""Up to this many rows may multiply half-precision weights as vectors, one after the other."""


@dataclass(frozen=True)
class ModelPlan:
    """What the memory of one loaded model depends on."""

    architecture: Architecture
    dtype: str
    """Type of weights, and of KV unless ``kv_dtype`` says another: float32, bfloat16, float16, or float64 (tests)."""
    context_length: int
    max_sequences: int
    prefill_chunk: int
    executor: str = "torch"
    device: str = "cpu"
    selection: SelectionRule | None = None
    """Which blocks sparse attention visits; None: it is dense."""
    max_step_tokens: int | None = None
    """Most tokens of a step; None: whatever a chunk and the sequences make."""
    host_kv: int = 0
    """Bytes of host memory for the pages of suspended sequences."""
    tree_size: int = 1
    """Most tokens that a sequence brings to a step that verifies drafts."""
    draft: DraftPlan | None = None
    """The draft model beside it."""
    kv_dtype: str | None = None
    """Type of keys and values: one of dtype's kind, int8 or float8_e4m3fn; None: dtype."""
    engine_bytes: int | None = None
    """Device memory of a TensorRT engine's contexts, as its build said; None before there is an engine."""

    @classmethod
    def of(cls, config: ModelConfig, architecture: Architecture) -> ModelPlan:
        """The plan of a configured model (``executor: auto`` is torch until there is another).

        Raises:
            CheckpointError: The model's ``sparse_config`` is refused.
            ConfigError: The numbers of ``attention`` contradict each other.
            UnsupportedError: The model does not run on its device.
        """
        plan = cls(
            architecture=architecture,
            dtype=config.dtype,
            context_length=config.context_length,
            max_sequences=config.max_sequences,
            prefill_chunk=config.prefill_chunk,
            executor="torch" if config.executor == "auto" else config.executor,
            device=config.device,
            selection=selection_of(config.path, config.attention),
            max_step_tokens=config.max_step_tokens,
            host_kv=config.host_kv,
            tree_size=config.speculation.most_nodes,
            draft=DraftPlan.of(config, architecture),
            kv_dtype=KV_TYPES.get(config.kv_dtype),
        )
        if plan.device == "cuda":
            check_cuda_plan(config.name, plan)
            if plan.draft is not None:
                check_cuda_draft(config.name, plan)
        if plan.executor == TENSORRT:
            from edged.engine.planned import planned_context_bytes  # noqa: PLC0415 - ONNX, which others need not

            plan = replace(plan, engine_bytes=planned_context_bytes(config))
        return plan

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence, with a tree behind its last token."""
        return -(-(self.context_length + self.tree_size - 1) // PAGE_TOKENS)

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.max_sequences * self.pages_per_sequence

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step: a prefill chunk beside a token of each sequence, unless the plan allows fewer."""
        most = self.prefill_chunk + self.max_sequences
        return (
            most if self.max_step_tokens is None else max(min(most, self.max_step_tokens), self.max_sequences)
        )

    @property
    def quantized_kv(self) -> str | None:
        """Type of keys and values that are stored in eight bits with scales; None where they are not."""
        return self.kv_dtype if self.kv_dtype in QUANTIZED_STORAGE else None

    @property
    def stored_kv(self) -> str:
        """Type that buffers of keys and values have."""
        return QUANTIZED_STORAGE.get(self.kv_dtype or "", self.kv_dtype or self.dtype)

    @property
    def compressed_dtype(self) -> str:
        """Type of compressed keys: that of keys, or dtype where these are quantized."""
        return self.dtype if self.quantized_kv else self.stored_kv

    @property
    def logit_rows(self) -> int:
        """Rows of logits that are computed together on the CPU."""
        return max(self.max_sequences, min(self.max_sequences * self.tree_size, MOST_LOGIT_ROWS))

    @property
    def compute_dtype(self) -> str:
        """Type of activations: on the CPU half-precision weights compute in fp32, on a GPU as they are."""
        if self.device == "cuda":
            return self.dtype
        return "float64" if self.dtype == "float64" else "float32"


def draft_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """The draft model's weights, and its keys and values; nothing where there is none."""
    if plan.draft is None:
        return ()
    if plan.device == "cuda":
        return cuda_draft_buffers(plan, plan.draft)
    return plan.draft.buffers(plan.dtype, plan.max_sequences, plan.step_tokens)


def weight_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """The weights: matrices in the plan's dtype, vectors (norms, biases) in the type that activations have.

    A packed matrix keeps its own types whatever the plan says (:func:`edged.models.weights.weight_parts`, on a GPU
    :func:`edged.models.cuda_weights.cuda_weight_parts`).
    """
    parts_of = cuda_weight_parts if plan.device == "cuda" else weight_parts
    return tuple(
        BufferSpec(
            part.name,
            WEIGHTS,
            part.shape,
            part.dtype or (plan.dtype if len(part.shape) > 1 else plan.compute_dtype),
        )
        for spec in weight_specs(plan.architecture)
        for part in parts_of(spec)
    )


def step_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """Everything else that an executor holds: pages, activations, scratch, logits."""
    if plan.executor == TENSORRT:
        return tensorrt_step_buffers(plan)
    return cuda_step_buffers(plan) if plan.device == "cuda" else _cpu_step_buffers(plan)


def _cpu_step_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """On the CPU. T is the most tokens of a step, S the most sequences."""
    a = plan.architecture
    tokens, compute, stored, kv = plan.step_tokens, plan.compute_dtype, plan.dtype, plan.stored_kv
    all_heads = a.heads + 2 * a.kv_heads

    def flat(name: str, width: int, dtype: str = compute, rows: int = tokens) -> BufferSpec:
        return BufferSpec(name, ACTIVATIONS, (rows * width,), dtype)

    buffers = [
        BufferSpec(
            "kv",
            KV_PAGES,
            (a.layers, 2 * a.kv_heads, plan.pages * PAGE_TOKENS, a.head_dim),
            kv,
        ),
        flat("token_ids", 1, "int64"),
        flat("slots", 1, "int64"),
        flat("needed", 1, "int64"),
        # In fp32 whatever the rest computes in: that is how the published models were trained.
        flat("positions", 1, "float32"),
        flat("angles", a.head_dim // 2, "float32"),
        flat("cos", a.head_dim // 2),
        flat("sin", a.head_dim // 2),
        flat("norm_scale", a.heads + a.kv_heads),
        flat("embedded", a.hidden, stored),
        flat("hidden", a.hidden),
        flat("normed", a.hidden),
        flat("qkv", a.qkv_width),
        flat("rotated", all_heads * a.head_dim),
        flat("attended", a.q_width),
        flat("branch", a.hidden),
        flat("gate_up", 2 * a.intermediate),
        flat("activated", a.intermediate),
        flat("needed_hidden", a.hidden),
        flat("needed_attended", a.q_width),
        flat("history_pages", 1, "int64", rows=HISTORY_TILE // PAGE_TOKENS),
        flat("history", 2 * a.kv_width, kv, rows=HISTORY_TILE),
        BufferSpec("logits", LOGITS, (plan.logit_rows * a.vocabulary,), compute),
    ]
    if stored in ("bfloat16", "float16"):
        widest_in = max(a.hidden, a.q_width, a.intermediate)
        buffers.append(flat("weight_tile", max(WEIGHT_TILE, SHARPENED * widest_in), rows=1))
    if plan.selection is not None:
        arena = (a.layers, plan.pages, a.kv_heads)
        compressed = plan.compressed_dtype
        buffers += [
            BufferSpec("fine", COMPRESSED_KEYS, (*arena, FINE_SLOTS, a.head_dim), compressed),
            BufferSpec("coarse", COMPRESSED_KEYS, (*arena, COARSE_SLOTS, a.head_dim), compressed),
        ]
    if a.quantization is not None:
        inputs = max(a.hidden, a.q_width, a.intermediate)
        half = max(PACKED_TILE, inputs) // 2
        buffers += [
            flat("packed_in", inputs),
            flat("packed_tile", half, rows=1),
            flat("packed_octets", half, "uint8", rows=1),
        ]
    if kv in ("bfloat16", "float16"):
        buffers.append(flat("stored_heads", all_heads * a.head_dim, kv))
    if plan.quantized_kv:
        slots = (a.layers, 2 * a.kv_heads, plan.pages * PAGE_TOKENS)
        buffers += [
            BufferSpec("kv_scales", KV_PAGES, slots, "float16"),
            flat("history_scales", 2 * a.kv_heads, "float16", rows=HISTORY_TILE),
        ]
    if kv == "float16" or plan.quantized_kv:
        buffers.append(flat("wide_history", 2 * a.kv_width, compute, rows=HISTORY_TILE))
    return tuple(buffers)
