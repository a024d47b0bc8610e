"""Makes a step's arrays out of the requests that take part in it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edged.executor.base import StepBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.executor.base import ExecutorLimits, Int32Array, SamplingRow
    from edged.scheduler.request import Request


class BatchBuilder:
    """Holds the arrays of the largest step; every batch is a view of them, valid until the next one is built.

    Args:
        limits: What the executor can take.
        grow: Brings pages for so many tokens of a request into use.
    """

    def __init__(self, limits: ExecutorLimits, grow: Callable[[Request, int], None]) -> None:
        self._grow = grow
        self._token_ids = np.zeros(limits.max_step_tokens, np.int32)  # [T]
        self._positions = np.zeros(limits.max_step_tokens, np.int32)  # [T]
        self._starts = np.zeros(limits.max_sequences + 1, np.int32)  # [S + 1]
        self._lengths = np.zeros(limits.max_sequences, np.int32)  # [S]
        self._masks = np.zeros(limits.max_step_tokens, np.uint64)  # [T]
        self._counting = np.arange(limits.max_step_tokens + 1, dtype=np.int32)  # [T + 1]

    def build_with_trees(self, decoding: Sequence[Request]) -> StepBatch:
        """The step of requests that decode, some of which bring trees of draft tokens."""
        tables: list[Int32Array] = []
        sampling: list[SamplingRow] = []
        first = 0
        for index, request in enumerate(decoding):
            stored, verification = request.stored, request.verification
            tokens, depths, masks = [request.last_token], [0], [0]
            if verification is not None:
                tree = verification.tree
                tokens, depths, masks = tree.tokens, tree.depths, tree.masks
                sampling += verification.sampling_rows()
            else:
                sampling.append(request.sampling_row(stored + 1))
            end = first + len(tokens)
            self._token_ids[first:end] = tokens
            self._positions[first:end] = depths
            self._positions[first:end] += stored
            self._masks[first:end] = masks
            self._lengths[index] = stored
            self._starts[index + 1] = end
            if stored + len(tokens) > request.room:
                self._grow(request, stored + len(tokens))
            tables.append(request.pages)
            first = end
        return StepBatch(
            token_ids=self._token_ids[:first],
            positions=self._positions[:first],
            sequence_starts=self._starts[: len(decoding) + 1],
            lengths=self._lengths[: len(decoding)],
            page_tables=tables,
            logit_rows=self._counting[:first],
            sampling=sampling,
            tree_masks=self._masks[:first],
            draft_slots=_slots(decoding),
        )

    def build(
        self, decoding: Sequence[Request], pieces: Sequence[tuple[Request, int]]
    ) -> tuple[StepBatch, list[Request]]:
        """The step of these requests, and those whose tokens it draws, in the order of its rows.

        Args:
            decoding: Requests that decode one token each.
            pieces: Requests that go on by several known tokens, of prompts or forced, and by how many.
        """
        tokens = count = len(decoding)
        tables: list[Int32Array] = []
        sampling: list[SamplingRow] = []
        drawing = list(decoding)
        if count:
            stored = [request.stored for request in decoding]
            self._token_ids[:count] = [request.last_token for request in decoding]
            self._positions[:count] = stored
            self._lengths[:count] = stored
            self._starts[: count + 1] = self._counting[: count + 1]
            for request, position in zip(decoding, stored, strict=True):
                if position >= request.room:
                    self._grow(request, position + 1)
                tables.append(request.pages)
                sampling.append(request.sampling_row(position + 1))
        logit_rows = list(range(count))
        for request, take in pieces:
            first, end = request.stored, request.stored + take
            self._token_ids[tokens : tokens + take] = request.tokens(first, end)
            self._positions[tokens : tokens + take] = self._counting[:take]
            self._positions[tokens : tokens + take] += first
            self._lengths[count] = first
            tokens += take
            count += 1
            self._starts[count] = tokens
            if end > request.room:
                self._grow(request, end)
            tables.append(request.pages)
            if take == request.unstored:
                drawing.append(request)
                logit_rows.append(tokens - 1)
                sampling.append(request.sampling_row(end))
        batch = StepBatch(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            sequence_starts=self._starts[: count + 1],
            lengths=self._lengths[:count],
            page_tables=tables,
            logit_rows=np.array(logit_rows, np.int32),
            sampling=sampling,
            draft_slots=_slots([*decoding, *(request for request, _ in pieces)]),
        )
        return batch, drawing

    def build_pooled(self, pieces: Sequence[tuple[Request, int]]) -> tuple[StepBatch, list[int]]:
        """The step of pieces of prompts that become vectors, and how many rows of it each one's pooling takes."""
        batch, _ = self.build((), pieces)
        rows: list[int] = []
        counts = []
        for index, (request, take) in enumerate(pieces):
            first, end = int(batch.sequence_starts[index]), int(batch.sequence_starts[index + 1])
            assert request.pooling is not None, "only asked of such requests"  # noqa: S101
            if request.pooling.needs_every_token:
                wanted = range(first, end)
            else:
                wanted = range(end - 1, end) if take == request.unstored else range(0)
            rows += wanted
            counts.append(len(wanted))
        return replace(batch, logit_rows=np.array(rows, np.int32), sampling=()), counts


def _slots(requests: Sequence[Request]) -> Sequence[object | None]:
    """Where the requests' drafts want to see what is stored; nothing if none does."""
    slots = [None if request.drafts is None else request.drafts.draft.slot for request in requests]
    return slots if any(slot is not None for slot in slots) else ()


def share_prompt_tokens(prefilling: Sequence[Request], budget: int) -> list[tuple[Request, int]]:
    """Which prompts go on in a step, and by how many tokens.

    The most urgent one has half of the budget, so that every prompt comes to its end. The other half goes to higher
    priority first and then to the prompt with the least left, so that a short one need not wait until a long one is
    through. What one does not need, the next one has.
    """
    if len(prefilling) == 1:
        return [(prefilling[0], min(prefilling[0].prompt_left, budget))] if budget else []
    first = max(prefilling, key=lambda r: (r.urgency, -r.order))
    takes = {first.order: min(first.prompt_left, budget - budget // 2)}
    left = budget - takes[first.order]
    for request in sorted(prefilling, key=lambda r: (-r.priority, r.prompt_left, r.order)):
        take = min(request.prompt_left - takes.get(request.order, 0), left)
        takes[request.order] = takes.get(request.order, 0) + take
        left -= take
    return [(request, takes[request.order]) for request in prefilling if takes[request.order]]
