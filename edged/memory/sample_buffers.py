"""What drawing tokens holds on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.memory.specs import LOGITS, BufferSpec
from plugins_trt.sample.contract import WORKSPACE
from plugins_trt.sample.rows import LOGPROB_WORDS, ROW_WORDS, mask_words

if TYPE_CHECKING:
    from edged.memory.buffers import ModelPlan

ROW_ENTRIES = 16384
"""Tokens that one row's biases, penalties and forbidden tokens may name on the device; more are drawn on the host."""
_MOST_ENTRIES = 4 * ROW_ENTRIES


def sample_buffers(plan: ModelPlan, rows: int, most_rows: int) -> tuple[BufferSpec, ...]:
    """The sampling operator's scratch memory, and what requests say about single tokens.

    Args:
        plan: The model's plan.
        rows: Rows of logits of a step without trees.
        most_rows: Of any step.
    """
    entries = min(rows * ROW_ENTRIES, _MOST_ENTRIES)
    words = mask_words(plan.architecture.vocabulary)
    return (
        BufferSpec("sample_workspace", LOGITS, (most_rows * WORKSPACE,), "uint8"),
        BufferSpec("sample_rows", LOGITS, (rows, ROW_WORDS), "int32"),
        BufferSpec("sample_entries", LOGITS, (entries, 2), "int32"),
        BufferSpec("sample_raw", LOGITS, (entries,), "float32"),
        BufferSpec("sample_masks", LOGITS, (rows, words), "int32"),
        BufferSpec("sample_logprobs", LOGITS, (rows, LOGPROB_WORDS), "int32"),
    )
