"""The check of a constraint, which :mod:`edged.decoding.constraints.check_process` runs in a process of its own.

Beside the syntax it tries the grammar, over small vocabularies: masks and forced text of the first steps, and a longer
answer of the constraint's own characters. What explodes there, or grows with the answer, is refused before any token.
"""

from __future__ import annotations

import functools
import json
import math
import random
import time
from typing import Any

import llguidance
import msgspec

from edged.decoding.constraints.base import (
    CHOICE,
    JSON_SCHEMA,
    LARK,
    LIMITS,
    READY_MADE,
    REGEX,
    TOOL_CALLS,
    choice_grammar,
    lark_grammar,
    schema_grammar,
)
from edged.decoding.constraints.growth import refuse_growth
from edged.decoding.constraints.lark_check import endless_rule, json_places
from edged.decoding.constraints.ready_made import READY_MADE_GRAMMARS
from edged.decoding.constraints.schema_check import check_schema
from edged.decoding.constraints.schema_exact import exact
from edged.decoding.constraints.schema_keys import refuse_lost_keys
from edged.decoding.constraints.schema_reading import read_json, read_json_at, refuse
from edged.decoding.constraints.tool_grammar import ToolCalls, tool_grammar
from edged.errors import InvalidArgumentError

_TRIAL_STEPS = 48
_TRIAL_SECONDS = 0.1
_SHOWN = 400
_LAYOUT = frozenset({"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"})
_REASONS = {
    "coerce_one_of": (
        "oneOf cannot be enforced where one JSON may fit several of its schemas; tell them apart by a type or a constant, or "
        "use anyOf"
    ),
    "schema too large": (
        "its anyOf, oneOf and allOf, multiplied out, make more than 16000 schemas; say it with fewer alternatives"
    ),
    "Current row has": (
        f"more than {LIMITS['max_items_in_row']} alternatives come together at one place, as in an object of 500 optional "
        "properties or an anyOf of 180 objects; make some required, or nest them"
    ),
}
"""What llguidance says, by a part of it, in words of a constraint."""
_END = 256


