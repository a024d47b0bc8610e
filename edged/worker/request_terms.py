"""What follows from a request's own terms: its answers, the tokens it has at least, and how far it came before its deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from edged.scheduler.request import Request
    from edged.worker.messages import Submit


def split_answers(submit: Submit) -> list[Submit]:
    """One request for each answer; that of number i is drawn with the seed and i."""
    count, sampling = submit.sampling.n, submit.sampling
    if count == 1:
        return [submit]
    return [
        msgspec.structs.replace(
            submit,
            request_id=f"{submit.request_id}-{index}",
            sampling=msgspec.structs.replace(sampling, n=1, seed=(sampling.seed + index) % 2**64),
        )
        for index in range(count)
    ]


def least_tokens(message: Submit) -> int:
    """Tokens that an answer has whatever is drawn: all, where nothing but ``max_tokens`` can end it."""
    stops = message.stops
    can_end = stops.token_ids or stops.strings or message.grammar
    return max(1, stops.min_tokens) if can_end else stops.max_tokens


def deadline_message(request: Request) -> str:
    """Say how far a request came before its deadline."""
    if request.started_at == 0.0:
        return "the deadline passed while the request waited: give it more time or a higher priority"
    if not request.answer.generated:
        return f"the deadline passed after {request.stored} of {len(request.prompt)} prompt tokens: give it more time"
    return f"the deadline passed after {request.answer.generated} tokens were generated: give it more time"
