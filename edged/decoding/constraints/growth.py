"""Whether masks of a grammar become dearer with every token of the answer.

Some expressions have a state for each combination of what was read (``.*a.{200}b``: which of the last 200 characters were
an a), and a grammar may have ever more parses (``start: start start | "a"``). Their first masks are cheap, so this writes
an answer of some hundred tokens over a small vocabulary of long ones, made of the constraint's own characters, and counts
states and parses. Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import math
import random
import time

import llguidance

from edged.decoding.constraints.base import LIMITS
from edged.errors import InvalidArgumentError

_STEPS = 300
_SECONDS = 0.3
"""After so long on a core the trial ends without a verdict; it takes a few hundredths otherwise."""
_TOKENS = 256
_LONGEST = 10
_END = 256
_LIMITS = {**LIMITS, "max_lexer_states": 5000}
"""A counted repetition has a state for each count, so an answer passes some with every token; an expression that explodes
passes dozens."""
_ITEMS = range(100, 250, 25)
"""Of a row. A grammar with few ambiguities has a few dozen, and a wide one (an object of a hundred optional properties) passes
several of these bounds with one token. One that grows has as many as tokens: it passes each bound later than the last."""
_MOST_AT_ONCE = 1
"""Bounds that one that grows may pass with the token that passed another."""
_STATES = (
    "its expression has a state for each combination of what an answer has said so far, as .*a.{200}b has; bound the "
    "repetition before the counted one, or count less"
)
_PARSES = "it is ambiguous: an answer has more parses with every token; write it so that a text has one"


class _LongTokens:
    r"""Bytes of ASCII and of the constraint, one end of sequence, random strings of some characters, special tokens.

    Other bytes would only give each count of ``\p{L}{1,2000}`` a dozen states, for the beginnings of characters.
    """

    bos_token_id = None
    eos_token_id = _END

    def __init__(
        self, text: bytes, characters: list[int], special: tuple[str, ...], generator: random.Random
    ) -> None:
        found = set()
        for _ in range(_TOKENS):
            few = [generator.choice(characters) for _ in range(generator.randint(1, 4))]
            found.add(bytes(generator.choice(few) for _ in range(generator.randint(2, _LONGEST))))
        known = {*range(128), *text}
        single = (bytes([byte]) if byte in known else b"" for byte in range(256))
        self.tokens = [*single, b"<end>", *sorted(found)]
        self.special_token_ids = [_END, *range(len(self.tokens), len(self.tokens) + len(special))]
        self.tokens += [text.encode() for text in special]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def refuse_growth(
    kind: str, text: str, grammar: str, special: tuple[str, ...], seconds: float = math.inf
) -> None:
    """Refuse a grammar that grows with the answer.

    Args:
        kind: Of the constraint.
        text: Its text.
        grammar: The same as llguidance takes it; it has no other fault.
        special: Texts of the special tokens that it names.
        seconds: Of the process's time: no further steps are tried after it.

    Raises:
        InvalidArgumentError: It grows.
    """
    end = min(seconds, time.process_time() + _SECONDS)
    generator = random.Random(0)  # noqa: S311 - the same trial every time
    own = sorted({byte for byte in text.encode() if 32 <= byte < 127}) or list(b"ab")
    vocabulary = _LongTokens(text.encode(), own, special, generator)
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=_END
    )
    preferred = {*own, *range(_END + 1, len(vocabulary.tokens))}
    steps: set[int] = set()
    for passed, items in enumerate(_ITEMS):
        if passed - len(steps) > _MOST_AT_ONCE:
            return
        limits = llguidance.LLParserLimits(**{**_LIMITS, "max_items_in_row": items})
        start = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        step, error = _answer(start, preferred, len(vocabulary.tokens), end)
        if "too many states" in error:
            raise _refusal(kind, _STATES)
        if "items" not in error:
            return
        steps.add(step)
    raise _refusal(kind, _PARSES)


def _answer(start: llguidance.LLMatcher, preferred: set[int], vocabulary: int, end: float) -> tuple[int, str]:
    """Write the same answer every time, as far as the limits allow: the tokens it got to, and what stopped it.

    Args:
        start: The grammar at its start.
        preferred: Tokens that it takes mostly.
        vocabulary: How many tokens there are.
        end: Of the process's time; a trial without a verdict then.
    """
    generator = random.Random(0)  # noqa: S311 - as above
    matcher = start.deep_copy()
    for step in range(1, _STEPS + 1):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(vocabulary) if mask >> token & 1 and token != _END]
        liked = [token for token in allowed if token in preferred]
        if allowed:
            matcher.consume_token(generator.choice(liked if liked and generator.random() < 0.9 else allowed))
        if matcher.is_error():
            return step, matcher.get_error()
        if time.process_time() > end:
            break
        if not allowed or matcher.is_stopped():
            matcher = start.deep_copy()
    return _STEPS, ""


def _refusal(kind: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{kind}: the constraint is refused, for it grows with the answer: {why}", field=kind
    )
