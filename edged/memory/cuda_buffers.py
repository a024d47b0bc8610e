"""What the torch executor holds on a GPU: the buckets of its steps, the data a step brings, and every buffer.

Sizes must be known where there is no GPU (the daemon loads no CUDA runtime), so scratch memory is planned for the most
multiprocessors that any supported device has; the executor checks that its device has no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.memory.cuda_draft import TAKEN, hidden_rows
from edged.memory.packed_scratch import MULTIPROCESSORS, product_workspace
from edged.memory.sample_buffers import sample_buffers
from edged.memory.specs import (
    ACTIVATIONS,
    COMPRESSED_KEYS,
    KV_PAGES,
    LOGITS,
    PAGE_TOKENS,
    TENSORRT,
    BufferSpec,
)
from edged.models.cuda_weights import cuda_packed
from plugins_trt.arena import COARSE_SLOTS, FINE_SLOTS
from plugins_trt.attention.contract import Layout
from plugins_trt.contract import MAX_DECODE, MAX_TREE, Bucket, ceil_div, round_up
from plugins_trt.packed.product import OCTET
from plugins_trt.w4a16_linear.contract import MAX_ROWS

if TYPE_CHECKING:
    from edged.memory.buffers import ModelPlan
    from edged.models.cuda_weights import CudaPacked

LARGEST_POWER = 2048
"""Up to here buckets are powers of two; one more takes the longest step, if that is longer."""

WIDE_TILE = 1 << 25
"""Elements of a packed weight that are widened at a time for steps of many tokens (64 MiB)."""

UNREAD_FINE, UNREAD_COARSE = "unread_fine", "unread_coarse"
"""Where compressed keys go that nobody reads."""

_ALIGNMENT, _TENSORRT_ALIGNMENT = 4, 64
"""Words that the starts of the parts of a step's data are multiples of: 16 bytes, and the 256 that TensorRT asks of a
tensor's address."""


def bucket_sizes(plan: ModelPlan) -> tuple[int, ...]:
    """Tokens of each captured step: 1, 2, 4 … 2048, as far as the plan's steps reach, and the longest step itself."""
    sizes = []
    size = 1
    while size <= LARGEST_POWER and size < plan.step_tokens:
        sizes.append(size)
        size *= 2
    longest = size if size <= MAX_DECODE else round_up(plan.step_tokens, 16)
    return (*sizes, longest)


def logit_rows(plan: ModelPlan, tokens: int) -> int:
    """Rows of logits that a bucket of ``tokens`` computes: one for each sequence that can be in it."""
    rows = 1
    while rows < plan.max_sequences:
        rows *= 2
    return min(tokens, rows)


def tree_sizes(plan: ModelPlan) -> tuple[int, ...]:
    """Tokens of each captured step of trees: the buckets from 2 tokens on, as far as the sequences' trees reach.

    A step of one token a sequence has no tree, and attention takes no more than 64 nodes of all sequences together.
    """
    if plan.tree_size == 1 or plan.executor == TENSORRT:
        return ()
    most = min(plan.max_sequences * plan.tree_size, MAX_DECODE)
    sizes = [size for size in bucket_sizes(plan) if size <= MAX_DECODE]
    return tuple(size for size in sizes if 1 < size < 2 * most)


def most_tree_tokens(plan: ModelPlan) -> int:
    """Most tokens of a step that brings trees; where none are captured, one for each sequence, which is no tree."""
    return min(max(tree_sizes(plan), default=plan.max_sequences), plan.step_tokens)


def most_logit_rows(plan: ModelPlan) -> int:
    """Rows of logits of any captured step: every node of a tree has one."""
    return max(logit_rows(plan, bucket_sizes(plan)[-1]), *tree_sizes(plan), 0)


def has_dense_graph(plan: ModelPlan, tokens: int) -> bool:
    """Whether a bucket is captured a second time for steps without sparse queries: where launches are what costs."""
    return plan.selection is not None and plan.selection.dense_below > 1 and tokens <= MAX_DECODE


