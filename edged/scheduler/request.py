"""One request inside the engine: what it asks for, how far it has come, and which pages it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.executor.base import Int32Array, SamplingRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.decoding.answer import Answer
    from edged.decoding.sampling import Sampling
    from edged.memory.kv_pool import PageTable


class Request:
    """State of one request from its arrival to its end.

    Args:
        request_id: Name in messages and logs.
        token_ids: The prompt; at least one token.
        sampling: How tokens are drawn.
        answer: Turns the drawn tokens into text and knows when to end.
        max_tokens: Most tokens to generate; with the prompt, the worst case that admission counts with.
        deadline: Seconds of ``time.monotonic()`` after which the request is worth nothing; None for never.
        priority: Higher goes first among waiting requests.
        arrived: Seconds of ``time.monotonic()``.
    """

    __slots__ = (
        "_greedy",
        "answer",
        "arrived",
        "deadline",
        "finished_at",
        "first_token_at",
        "last_token",
        "max_tokens",
        "order",
        "pages",
        "priority",
        "prompt",
        "request_id",
        "room",
        "sampling",
        "started_at",
        "steps",
        "stored",
        "table",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: Sequence[int] | Int32Array,
        sampling: Sampling,
        answer: Answer,
        *,
        max_tokens: int,
        deadline: float | None = None,
        priority: int = 0,
        arrived: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.prompt: Int32Array = np.asarray(token_ids, np.int32)  # [P]
        self.sampling = sampling
        self.answer = answer
        self.max_tokens = max_tokens
        self.deadline = deadline
        self.priority = priority
        self.arrived = arrived
        self.started_at = 0.0
        self.first_token_at = 0.0
        self.finished_at = 0.0
        self.order = 0
        """Number of its arrival, given by the scheduler."""
        self.steps = 0
        """Steps it took part in."""
        self.stored = 0
        """Tokens whose keys and values are in its pages."""
        self.last_token = -1
        """The token drawn last; not stored yet."""
        self.table: PageTable | None = None
        """Its pages; None while it waits and after it ended."""
        self.pages: Int32Array = np.empty(0, np.int32)
        """The pages of ``table`` that are in use."""
        self.room = 0
        """Tokens that fit in ``pages``."""
        self._greedy = SamplingRow() if sampling.temperature == 0 else None

    @property
    def most_tokens(self) -> int:
        """Tokens of the worst case: the prompt and every token it may generate."""
        return len(self.prompt) + self.max_tokens

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not stored yet; 0 or less when it decodes."""
        return len(self.prompt) - self.stored

    def sampling_row(self, position: int) -> SamplingRow:
        """How the token at ``position`` of the sequence is drawn."""
        if self._greedy is not None:
            return self._greedy  # no random number, so the position changes nothing
        sampling = self.sampling
        return SamplingRow(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, position)
