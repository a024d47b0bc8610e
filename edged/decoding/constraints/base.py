"""What a constraint is: its kinds, and its form between the processes."""

from __future__ import annotations

import json
from typing import Any

import msgspec

JSON_SCHEMA = "json_schema"
REGEX = "regex"
LARK = "lark"
CHOICE = "choice"
READY_MADE = "ready_made"
TOOL_CALLS = "tool_choice"
KINDS = (JSON_SCHEMA, REGEX, LARK, CHOICE, READY_MADE, TOOL_CALLS)

# JSON as Python's json.dumps writes it. Free white space would let a hot model write nothing else until max_tokens.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Of llguidance, for the check and for the engine: what passes there runs here in bounded time and memory."""


class Constraint(msgspec.Struct, frozen=True):
    """The form of one answer, as a request gives it.

    Attributes:
        kind: One of ``KINDS``.
        text: The schema, the expression, the grammar; the texts of a choice as a JSON list; the ready-made one's name;
            ``tool_grammar.ToolCalls`` as JSON.
    """

    kind: str
    text: str


class Grammar(msgspec.Struct, frozen=True):
    """A constraint that has been checked, as the engine takes it: llguidance's own JSON form."""

    text: str


class Check(msgspec.Struct, frozen=True):
    """One constraint to check.

    Attributes:
        kind: Of the constraint.
        text: Its text.
        memory: Bytes that the check may take beyond what the process has.
        cpu: Seconds of a core that it may take.
        seconds: Seconds that it may take by the clock.
    """

    kind: str
    text: str
    memory: int
    cpu: float
    seconds: float


class End(msgspec.Struct, frozen=True):
    """How a check's process ended.

    Attributes:
        status: Its exit status; below 0 the signal that ended it.
        cpu: Seconds of a core that it took.
    """

    status: int
    cpu: float


def lark_grammar(lark: str) -> str:
    """The form that llguidance takes of a grammar in Lark's syntax."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def schema_grammar(schema: Any) -> str:  # noqa: ANN401 - any JSON
    """The form that llguidance takes of a JSON schema."""
    wrapped = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    guided = {**wrapped, "x-guidance": JSON_LAYOUT}
    return json.dumps({"grammars": [{"json_schema": guided}]}, ensure_ascii=False)


def literal(text: str) -> str:
    """A string of Lark's syntax that stands for ``text`` alone."""
    return json.dumps(text, ensure_ascii=False).replace(
        "\x7f", r"\u007f"
    )  # which that syntax has not in strings


_MOST_ALTERNATIVES = 1000
"""Of one rule; llguidance's parser takes twice as many items at a time. A terminal has no such limit."""


def choice_grammar(texts: list[str]) -> str:
    """The form that llguidance takes of a choice between texts."""
    if len(texts) <= _MOST_ALTERNATIVES:
        return lark_grammar("start: " + " | ".join(map(literal, texts)))
    alternatives = " | ".join(map(literal, sorted({text for text in texts if text})))
    return lark_grammar(f"start: TEXT{' | ' + literal('') if '' in texts else ''}\nTEXT: {alternatives}")
