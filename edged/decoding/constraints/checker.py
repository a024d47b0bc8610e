"""The process that checks constraints: ``python -m edged.decoding.constraints.checker``, started by the daemon.

It says ``{}`` when it is ready, then reads one constraint a line from standard input and answers with one line, both JSON: ``{"kind": .., "text": ..}`` with
``{"grammar": ..}`` or ``{"error": ..}``. A library that runs into a stack's end, takes too much memory or hangs ends this
process and nothing else; the daemon kills it after its time and starts another one.

Beside the syntax it tries the grammar: masks and forced text of the first steps, over a small vocabulary. What
explodes there is refused before any token.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from typing import Any

import llguidance

from edged.decoding.constraints.base import (
    CHOICE,
    JSON_SCHEMA,
    LARK,
    LIMITS,
    READY_MADE,
    REGEX,
    choice_grammar,
    lark_grammar,
    schema_grammar,
)
from edged.decoding.constraints.lark_check import endless_rule
from edged.decoding.constraints.ready_made import READY_MADE_GRAMMARS
from edged.decoding.constraints.schema_check import exact, read_schema
from edged.errors import InvalidArgumentError

_MEMORY = 256 * 2**20
"""Bytes of address space beyond what the process has when it starts."""
_TRIAL_STEPS = 48
_TRIAL_SECONDS = 0.15
_SHOWN = 400
_END = 256


class _Vocabulary:
    """Every byte, every pair of printable ASCII, and one end of sequence: a model's vocabulary in small."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (
        *(bytes([byte]) for byte in range(256)),
        b"<end>",
        *(bytes([first, second]) for first in range(32, 127) for second in range(32, 127)),
    )
    special_token_ids = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def check(kind: str, text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """The grammar of a constraint, in llguidance's own form.

    Raises:
        InvalidArgumentError: It cannot be enforced, never ends, or is too complex.
    """
    grammar = _grammar(kind, text)
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        reason = _first_lines(matcher.get_error())
        if "coerce_one_of" in reason:
            reason = (
                "oneOf cannot be enforced where one JSON may fit several of its schemas; tell them apart by a type or a "
                "constant, or use anyOf"
            )
        raise _refusal(kind, f"is refused: {reason}")
    warnings = matcher.get_grammar_warnings()
    if warnings:
        raise _refusal(kind, f"cannot be enforced exactly: {_first_lines(warnings[0])}")
    _try(matcher, kind)
    return grammar


def _grammar(kind: str, text: str) -> str:
    if kind == JSON_SCHEMA:
        return schema_grammar(exact(read_schema(text)))
    if kind == REGEX:
        if not text:
            raise _refusal(kind, "is empty; give an expression that an answer can match")
        grammar: str = llguidance.LLMatcher.grammar_from_regex(text)
        return grammar
    if kind == LARK:
        rule = endless_rule(text)
        if rule is not None:
            raise _refusal(
                kind, f"never comes to an end: no alternative of the rule {rule} is without itself; add one"
            )
        return lark_grammar(text)
    if kind == CHOICE:
        return choice_grammar(json.loads(text))
    if kind == READY_MADE and text in READY_MADE_GRAMMARS:
        return READY_MADE_GRAMMARS[text]
    raise _refusal(kind, f"is {text[:60]!r}; use one of {', '.join(READY_MADE_GRAMMARS)}")


def _try(matcher: llguidance.LLMatcher, kind: str) -> None:
    """Take some steps of one answer.

    Raises:
        InvalidArgumentError: A step is beyond the limits, or no text at all has this form.
    """
    generator = random.Random(0)  # noqa: S311 - the same trial every time
    end = time.monotonic() + _TRIAL_SECONDS
    for step in range(_TRIAL_STEPS):
        matcher.compute_ff_bytes()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            reason = _first_lines(matcher.get_error())
            if "NoExtension" in reason:
                raise _refusal(kind, "allows no text at all")
            raise _refusal(kind, f"is too complex or never ends: {reason}")
        allowed = [token for token in range(_END) if mask >> token & 1]  # single bytes: the longest way
        if not allowed:
            if step == 0:
                raise _refusal(kind, "allows no text but the empty one")
            return
        if not matcher.consume_token(generator.choice(allowed)):
            raise _refusal(kind, f"is too complex: {_first_lines(matcher.get_error())}")
        if matcher.is_stopped() or time.monotonic() > end:
            return


def _refusal(kind: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{kind}: the constraint {what}", field=kind)


def _first_lines(message: str) -> str:
    """The part of llguidance's message that is for people, on one line."""
    text = message.partition("<non-verbose/>")[0].partition("<state>")[0]
    return " ".join(text.split())[:_SHOWN]


def _answer(line: str, tokenizer: llguidance.LLTokenizer) -> dict[str, Any]:
    asked = json.loads(line)
    try:
        return {"grammar": check(asked["kind"], asked["text"], tokenizer)}
    except InvalidArgumentError as error:
        return {"error": error.message}
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        return {"error": f"{asked['kind']}: the constraint is refused: {_first_lines(str(error))}"}


def main() -> None:
    """Answer until standard input ends."""
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary()), n_vocab=len(_Vocabulary.tokens), eos_token=_END
    )
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs a tenth of the start
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)  # noqa: T201 - ready
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(line, tokenizer)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
