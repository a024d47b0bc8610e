"""The check of an engine before it is used: its logits for a fixed prompt against those that `import` stored.

On both roads: the prompt in one piece, and its first part in one piece with the rest decoded token by token. So both
profiles, the small buckets and a batch of one token are compared; TensorRT 10.13 and later have built engines that were
wrong for batches of one alone (NVIDIA/TensorRT-Edge-LLM#105).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edged.checkpoint.reference_logits import ReferenceLogits
from edged.errors import FailedPreconditionError
from edged.executor.base import PAGE_TOKENS, StepBatch

if TYPE_CHECKING:
    from pathlib import Path

    from edged.checkpoint.reference_logits import Comparison
    from edged.executor.base import Executor, FloatArray

RELATIVE_RMS = 0.15
"""Most root mean square of the differences, over the reference's spread, of any row. Half precision has 0.01 (bfloat16), with
4-bit products that round each weight again some more; logits of another model have 1."""

DIVERGENCE = 0.1
"""Most Kullback-Leibler divergence of any row (nats)."""


def read_reference(folder: Path, context_length: int) -> ReferenceLogits:
    """The reference of a model folder, cut to what fits a context.

    Raises:
        FailedPreconditionError: The folder has none.
        CheckpointError: It is damaged, or belongs to other weights.
    """
    reference = ReferenceLogits.read(folder)
    if reference is None:
        raise FailedPreconditionError(
            f"{folder} has no reference logits, and no engine is used before its logits were compared: make them with "
            f"`edgectl models reference {folder}` (on the CPU, with torch; any machine will do)"
        )
    kept = int((reference.positions < context_length).sum())
    last = int(reference.positions[kept - 1]) + 1
    return replace(
        reference,
        token_ids=reference.token_ids[:last],
        positions=reference.positions[:kept],
        logits=reference.logits[:kept],
    )


def compare_engine(executor: Executor, reference: ReferenceLogits) -> dict[str, Comparison]:
    """Run the prompt on both roads; no page of the executor is in use.

    Returns:
        The comparison of each road, by name.
    """
    tokens = len(reference.token_ids)
    split = int(reference.positions[0]) + 1
    decoded = [(split, split)] + [(end, 1) for end in range(split + 1, tokens + 1)]
    most = executor.limits.max_step_tokens
    pieces = [(min(start + most, tokens), min(most, tokens - start)) for start in range(0, tokens, most)]
    first = [(min(start + most, split), min(most, split - start)) for start in range(0, split, most)]
    return {
        "prefilled": reference.compare(_run(executor, reference, pieces)),
        "decoded": reference.compare(_run(executor, reference, [*first, *decoded[1:]])),
    }


def verdict(comparisons: dict[str, Comparison]) -> bool:
    """Whether an engine with these comparisons may be used."""
    return all(each.within(relative_rms=RELATIVE_RMS, divergence=DIVERGENCE) for each in comparisons.values())


def figures(comparisons: dict[str, Comparison]) -> dict[str, float | str]:
    """What is kept beside the engine: the worst of both roads, and a line for each."""
    worst = max(comparisons.values(), key=lambda each: each.relative_rms)
    finite = all(each.finite for each in comparisons.values())
    numbers: dict[str, float | str] = {}
    if finite:
        numbers = {
            "relative_rms": round(worst.relative_rms, 6),
            "divergence": round(max(each.divergence for each in comparisons.values()), 6),
            "max_difference": round(max(each.max_difference for each in comparisons.values()), 6),
        }
    return {**numbers, **{name: str(each) for name, each in comparisons.items()}}


def _run(executor: Executor, reference: ReferenceLogits, pieces: list[tuple[int, int]]) -> FloatArray:
    """The logits of the reference's positions, from steps that end at a token and bring so many: [R, V]."""
    table = np.arange(-(-len(reference.token_ids) // PAGE_TOKENS), dtype=np.int32)
    rows = []
    for end, count in pieces:
        start = end - count
        here = reference.positions[(reference.positions >= start) & (reference.positions < end)]
        batch = StepBatch(
            token_ids=reference.token_ids[start:end],
            positions=np.arange(start, end, dtype=np.int32),
            sequence_starts=np.array([0, count], np.int32),
            lengths=np.array([start], np.int32),
            page_tables=[table],
            logit_rows=here - np.int32(start),
        )
        rows.append(executor.logits(batch))
    return np.concatenate(rows)
