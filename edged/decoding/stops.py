"""When an answer ends: the conditions, and the search for stop strings in streamed text.

A stop string is looked for in the text of the answer, not in its tokens, so it is found across token borders and inside
a token. Among all occurrences in the text the one that *ends* first is the match; of several that end at the same
character the longest is. The answer is the text before the match. None of this depends on how the text was cut.

Text that may still turn into a stop string is held back: exactly the longest end of the text that is the beginning of
some stop string. It is released with the first character that rules the string out.
"""

from __future__ import annotations

import msgspec


class Stops(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a request ends."""

    max_tokens: int
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of the model and the request's own."""
    eos_token_ids: tuple[int, ...] = ()
    """The part of ``token_ids`` that is the model's own; reported as end of sequence."""
    min_tokens: int = 0
    """Nothing ends the answer before this many tokens."""


class _Candidate:
    """One stop string and how much of it the text ends with (Knuth, Morris and Pratt 1977).

    The table of borders grows with the deepest partial match seen, so a long stop string costs nothing until text
    begins to match it.
    """

    __slots__ = ("_borders", "depth", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.depth = 0
        self._borders = [0, 0]  # [k]: longest proper prefix of string[:k] that is also its end

    def advance(self, char: str) -> int:
        """Take one more character of text; return the length of the prefix that the text now ends with."""
        string, borders, depth = self.string, self._borders, self.depth
        while depth and string[depth] != char:
            depth = borders[depth]
        if string[depth] == char:
            depth += 1
            if depth == len(borders):
                border = borders[depth - 1]
                while border and string[border] != char:
                    border = borders[border]
                borders.append(border + 1 if string[border] == char else 0)
        self.depth = depth
        return depth


class StopMatcher:
    """Searches one answer for its stop strings.

    Args:
        strings: The stop strings; none of them empty.
    """

    __slots__ = ("_active", "_by_first", "_firsts", "_held", "matched")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.matched: str | None = None
        """The stop string that was found; after it no text is taken."""
        self._held = ""
        self._active: list[_Candidate] = []  # those with a partial match
        self._by_first: dict[str, list[_Candidate]] = {}
        for string in dict.fromkeys(strings):
            if not string:
                raise ValueError("a stop string has at least one character")
            self._by_first.setdefault(string[0], []).append(_Candidate(string))
        self._firsts = frozenset(self._by_first)

    def feed(self, text: str) -> str:
        """Take more text of the answer; return what became final, without any part of a stop string."""
        if self.matched is not None:
            return ""
        if not self._active and self._firsts.isdisjoint(text):
            return text
        for index, char in enumerate(text):
            found = self._advance(char)
            if found:
                final = (self._held + text[: index + 1])[: -len(found)]
                self.matched, self._held, self._active = found, "", []
                return final
        text = self._held + text
        kept = len(text) - max((candidate.depth for candidate in self._active), default=0)
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """The answer ended otherwise: what was held back is final now."""
        held, self._held, self._active = self._held, "", []
        return held

    def _advance(self, char: str) -> str:
        """Move every candidate by one character; return the longest stop string that is complete, if any."""
        found = ""
        active = [candidate for candidate in self._active if candidate.advance(char)]
        for candidate in self._by_first.get(char, ()):
            if not candidate.depth:
                candidate.advance(char)
                active.append(candidate)
        for candidate in active:
            if candidate.depth == len(candidate.string) and candidate.depth > len(found):
                found = candidate.string
        self._active = active
        return found
