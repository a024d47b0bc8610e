"""Whether a grammar in Lark's syntax can come to an end.

llguidance parses left-recursive rules (Earley), but takes rules that never end, such as ``start: "a" start``, and would
follow them until max_tokens. Here the productive rules are found, as in any textbook: a rule is productive if one of its
alternatives holds productive parts alone. Syntax is llguidance's to judge; what is not understood counts as productive.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKENS = re.compile(
    r"""
    (?P<space>[ \t\f]+|\\\n|//[^\n]*|\#[^\n]*)
  | (?P<newline>\n)
  | (?P<string>"(?:\\.|[^"\\\n])*"i?)
  | (?P<regex>/(?!/)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[imslux]*)
  | (?P<special><[^>\s]*>)
  | (?P<repeat>\{[ \t]*\d*[ \t]*(?:,[ \t]*\d*[ \t]*)?\}|~[ \t]*\d+(?:\.\.\d+)?|[?*+])
  | (?P<name>[!?]?[A-Za-z_][A-Za-z0-9_.\-]*)
  | (?P<other>->|[:|()\[\]&~,=!]|%[a-z_]+|.)
    """,
    re.VERBOSE,
)
_BLANK = re.compile(r"\s*")
_MOST_TOKENS = 200_000
_OTHER_SYNTAX = frozenset({"%json", "%regex", "%lark", "%llguidance", "%override", "%extend"})


class Token(NamedTuple):
    """One token of a grammar."""

    kind: str
    text: str


def endless_rule(lark: str) -> str | None:
    """The name of a rule that ``start`` needs and that never ends, or None."""
    rules = _rules(lark)
    if rules is None or "start" not in rules:
        return None
    users: dict[str, set[str]] = {}
    for name, body in rules.items():
        for token in body:
            if token.kind == "name":
                users.setdefault(token.text.lstrip("!?"), set()).add(name)
    productive: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in productive and _Body(rules[name], rules, productive).is_productive():
            productive.add(name)
            waiting.extend(users.get(name, ()))
    return None if "start" in productive else "start"


def json_places(lark: str) -> Iterator[tuple[int, int]]:
    """Where a grammar has ``%json``, and where what follows it begins. Texts, expressions and comments are passed over."""
    if "%json" not in lark:
        return
    at = 0
    while (match := _TOKENS.match(lark, at)) is not None:
        at = match.end()
        if match[0] == "%json":
            blank = _BLANK.match(lark, at)
            yield match.start(), at if blank is None else blank.end()


def _rules(lark: str) -> dict[str, list[Token]] | None:
    """The bodies of all rules by name; None if the grammar is too large or says what is not understood here."""
    tokens: list[Token] = []
    for match in _TOKENS.finditer(lark):
        kind = match.lastgroup or "other"
        if kind != "space":
            tokens.append(Token(kind, match[0]))
        if len(tokens) > _MOST_TOKENS or match[0] in _OTHER_SYNTAX:
            return None
    rules: dict[str, list[Token]] = {}
    current: list[Token] = []
    for line in _lines(tokens):
        head = _head(line)
        if head is not None:
            name, body = head
            current = rules.setdefault(name, [])
            current += [Token("other", "|"), *body] if current else body
        elif not line[0].text.startswith("%"):
            current += line  # a further alternative on a line of its own
    return rules


def _lines(tokens: list[Token]) -> list[list[Token]]:
    lines: list[list[Token]] = [[]]
    for token in tokens:
        if token.kind == "newline":
            lines.append([])
        else:
            lines[-1].append(token)
    return [line for line in lines if line]


def _head(line: list[Token]) -> tuple[str, list[Token]] | None:
    """Name and body of a line that begins a rule."""
    if line[0].kind != "name":
        return None
    for index, token in enumerate(line):
        if token.text == ":":
            return line[0].text.lstrip("!?"), line[index + 1 :]
        if token.text in ("|", "("):
            return None
    return None


class _Body:
    """Decides one rule's body by recursive descent.

    Args:
        tokens: Of the body.
        rules: All rules.
        productive: Names of those known to end.
    """

    def __init__(self, tokens: list[Token], rules: dict[str, list[Token]], productive: set[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._rules = rules
        self._productive = productive

    def is_productive(self) -> bool:
        """Whether one alternative is, as far as the rules are known."""
        try:
            return self._alternatives(depth=200)
        except (IndexError, RecursionError):
            return True  # a syntax error, which is llguidance's to name

    def _peek(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _alternatives(self, depth: int) -> bool:
        if depth == 0:
            raise RecursionError
        result = self._sequence(depth)
        while self._peek() == "|":
            self._at += 1
            result = self._sequence(depth) or result
        return result

    def _sequence(self, depth: int) -> bool:
        result = True
        while self._at < len(self._tokens) and self._peek() not in ("|", ")", "]"):
            if self._peek() == "->":
                self._at += 2
                continue
            item = self._item(depth)
            optional = False
            while self._at < len(self._tokens) and self._tokens[self._at].kind == "repeat":
                optional = optional or _allows_none(self._peek())
                self._at += 1
            result = result and (item or optional)
        return result

    def _item(self, depth: int) -> bool:
        token = self._tokens[self._at]
        self._at += 1
        if token.text in ("(", "["):
            result = self._alternatives(depth - 1)
            self._at += 1
            return result or token.text == "["
        if token.kind == "name":
            name = token.text.lstrip("!?")
            return name not in self._rules or name in self._productive
        return True


def _allows_none(repeat: str) -> bool:
    """Whether a repetition may be empty."""
    if repeat in ("?", "*"):
        return True
    first = re.match(r"[{~]\s*(\d*)", repeat)
    return first is not None and (first[1] == "" or int(first[1]) == 0)