class Vocabulary:
    """Every byte, every pair of printable ASCII, one end of sequence, special tokens: a model's vocabulary in small.

    Args:
        special: Texts of the special tokens.
    """

    bos_token_id = None
    eos_token_id = _END

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        pairs = (bytes([first, second]) for first in range(32, 127) for second in range(32, 127))
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *pairs]
        self.special_token_ids = [_END, *range(len(self.tokens), len(self.tokens) + len(special))]
        self.tokens += [text.encode() for text in special]

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text."""
        return list(text.encode() if isinstance(text, str) else text)


@functools.lru_cache(maxsize=8)
def small_tokenizer(special: tuple[str, ...] = ()) -> llguidance.LLTokenizer:
    """The vocabulary as llguidance takes it."""
    vocabulary = Vocabulary(special)
    wrapper = llguidance.TokenizerWrapper(vocabulary)
    return llguidance.LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens), eos_token=_END)


def check(kind: str, text: str, *, seconds: float = math.inf) -> str:
    """The grammar of a constraint, in llguidance's own form.

    Args:
        kind: Of the constraint.
        text: Its text.
        seconds: Of the process's time: no further steps are tried after it.

    Raises:
        InvalidArgumentError: It cannot be enforced, never ends, or is too complex.
    """
    grammar = _grammar(kind, text)
    limits = llguidance.LLParserLimits(**LIMITS)
    special = msgspec.json.decode(text, type=ToolCalls).special if kind == TOOL_CALLS else ()
    matcher = llguidance.LLMatcher(small_tokenizer(special), grammar, log_level=0, limits=limits)
    if matcher.is_error():
        reason = _first_lines(matcher.get_error())
        for sign, words in _REASONS.items():
            if sign in reason:
                reason = words
        raise _refusal(kind, f"is refused: {reason}")
    warnings = matcher.get_grammar_warnings()
    if warnings:
        raise _refusal(kind, f"cannot be enforced exactly: {_first_lines(warnings[0])}")
    _try(matcher, kind, seconds)
    refuse_growth(kind, text, grammar, special, seconds)
    return grammar


def _grammar(kind: str, text: str) -> str:
    if kind == JSON_SCHEMA:
        return schema_grammar(enforced(read_json(text)))
    if kind == REGEX:
        if not text:
            raise _refusal(kind, "is empty; give an expression that an answer can match")
        grammar: str = llguidance.LLMatcher.grammar_from_regex(text)
        return grammar
    if kind == LARK:
        whole, bare = _with_exact_schemas(text)
        rule = endless_rule(bare)
        if rule is not None:
            raise _refusal(
                kind, f"never comes to an end: no alternative of the rule {rule} is without itself; add one"
            )
        return lark_grammar(whole)
    if kind == CHOICE:
        return choice_grammar(json.loads(text))
    if kind == TOOL_CALLS:
        return lark_grammar(tool_grammar(msgspec.json.decode(text, type=ToolCalls), enforced))
    if kind == READY_MADE and text in READY_MADE_GRAMMARS:
        return READY_MADE_GRAMMARS[text]
    raise _refusal(kind, f"is {text[:60]!r}; use one of {', '.join(READY_MADE_GRAMMARS)}")


def enforced(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """A schema as llguidance takes it.

    Args:
        schema: As :func:`~edged.decoding.constraints.schema_reading.read_json` has read it.

    Raises:
        InvalidArgumentError: It cannot be enforced.
    """
    places = check_schema(schema)
    refuse_lost_keys(schema, places, small_tokenizer())
    return exact(schema)


def _with_exact_schemas(lark: str) -> tuple[str, str]:
    """The grammar, whose schemas are held to what those on their own are held to, and said as they are.

    Returns:
        It, and the same with a text in the place of each schema.

    Raises:
        InvalidArgumentError: One cannot be enforced.
    """
    whole: list[str] = []
    bare: list[str] = []
    done = 0
    for word, start in json_places(lark):
        if word < done:
            continue  # inside of the one before
        try:
            schema, end = read_json_at(lark, start)
            if isinstance(schema, dict):
                whole += [lark[done:start], json.dumps(_laid_out(schema), ensure_ascii=False)]
                bare += [lark[done:word], '"json"']
                done = end
        except ValueError:
            continue  # llguidance says what is wrong with it
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{LARK}: {error.message}", field=LARK) from None
    return "".join([*whole, lark[done:]]), "".join([*bare, lark[done:]])


def _laid_out(schema: dict[str, Any]) -> dict[str, Any]:
    """A grammar's schema as llguidance takes it, with what the grammar says of its white space.

    Raises:
        InvalidArgumentError: It cannot be enforced, or says something else in that place.
    """
    layout = schema.pop("x-guidance", {})
    unknown = sorted(set(layout) - _LAYOUT) if isinstance(layout, dict) else ["itself"]
    if unknown:
        raise refuse(
            f"$.x-guidance.{unknown[0][:100]}", f"is not taken; it may have {', '.join(sorted(_LAYOUT))}"
        )
    checked = enforced(schema)
    return {**checked, "x-guidance": layout} if layout else checked


def _try(matcher: llguidance.LLMatcher, kind: str, seconds: float) -> None:
    """Take some steps of one answer.

    Raises:
        InvalidArgumentError: A step is beyond the limits, or no text at all has this form.
    """
    generator = random.Random(0)  # noqa: S311 - the same trial every time
    end = min(seconds, time.process_time() + _TRIAL_SECONDS)
    marks = len(Vocabulary().tokens)
    for step in range(_TRIAL_STEPS):
        matcher.compute_ff_bytes()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            reason = _first_lines(matcher.get_error())
            if "NoExtension" in reason:
                raise _refusal(kind, "allows no text at all")
            reason = next((words for sign, words in _REASONS.items() if sign in reason), reason)
            raise _refusal(kind, f"is too complex or never ends: {reason}")
        # Single bytes, the longest way, and marks.
        allowed = [token for token in (*range(_END), *range(marks, mask.bit_length())) if mask >> token & 1]
        if not allowed:
            if step == 0:
                raise _refusal(kind, "allows no text but the empty one")
            return
        if not matcher.consume_token(generator.choice(allowed)):
            reason = _first_lines(matcher.get_error())
            reason = next((words for sign, words in _REASONS.items() if sign in reason), reason)
            raise _refusal(kind, f"is too complex: {reason}")
        if matcher.is_stopped() or time.process_time() > end:
            return


def _refusal(kind: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{kind}: the constraint {what}", field=kind)


def _first_lines(message: str) -> str:
    """The part of llguidance's message that is for people, on one line."""
    text = message.partition("<non-verbose/>")[0].partition("<state>")[0]
    return " ".join(text.split())[:_SHOWN]
