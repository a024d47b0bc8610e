"""What the daemon submits as the scheduler's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.decoding.answer import Answer
from edged.decoding.constraints.masks import GrammarCompiler
from edged.decoding.detokenizer import Detokenizer
from edged.decoding.host_options import make_host_sampler
from edged.decoding.pooling import Pooling
from edged.errors import InvalidArgumentError
from edged.scheduler.request import Request
from edged.worker.request_terms import least_tokens

if TYPE_CHECKING:
    from edged.config import ModelConfig
    from edged.decoding.detokenizer import TokenTexts
    from edged.executor.base import ExecutorLimits
    from edged.worker.messages import Submit


class Intake:
    """Makes the requests of one model.

    Args:
        config: The model's part of the configuration.
        limits: What the loaded executor can take.
        texts: The model's tokenizer.
        keeps_sessions: Whether pages of sessions may stay pinned.
    """

    def __init__(
        self, config: ModelConfig, limits: ExecutorLimits, texts: TokenTexts, *, keeps_sessions: bool
    ) -> None:
        self._config = config
        self._limits = limits
        self._texts = texts
        self._keeps_sessions = keeps_sessions
        self._grammars = GrammarCompiler(texts, limits.vocabulary)

    def prepare(self) -> None:
        """Make what the first request with a constraint would have to wait for, and every stream beside it."""
        self._grammars.prepare(tuple(self._texts.eos_token_ids))

    def make_request(self, message: Submit, now: float) -> Request:
        """The scheduler's form of ``message``.

        Raises:
            InvalidArgumentError: A token id outside the vocabulary, ``max_tokens`` below 1, an empty stop string.
        """
        token_ids = message.token_ids
        vocabulary = self._limits.vocabulary
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            worst = next(token_id for token_id in token_ids if not 0 <= token_id < vocabulary)
            raise InvalidArgumentError(
                f"token id {worst} is outside the vocabulary: ids go from 0 to {vocabulary - 1}",
                field="token_ids",
            )
        if message.stops.max_tokens < 1 and message.embedding is None:
            raise InvalidArgumentError(
                f"stops.max_tokens is {message.stops.max_tokens}: at least 1", field="stops.max_tokens"
            )
        if message.session and not self._keeps_sessions:
            raise InvalidArgumentError(
                f"session is {message.session!r}, and model {self._config.name} keeps no sessions (prefix_cache, "
                "session_share): leave it out",
                field="session",
            )
        if "" in message.stops.strings:
            raise InvalidArgumentError(
                "stops.strings holds an empty string: leave it out", field="stops.strings"
            )
        grammar = None
        if message.grammar is not None:
            grammar = self._grammars.start(message.grammar, message.stops.eos_token_ids)
        detokenizer = Detokenizer(
            self._texts,
            skip_special_tokens=message.skip_special_tokens,
            keep=message.kept_token_ids,
            from_the_start=grammar is None,
        )
        return Request(
            message.request_id,
            token_ids,
            message.sampling,
            Answer(detokenizer, message.stops),
            max_tokens=0 if message.embedding is not None else message.stops.max_tokens,
            deadline=message.deadline,
            priority=message.priority,
            arrived=now if message.arrived is None else min(message.arrived, now),
            least_tokens=least_tokens(message),
            tenant=message.tenant,
            session=message.session,
            host=make_host_sampler(message.sampling, message.stops, token_ids, grammar),
            grammar=grammar,
            speculates=message.speculation,
            pooling=None if message.embedding is None else Pooling(message.embedding),
        )
