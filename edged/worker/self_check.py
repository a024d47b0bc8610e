"""The engine's check of itself: no model is Ready before it has drawn a token that its own logits confirm."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from edged.errors import InternalError
from edged.executor.base import SamplingRow, StepBatch

if TYPE_CHECKING:
    from edged.executor.base import Executor


def draw_one_token(name: str, executor: Executor) -> float:
    """Run one real step through the first page and hold the token to the logits.

    Args:
        name: Name of the model, for the message.
        executor: Loaded; no page of it is in use.

    Returns:
        Seconds of the step that drew the token.

    Raises:
        InternalError: Logits are not finite, or the token drawn is not the largest of them.
    """
    zeros = np.zeros(1, np.int32)
    batch = StepBatch(
        token_ids=zeros,
        positions=zeros,
        sequence_starts=np.array([0, 1], np.int32),
        lengths=zeros,
        page_tables=[zeros],
        logit_rows=zeros,
        sampling=[SamplingRow(position=1)],
    )
    logits = executor.logits(batch)  # [1, V]
    vocabulary = executor.limits.vocabulary
    if logits.shape != (1, vocabulary):
        raise InternalError(f"model {name}: the logits have shape {logits.shape}, not (1, {vocabulary})")
    if not np.isfinite(logits).all():
        count = int((~np.isfinite(logits)).sum())
        raise InternalError(
            f"model {name}: {count} of {vocabulary} logits of its first token are not finite; "
            "is the checkpoint intact, and does its dtype suit it?"
        )
    before = time.monotonic()
    token = int(executor.step(batch)[0])
    seconds = time.monotonic() - before
    # Two runs of one step may differ in the last bit on some devices, so the token has to be among the largest only.
    best = float(logits[0].max())
    slack = 1e-3 * (1.0 + abs(best))
    if not 0 <= token < vocabulary or float(logits[0, token]) < best - slack:
        raise InternalError(
            f"model {name}: the first token drawn is {token}, its logits say {int(logits[0].argmax())}"
        )
    return seconds
