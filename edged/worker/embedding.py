"""The vectors of prompts: what a step's hidden states add to them, and what is said of one that is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.worker.messages import Finished, Timings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import FloatArray
    from edged.scheduler.request import Request

REASON = "embedding"
"""Why such a request finishes."""


def add_states(pooled: Sequence[tuple[Request, int]], hidden: FloatArray) -> list[Request]:
    """Give a step's states to the requests that they belong to.

    Args:
        pooled: The requests, and how many rows each one has, in their order.
        hidden: fp32 ``[R, H]``.

    Returns:
        Those whose prompts are through.
    """
    first, ended = 0, []
    for request, count in pooled:
        assert request.pooling is not None, "only asked of such requests"  # noqa: S101
        request.pooling.add(hidden[first : first + count])
        first += count
        if not request.unstored:
            ended.append(request)
    return ended


def embedded(request: Request, now: float) -> Finished:
    """What is said of a request whose vector is complete.

    Raises:
        InternalError: Its numbers are not finite.
    """
    assert request.pooling is not None, "only asked of such requests"  # noqa: S101
    return Finished(
        request.request_id,
        REASON,
        "",
        prompt_tokens=len(request.prompt),
        generated_tokens=0,
        cached_tokens=request.cached_tokens,
        timings=Timings(
            queue=request.started_at - request.arrived, prefill=now - request.started_at, steps=request.steps
        ),
        embedding=request.pooling.vector().astype("<f4").tobytes(),
    )