def has_sparse_graph(plan: ModelPlan) -> bool:
    """Whether a bucket of trees is captured once more for steps without dense queries: a launch a layer is left out."""
    return plan.selection is not None


def captured_sizes(plan: ModelPlan) -> tuple[int, ...]:
    """Tokens of each captured step: every bucket, and those of trees; of TensorRT's those that decode or verify."""
    sizes = bucket_sizes(plan)
    if plan.executor == TENSORRT:
        return tuple(size for size in sizes if size <= MAX_DECODE)
    return (*sizes, *tree_sizes(plan))


def draft_layers(plan: ModelPlan) -> int:
    """Layers of the draft in all captured runs of it."""
    return 0 if plan.draft is None else 1 + len(TAKEN) * plan.draft.levels


def graphs(plan: ModelPlan) -> int:
    """Forwards of the model that are captured."""
    captured = sum(2 if has_dense_graph(plan, tokens) else 1 for tokens in captured_sizes(plan))
    return captured + (len(tree_sizes(plan)) if has_sparse_graph(plan) else 0)


@dataclass(frozen=True)
class StepLayout:
    """Where the data of a step lies, in 32-bit words from its start: T tokens, S sequences, R rows of logits, N nodes.

    The host writes all of it into one pinned buffer; one copy brings it to the device.
    """

    token_ids: int  # int32 [T]; -1 in padding
    positions: int  # int32 [T]
    starts: int  # int32 [S + 1]
    lengths: int  # int32 [S]
    needed: int  # int32 [R]
    temperatures: int  # float32 [R]
    top_ks: int  # int32 [R]
    top_ps: int  # float64 [R]
    numbers: int  # float64 [R]
    masks: int  # uint64 [N]
    given: int  # int32 [S], where trees are verified
    tables: int  # int32 [S, pages of a sequence]
    words: int

    @classmethod
    def of(cls, plan: ModelPlan) -> StepLayout:
        """The layout of a plan's largest bucket; smaller ones use the first elements of each part."""
        tokens, sequences = bucket_sizes(plan)[-1], plan.max_sequences
        rows, nodes = most_logit_rows(plan), max(tree_sizes(plan), default=0)
        places = [0]
        sizes = [tokens, tokens, sequences + 1, sequences, rows, rows, rows, 2 * rows, 2 * rows]
        sizes += [2 * nodes, sequences if nodes else 0]
        alignment = _TENSORRT_ALIGNMENT if plan.executor == TENSORRT else _ALIGNMENT
        for size in (*sizes, sequences * plan.pages_per_sequence):
            places.append(round_up(places[-1] + size, alignment))
        return cls(*places)


def attention_workspace(
    plan: ModelPlan, tokens: int, multiprocessors: int = MULTIPROCESSORS, *, trees: bool = False
) -> int:
    """Bytes of scratch memory that one layer's attention needs in a bucket of ``tokens``, or of ``trees`` of so many."""
    a = plan.architecture
    bucket = Bucket(
        tokens=tokens,
        sequences=plan.max_sequences,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        max_pages=plan.pages_per_sequence,
        multiprocessors=multiprocessors,
    )
    return Layout.of(bucket, plan.selection, trees=trees, quantized=plan.quantized_kv is not None).total


def packed_workspace(plan: ModelPlan) -> int:
    """Bytes of scratch memory that a product with a packed weight needs in any bucket."""
    shapes = {
        (each.ternary, each.outputs, each.inputs, min(MAX_ROWS, size))
        for each in cuda_packed(plan.architecture)
        for size in bucket_sizes(plan)
    }
    return max((product_workspace(*shape) for shape in shapes), default=0)


