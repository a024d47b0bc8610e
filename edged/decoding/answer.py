"""One answer in the making: takes the drawn tokens one by one, gives the text that became final, knows the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.decoding.stops import StopMatcher, Stops

if TYPE_CHECKING:
    from edged.decoding.detokenizer import Detokenizer

END_OF_SEQUENCE = "end_of_sequence"
STOP_TOKEN = "stop_token"  # noqa: S105 - a finish reason
STOP_STRING = "stop_string"
LENGTH = "length"
CONSTRAINT = "constraint"


@dataclass(frozen=True)
class Finish:
    """Why and with what an answer ended.

    Attributes:
        reason: ``end_of_sequence``, ``stop_token``, ``stop_string``, ``length`` or ``constraint``.
        text: Text that had been held back and became final with the end.
        matched_stop: The stop string that was found.
        matched_token_id: The token that ended the answer.
    """

    reason: str
    text: str = ""
    matched_stop: str = ""
    matched_token_id: int | None = None


class Answer:
    """The text and the end of one answer.

    The texts that :meth:`accept` returns and ``finish.text`` together are the decoded tokens up to what ended the
    answer: without the text of a stop token, without the stop string and what follows it.

    Args:
        detokenizer: A fresh one.
        stops: When the answer ends. ``max_tokens`` is at least 1. Before ``min_tokens`` the sampler draws none of its
            tokens; stop strings are looked for in what the tokens after them add to the text.
    """

    __slots__ = ("_detokenizer", "_matcher", "_stops", "_token_ids", "finish", "generated")

    def __init__(self, detokenizer: Detokenizer, stops: Stops) -> None:
        if stops.max_tokens < 1:
            raise ValueError(f"an answer has at least one token, not {stops.max_tokens}")
        self.generated = 0
        """Tokens accepted, the one that ended the answer included."""
        self.finish: Finish | None = None
        """Set by the token that ends the answer."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._token_ids = frozenset(stops.token_ids)
        self._matcher = StopMatcher(stops.strings) if stops.strings else None

    @property
    def ended(self) -> bool:
        """Whether it takes no more tokens."""
        return self.finish is not None

    def ends_with(self, token_id: int) -> bool:
        """Whether a token ends it by itself."""
        return token_id in self._token_ids

    def accept(self, token_id: int) -> str:
        """Take the next drawn token; return the text that became final with it.

        Raises:
            ValueError: The answer has ended.
        """
        if self.finish is not None:
            raise ValueError("the answer has ended and takes no more tokens")
        self.generated += 1
        if token_id in self._token_ids:
            is_eos = token_id in self._stops.eos_token_ids
            self._end(END_OF_SEQUENCE if is_eos else STOP_TOKEN, token_id)
            return ""
        text = self._detokenizer.feed(token_id)
        matcher = self._matcher if self.generated > self._stops.min_tokens else None
        if matcher is not None and text:
            text = matcher.feed(text)
            if matcher.matched is not None:
                self.finish = Finish(STOP_STRING, matched_stop=matcher.matched)
                return text
        if self.generated >= self._stops.max_tokens:
            self._end(LENGTH, None)
        return text

    def complete(self) -> None:
        """The answer has the form that was asked for, and nothing can follow; without effect if it has ended."""
        if self.finish is None:
            self._end(CONSTRAINT, None)

    def _end(self, reason: str, token_id: int | None) -> None:
        """Set ``finish`` with all text that is left, unless that text completes a stop string."""
        text = self._detokenizer.flush()
        matcher = self._matcher if self.generated > self._stops.min_tokens else None
        if matcher is None:
            self.finish = Finish(reason, text, matched_token_id=token_id)
            return
        text = matcher.feed(text)
        if matcher.matched is not None:
            self.finish = Finish(STOP_STRING, text, matched_stop=matcher.matched)
        else:
            self.finish = Finish(reason, text + matcher.flush(), matched_token_id=token_id)
