"""What one model holds, as rows of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edged.errors import ConfigError
from edged.memory.buffers import (
    ACTIVATIONS,
    COMPRESSED_KEYS,
    ELEMENT_BYTES,
    ENGINE,
    KV_NAMES,
    KV_PAGES,
    LOGITS,
    PAGE_TOKENS,
    SPARSE_QUERIES,
    TENSORRT,
    WEIGHTS,
    BufferSpec,
    ModelPlan,
    draft_buffers,
    step_buffers,
    weight_buffers,
)
from edged.memory.cuda_buffers import graphs, tree_sizes
from edged.memory.cuda_ledger import graph_bytes
from edged.memory.draft_plan import DRAFT
from edged.models.cuda_weights import cuda_packed
from edged.models.weights import packed_count, parameter_count
from edged.units import format_size
from plugins_trt.arena import FINE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterable

SUSPENDED = "suspended sequences"
"""Row of the ledger for pages in host memory."""

SAMPLING_ROWS = 8
SAMPLING_BYTES = 64
"""Scratch of the sampling operator: bytes an entry of the vocabulary for each row that is drawn together."""

HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class LedgerRow:
    """One use of memory: what it is, its bytes, and how they come about."""

    name: str
    bytes: int
    note: str = ""
    place: str = HOST
    """:data:`HOST` or :data:`DEVICE`; a Jetson has one memory for both."""


def model_rows(plan: ModelPlan) -> tuple[LedgerRow, ...]:
    """What one model holds: weights, KV pages, compressed keys, activations and scratch, logits, captured graphs."""
    buffers = (*weight_buffers(plan), *step_buffers(plan))
    a = plan.architecture
    page = _bytes_of(buffers, KV_PAGES) // plan.pages
    kind = "" if plan.quantized_kv is None else f" in {KV_NAMES[plan.quantized_kv]} with their scales"
    rows = [
        LedgerRow(WEIGHTS, _bytes_of(buffers, WEIGHTS), _weights_note(plan)),
        LedgerRow(
            KV_PAGES,
            _bytes_of(buffers, KV_PAGES),
            f"{plan.pages} pages of {PAGE_TOKENS} tokens, {format_size(page)} each{kind}: "
            f"{plan.max_sequences} x {plan.context_length} tokens",
        ),
        LedgerRow(
            ACTIVATIONS,
            _bytes_of(buffers, ACTIVATIONS) + attention_scratch(plan),
            f"{plan.step_tokens} tokens a step"
            + (
                ": prefill_chunk and one for each sequence"
                if plan.max_step_tokens is None
                else " (max_step_tokens)"
            ),
        ),
        LedgerRow(
            LOGITS,
            _bytes_of(buffers, LOGITS) + sampling_scratch(plan),
            f"{_logit_rows(plan)} x {a.vocabulary} logits",
        ),
    ]
    compressed = _bytes_of(buffers, COMPRESSED_KEYS)
    if plan.selection is not None:
        rows.insert(
            2, LedgerRow(COMPRESSED_KEYS, compressed, "means of 32 and of 128 keys, for block selection")
        )
    if plan.draft is not None:
        scratch = 0 if plan.device == "cuda" else plan.draft.scratch(plan.max_sequences)
        held = _bytes_of(draft_buffers(plan), DRAFT) + scratch
        rows.append(
            LedgerRow(
                DRAFT,
                held,
                f"{plan.draft.eagle.folder.name}, {plan.draft.window} tokens of {plan.max_sequences}",
            )
        )
    suspended = _suspended_rows(plan)
    if plan.device != "cuda":
        return (*rows, *suspended)
    if plan.executor == TENSORRT:
        rows.insert(-1, LedgerRow(ENGINE, _bytes_of(buffers, ENGINE), _engine_note(plan)))
    rows.append(LedgerRow("CUDA graphs", graph_bytes(plan), f"{graphs(plan)} captured steps"))
    if plan.selection is None:
        rows[2] = replace(rows[2], bytes=rows[2].bytes + compressed)
    return (*(replace(row, place=DEVICE) for row in rows), *suspended)


def _logit_rows(plan: ModelPlan) -> int:
    """Rows of logits that are wanted at once."""
    if plan.device != "cuda":
        return plan.logit_rows
    return max(plan.max_sequences, max(tree_sizes(plan), default=0))


def _engine_note(plan: ModelPlan) -> str:
    """Where the figure comes from."""
    if plan.engine_bytes is None:
        return "activations and scratch of its layers, estimated until it is built (edgectl build)"
    return "activations and scratch of its layers, as its build said"


def page_bytes(plan: ModelPlan) -> int:
    """Bytes of one page with its compressed keys, in every layer."""
    buffers = step_buffers(plan)
    return (_bytes_of(buffers, KV_PAGES) + _bytes_of(buffers, COMPRESSED_KEYS)) // plan.pages


def _suspended_rows(plan: ModelPlan) -> tuple[LedgerRow, ...]:
    """Host memory for suspended sequences, where there is any."""
    if not plan.host_kv:
        return ()
    page = page_bytes(plan)
    slots = plan.host_kv // page
    if not slots:
        raise ConfigError(
            f"host_kv is {format_size(plan.host_kv)} and a page takes {format_size(page)}: nothing could be suspended",
            field="host_kv",
        )
    return (
        LedgerRow(SUSPENDED, slots * page, f"{slots} pages of {format_size(page)} in host memory (host_kv)"),
    )


def _weights_note(plan: ModelPlan) -> str:
    """How many parameters there are, and in what."""
    count, packed = parameter_count(plan.architecture), packed_count(plan.architecture)
    if plan.device == "cuda":  # where a packed head is widened
        packed = sum(each.outputs * each.inputs for each in cuda_packed(plan.architecture))
    if not packed:
        return f"{count:,} parameters in {plan.dtype}"
    quantization = plan.architecture.quantization
    bits = 2 if quantization is not None and quantization.ternary else 4
    return f"{packed:,} parameters in {bits} bits with their scales, {count - packed:,} in {plan.dtype}"


def attention_scratch(plan: ModelPlan) -> int:
    """What attention on the CPU allocates itself.

    Two partial results and their merged one in fp32; with a selection rule also the scores and the gathered blocks of
    the queries that are looked at together.
    """
    if plan.device == "cuda":
        return 0
    a, size = plan.architecture, ELEMENT_BYTES[plan.compute_dtype]
    partial = 3 * plan.step_tokens * a.q_width * size
    if plan.quantized_kv:
        # What rounding the new keys and values makes of them, one after the other.
        partial += 6 * plan.step_tokens * 2 * a.kv_width * 4
    if plan.selection is None:
        return partial
    # Products, what is exponentiated and masked, and the compressed keys themselves in fp32.
    keys = plan.pages_per_sequence * FINE_SLOTS
    scores = 4 * SPARSE_QUERIES * a.heads * keys * 4 + 3 * a.kv_width * keys * 4
    blocks = min(plan.selection.total, plan.pages_per_sequence)
    gathered = SPARSE_QUERIES * blocks * PAGE_TOKENS * (3 * a.head_dim + 3 * a.group) * size
    return partial + scores + gathered


def sampling_scratch(plan: ModelPlan) -> int:
    """What drawing tokens allocates for a moment."""
    if plan.device == "cuda":
        return 0
    return min(plan.logit_rows, SAMPLING_ROWS) * plan.architecture.vocabulary * SAMPLING_BYTES


def model_bytes(plan: ModelPlan) -> int:
    """Bytes that one model holds."""
    return sum(row.bytes for row in model_rows(plan))


def _bytes_of(buffers: Iterable[BufferSpec], row: str) -> int:
    return sum(buffer.nbytes for buffer in buffers if buffer.row == row)