def wide_rows(packed: CudaPacked) -> int:
    """Outputs of a packed weight that are widened at a time: all that there is room for, in equal parts."""
    most = max(WIDE_TILE // packed.inputs, OCTET)
    return round_up(ceil_div(packed.outputs, ceil_div(packed.outputs, most)), OCTET)


def _packed_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """Scratch memory of products with packed weights, where there are any."""
    packed = cuda_packed(plan.architecture)
    buffers = []
    workspace = packed_workspace(plan)
    if workspace:
        buffers.append(BufferSpec("packed_workspace", ACTIVATIONS, (round_up(workspace, 16),), "uint8"))
    widened = [each for each in packed if bucket_sizes(plan)[-1] > each.kernel_rows]
    if widened:
        elements = max(wide_rows(each) * each.inputs for each in widened)
        buffers.append(BufferSpec("packed_wide", ACTIVATIONS, (elements,), plan.dtype))
    return tuple(buffers)


def _tree_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """The accepted nodes of each sequence's tree, and how many they are; the host may write them by one copy."""
    return (BufferSpec("paths", ACTIVATIONS, (plan.max_sequences * (MAX_TREE + 1),), "int32"),)


def kv_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """Pages and compressed keys.

    Without a selection rule nobody reads compressed keys: all of them then share one place, under another name.
    """
    a, stored = plan.architecture, plan.dtype
    arena = (a.layers, plan.pages, a.kv_heads)
    scales = ("key_scales", "value_scales") if plan.quantized_kv else ()
    fine, coarse, places = "fine", "coarse", arena
    if plan.selection is None:
        fine, coarse, places = UNREAD_FINE, UNREAD_COARSE, (1, 1, 1)
    return (
        BufferSpec("keys", KV_PAGES, (*arena, PAGE_TOKENS, a.head_dim), plan.stored_kv),
        BufferSpec("values", KV_PAGES, (*arena, PAGE_TOKENS, a.head_dim), plan.stored_kv),
        *(BufferSpec(name, KV_PAGES, (*arena, PAGE_TOKENS), "float16") for name in scales),
        BufferSpec(fine, COMPRESSED_KEYS, (*places, FINE_SLOTS, a.head_dim), stored),
        BufferSpec(coarse, COMPRESSED_KEYS, (*places, COARSE_SLOTS, a.head_dim), stored),
    )


def cuda_step_buffers(plan: ModelPlan) -> tuple[BufferSpec, ...]:
    """Everything beside the weights: pages, compressed keys, activations, scratch, a step's data, logits."""
    a = plan.architecture
    sizes = bucket_sizes(plan)
    tokens = sizes[-1]
    rows, most_rows = logit_rows(plan, tokens), most_logit_rows(plan)
    stored = plan.dtype
    positions = plan.pages_per_sequence * PAGE_TOKENS
    trees = tree_sizes(plan)
    workspace = max(
        *(attention_workspace(plan, size) for size in sizes),
        *(attention_workspace(plan, size, trees=True) for size in trees),
    )

    def flat(name: str, width: int, of: int = tokens, dtype: str = stored) -> BufferSpec:
        return BufferSpec(name, ACTIVATIONS, (of * width,), dtype)

    return (
        *kv_buffers(plan),
        BufferSpec("cosine", ACTIVATIONS, (positions, a.head_dim // 2), "float32"),
        BufferSpec("sine", ACTIVATIONS, (positions, a.head_dim // 2), "float32"),
        BufferSpec("step", ACTIVATIONS, (StepLayout.of(plan).words,), "int32"),
        flat("hidden", a.hidden),
        flat("normed", a.hidden, hidden_rows(plan, tokens)),
        flat("qkv", a.qkv_width),
        flat("attended", a.q_width),
        flat("branch", a.hidden),
        flat("gate_up", 2 * a.intermediate),
        flat("activated", a.intermediate),
        flat("needed_hidden", a.hidden, rows),
        flat("needed_attended", a.q_width, rows),
        BufferSpec("attention_workspace", ACTIVATIONS, (ceil_div(workspace, 16) * 16,), "uint8"),
        BufferSpec("arrived", ACTIVATIONS, (plan.max_sequences, a.kv_heads), "int32"),
        BufferSpec("logits", LOGITS, (most_rows, a.vocabulary), "float32"),
        BufferSpec("drawn", LOGITS, (most_rows,), "int32"),
        *sample_buffers(plan, rows, most_rows),
        *(_tree_buffers(plan) if trees else ()),
        *_packed_buffers(plan),
    )
