"""Sends a load through the public API and notes when what came back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edged.client import AsyncClient, Chunk, Finished, Started
from edged.errors import EdgedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.cli.bench_load import PlannedRequest


@dataclass
class Outcome:
    """One request as its client saw it. Times are seconds from the start of the load.

    Attributes:
        index: Its number.
        due: When it was to be sent: its time to first token counts from here, so that a client which comes late itself
            hides nothing.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those of them that the daemon found in its cache.
        message_times: When messages with tokens came.
        token_times: When tokens came: each of a message has its time.
        ended: When the call ended.
        code: ``OK`` or the name of the status.
        message: The error's words.
    """

    index: int
    due: float
    prompt_tokens: int
    cached_tokens: int = 0
    message_times: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    code: str = "OK"
    message: str = ""

    @property
    def first_token(self) -> float | None:
        """Time to first token; None if there was none."""
        return self.token_times[0] - self.due if self.token_times else None


async def run_load(
    planned: Sequence[PlannedRequest],
    *,
    address: str | None,
    model: str,
    concurrency: int | None,
    timeout: float | None,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Send every request and wait for all of them.

    Args:
        planned: The load.
        address: The daemon.
        model: Name of the model; empty for the default one.
        concurrency: Requests that are open at once (closed loop); None: each is sent when it is due (open loop).
        timeout: Deadline of each request in seconds.
        on_done: Called with every request that has ended.
    """
    outcomes: list[Outcome] = []
    waiting = iter(planned)
    async with AsyncClient(address) as client:
        start = time.perf_counter()

        async def send(request: PlannedRequest, due: float) -> None:
            outcome = Outcome(request.index, due, len(request.prompt))
            outcomes.append(outcome)
            try:
                await _receive(client, request, outcome, start=start, model=model, timeout=timeout)
            except EdgedError as error:
                outcome.code, outcome.message = error.code.name, error.message
            outcome.ended = time.perf_counter() - start
            on_done(outcome)

        async def closed() -> None:
            for request in waiting:
                await send(request, time.perf_counter() - start)

        async def open_one(request: PlannedRequest) -> None:
            await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - start)))
            await send(request, request.at)

        if concurrency is not None:
            await asyncio.gather(*(closed() for _ in range(concurrency)))
        else:
            await asyncio.gather(*(open_one(request) for request in waiting))
    return sorted(outcomes, key=lambda outcome: outcome.index)


async def _receive(
    client: AsyncClient,
    request: PlannedRequest,
    outcome: Outcome,
    *,
    start: float,
    model: str,
    timeout: float | None,
) -> None:
    """Take every event of one request."""
    generation = client.generate(
        request.prompt,
        model=model,
        max_tokens=request.output_tokens,
        ignore_eos=True,
        temperature=0.0,
        timeout=timeout,
    )
    async for event in generation:
        if isinstance(event, Chunk):
            now = time.perf_counter() - start
            if event.token_ids:
                outcome.message_times.append(now)
            outcome.token_times.extend([now] * len(event.token_ids))
        elif isinstance(event, Started):
            outcome.cached_tokens = event.cached_tokens
        elif isinstance(event, Finished):
            outcome.cached_tokens = event.usage.cached_tokens
