"""One request inside the engine: what it asks for, how far it has come, and which pages it holds."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from edged.executor.base import Int32Array, SamplingRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.decoding.answer import Answer
    from edged.decoding.constraints.masks import AnswerGrammar
    from edged.decoding.pooling import Pooling
    from edged.decoding.sampling import Sampling
    from edged.executor.host_sampler import HostSampler
    from edged.memory.kv_pool import PageTable
    from edged.scheduler.verification import Verification
    from edged.speculation.speculator import SequenceDrafts


class Request:
    """State of one request from its arrival to its end.

    Args:
        request_id: Name in messages and logs.
        token_ids: The prompt; at least one token.
        sampling: How tokens are drawn.
        answer: Turns the drawn tokens into text and knows when to end.
        max_tokens: Most tokens to generate; with the prompt, the worst case that admission counts with.
        deadline: Seconds of ``time.monotonic()`` after which the request is worth nothing; None for never.
        priority: Higher goes first among waiting requests, and may have lower ones suspended.
        arrived: Seconds of ``time.monotonic()``.
        least_tokens: Tokens that it will generate at least: ``max_tokens`` where nothing else can end it.
        tenant: Whose cached pages and sessions it may see.
        session: Name of the conversation whose pages stay pinned after it; empty for none.
        host: Draws its tokens where the device cannot.
        grammar: The form that its answer must have; ``host`` knows it, too.
        speculates: Whether draft tokens may be verified for it.
        pooling: Makes a vector of the prompt; nothing is generated then.
    """

    __slots__ = (
        "_greedy",
        "answer",
        "arrived",
        "cached_tokens",
        "deadline",
        "digests",
        "drafts",
        "finished_at",
        "first_token_at",
        "generated",
        "grammar",
        "host",
        "known_pages",
        "last_token",
        "last_token_at",
        "least_tokens",
        "max_tokens",
        "order",
        "pages",
        "pooling",
        "priority",
        "prompt",
        "request_id",
        "room",
        "sampling",
        "saved",
        "session",
        "speculates",
        "started_at",
        "steps",
        "stored",
        "suspended",
        "table",
        "tenant",
        "urgency",
        "verification",
    )

    def __init__(  # noqa: PLR0915 - a request has as many fields as it has
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
        least_tokens: int = 1,
        tenant: str = "",
        session: str = "",
        host: HostSampler | None = None,
        grammar: AnswerGrammar | None = None,
        speculates: bool = True,
        pooling: Pooling | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt: Int32Array = np.asarray(token_ids, np.int32)  # [P]
        self.sampling = sampling
        self.answer = answer
        self.max_tokens = max_tokens
        self.deadline = deadline
        self.priority = priority
        self.arrived = arrived
        self.least_tokens = least_tokens
        self.tenant = tenant
        self.session = session
        self.host = host
        self.grammar = grammar
        self.speculates = speculates
        self.pooling = pooling
        self.urgency = 0.0
        """Who goes first, given by the queue: larger is sooner, and it does not change while time passes."""
        self.started_at = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.finished_at = 0.0
        self.order = 0
        """Number of its arrival, given by the scheduler."""
        self.steps = 0
        """Steps it took part in."""
        self.stored = 0
        """Tokens whose keys and values are in its pages."""
        self.last_token = -1
        """The token drawn last; not stored yet."""
        self.generated: list[int] = []
        """The tokens drawn, ``last_token`` included."""
        self.cached_tokens = 0
        """Prompt tokens that were found in the cache."""
        self.digests: list[bytes] = []
        """Of its full pages, as far as they were needed; they name their content in the prefix cache."""
        self.known_pages = 0
        """Its full pages that the cache has been told of."""
        self.table: PageTable | None = None
        """Its pages; None while it waits and after it ended."""
        self.suspended = False
        """Whether it waits after it ran."""
        self.saved: PageTable | None = None
        """Where its pages lie in host memory while it is suspended."""
        self.pages: Int32Array = np.empty(0, np.int32)
        """The pages of ``table`` that are in use."""
        self.room = 0
        """Tokens that fit in ``pages``."""
        self.drafts: SequenceDrafts | None = None
        """Its draft tokens and what came of them; None where there is no speculation."""
        self.verification: Verification | None = None
        """Its tree in the current step, if it brings one."""
        self._greedy = SamplingRow(host=host) if sampling.temperature == 0 else None

    @property
    def reads_cache(self) -> bool:
        """Whether prompt tokens that the cache knows need not be computed."""
        return self.pooling is None or not self.pooling.needs_every_token

    @property
    def most_tokens(self) -> int:
        """Tokens of the worst case: the prompt and every token it may generate."""
        return len(self.prompt) + self.max_tokens

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not stored yet; 0 or less when it decodes."""
        return len(self.prompt) - self.stored

    @property
    def unstored(self) -> int:
        """Tokens of prompt and answer that are not stored yet: one where it decodes, more after forced ones."""
        return len(self.prompt) + len(self.generated) - self.stored

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        return self.max_tokens - len(self.generated)

    def accept(self, token: int) -> None:
        """Take a token that was drawn or forced."""
        self.last_token = token
        self.generated.append(token)
        if self.host is not None:
            self.host.accept(token)

    def take(self, token: int) -> tuple[tuple[int, ...], str]:
        """Take the drawn token and what its grammar forces after it, as far as the answer goes.

        Returns:
            The tokens taken, and the text that became final with them.
        """
        self.accept(token)
        taken, answer, grammar = [token], self.answer, self.grammar
        text = answer.accept(token)
        if grammar is not None and not answer.ended:
            # Forced tokens take no step of their own, so there are no logits to say how likely they were.
            forced = deque(grammar.accept(token, forced=not self.sampling.logprobs))
            while forced and not answer.ended:
                taken.append(forced.popleft())
                self.accept(taken[-1])
                text += answer.accept(taken[-1])
            if grammar.complete:
                answer.complete()
        return tuple(taken), text

    def tokens(self, start: int, end: int) -> Int32Array:
        """Its tokens from position ``start`` to ``end``, prompt or drawn, int32 [end - start]."""
        prompt = self.prompt
        size = len(prompt)
        if end <= size:
            return prompt[start:end]
        drawn = np.array(self.generated[max(start - size, 0) : end - size], np.int32)
        return drawn if start >= size else np.concatenate((prompt[start:], drawn))

    def may_go_on_with(self, tokens: Sequence[int]) -> int:
        """How many of these draft tokens could be its next ones: none that ends it, and none outside its grammar."""
        count = next(
            (place for place, token in enumerate(tokens) if self.answer.ends_with(token)), len(tokens)
        )
        return count if self.grammar is None or not count else self.grammar.admissible(tokens[:count])

    def sampling_row(self, position: int) -> SamplingRow:
        """How the token at ``position`` of the sequence is drawn."""
        if self._greedy is not None:
            return self._greedy  # no random number, so the position changes nothing
        sampling = self.sampling
        return SamplingRow(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, position, self.host
        )
