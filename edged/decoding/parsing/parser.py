"""Takes one answer apart as it comes. How the text was cut into pieces changes nothing.

Text that may still become a mark is held back, and so is white space that a mark would take with it. A call is given
when it is complete; what looks like one and is malformed comes back as text, to the last character.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.decoding.parsing.calls import Call, Tools
    from edged.decoding.parsing.formats import ToolFormat


@dataclass
class Pieces:
    """What became final: text, thoughts and calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class _State(enum.Enum):
    GAP = enum.auto()  # at the start, or after thoughts or a call: marks may come, white space is held
    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


class AnswerParser:
    """One answer.

    Args:
        reasoning: What thoughts stand between; None where they are not looked for.
        tools: Format of calls; None where they are not looked for.
        known: The tools of the chat.
        thinking: The prompt has opened the thoughts already.
    """

    def __init__(
        self,
        reasoning: tuple[str, str] | None = None,
        tools: ToolFormat | None = None,
        known: Tools | None = None,
        *,
        thinking: bool = False,
    ) -> None:
        self._marks = reasoning
        self._format = tools
        self._known = known
        self._buffer = ""
        self._state = _State.REASONING if thinking and reasoning is not None else _State.GAP
        self._thoughts = ""  # given out already, to know whether white space leads them
        self._drops_space = False  # the white space of the gap belongs to the mark before it
        self._after_call = False
        self._opened = ""  # what the call began with, and the white space before that
        self._searched = 0  # characters of it in which no end begins
        self._first_end = 0  # after its first end that stood inside a text
        self._pieces = Pieces()

    def feed(self, text: str) -> Pieces:
        """Take more of the answer; return what became final."""
        self._buffer += text
        while self._step():
            pass
        pieces, self._pieces = self._pieces, Pieces()
        return pieces

    def flush(self) -> Pieces:
        """The answer ended: return all that is left."""
        while self._state is _State.CALL and not self._end_call():
            while self._step():
                pass
        buffer, self._buffer = self._buffer, ""
        if self._state is _State.REASONING:
            self._think(buffer.rstrip())
        elif self._state is _State.TEXT:
            self._say(buffer)
        elif buffer.strip() or not (self._drops_space or self._after_call):
            self._say(buffer.lstrip() if self._drops_space else buffer)
        pieces, self._pieces = self._pieces, Pieces()
        return pieces

    def _step(self) -> bool:
        """Go as far as one state goes; whether another step may go on."""
        if not self._buffer:
            return False
        if self._state is _State.GAP:
            return self._gap()
        if self._state is _State.TEXT:
            return self._in_text()
        if self._state is _State.REASONING:
            return self._in_reasoning()
        return self._in_call()

    def _gap(self) -> bool:
        stripped = self._buffer.lstrip()
        if self._after_call and self._format is not None and self._format.bare:
            stripped = stripped.removeprefix(";").lstrip()  # what separates two calls of Llama's
        if not stripped:
            return False
        space = "" if self._drops_space else self._buffer[: len(self._buffer) - len(stripped)]
        marks = [mark for mark in (self._marks[0] if self._marks else "", self._start()) if mark]
        for mark in marks:
            if stripped.startswith(mark):
                self._enter(mark, space, stripped[len(mark) :])
                return True
        if any(mark.startswith(stripped) for mark in marks):
            return False
        if self._format is not None and self._format.bare and stripped[0] == "{":
            self._open(space, stripped)
            return True
        if self._drops_space:
            self._buffer = stripped
        self._state = _State.TEXT
        return True

    def _start(self) -> str:
        return "" if self._format is None else self._format.start

    def _enter(self, mark: str, space: str, rest: str) -> None:
        if self._marks is not None and mark == self._marks[0]:
            self._state, self._buffer, self._thoughts = _State.REASONING, rest, ""
        else:
            self._open(space + mark, rest)

    def _open(self, mark: str, body: str) -> None:
        self._state, self._opened, self._buffer = _State.CALL, mark, body
        self._searched = self._first_end = 0

    def _in_text(self) -> bool:
        start = self._start()
        place = self._buffer.find(start) if start and not (self._format and self._format.bare) else -1
        if place >= 0:
            text = self._buffer[:place].rstrip()
            self._say(text)
            self._open(self._buffer[len(text) : place + len(start)], self._buffer[place + len(start) :])
            return True
        if not start or (self._format is not None and self._format.bare):
            self._say(self._buffer)
            self._buffer = ""
            return False
        self._release(start, self._say)
        return False

    def _in_reasoning(self) -> bool:
        assert self._marks is not None, "thoughts have marks"  # noqa: S101
        if not self._thoughts:
            self._buffer = self._buffer.lstrip()
        end = self._marks[1]
        place = self._buffer.find(end)
        if place < 0:
            self._release(end, self._think)
            return False
        self._think(self._buffer[:place].rstrip())
        self._buffer = self._buffer[place + len(end) :]
        self._state, self._drops_space, self._after_call = _State.GAP, True, False
        return True

    def _in_call(self) -> bool:
        assert self._format is not None and self._known is not None, "calls have a format"  # noqa: S101, PT018
        found = self._format.end_of(self._buffer, self._searched)
        if found is None:
            self._searched = max(0, len(self._buffer) - len(self._format.end) + 1) if self._format.end else 0
            return False
        body = self._buffer[: found[0]]
        calls = self._format.read(body, self._known)
        if calls is not None:
            self._give(calls)
            self._buffer = self._buffer[found[1] :]
        elif self._format.is_open(body):
            # It may stand inside a text of the call. If no later end makes it one, this was its end after all.
            self._first_end = self._first_end or found[1]
            self._searched = found[1]
        else:
            self._malformed(self._first_end or found[1])
        return True

    def _end_call(self) -> bool:
        """The answer ended inside a call: it is one without its end, or text. Whether all of it was taken."""
        assert self._format is not None and self._known is not None, "calls have a format"  # noqa: S101, PT018
        calls = self._format.read(self._buffer, self._known)
        if calls is not None:
            self._give(calls)
            self._buffer = ""
            return True
        self._malformed(self._first_end or len(self._buffer))
        return not self._buffer

    def _malformed(self, end: int) -> None:
        """What looked like a call, up to ``end``, is text."""
        self._say(self._opened + self._buffer[:end])
        self._buffer = self._buffer[end:]
        self._state = _State.TEXT

    def _give(self, calls: list[Call]) -> None:
        self._pieces.calls += tuple(calls)
        self._state, self._drops_space, self._after_call = _State.GAP, False, True

    def _release(self, mark: str, give: Callable[[str], None]) -> None:
        """Give out the buffer but its end that may become ``mark``, and the white space before that."""
        buffer = self._buffer
        held = next(
            (size for size in range(min(len(mark) - 1, len(buffer)), 0, -1) if buffer.endswith(mark[:size])),
            0,
        )
        final = buffer[: len(buffer) - held].rstrip()
        self._buffer = buffer[len(final) :]
        give(final)

    def _say(self, text: str) -> None:
        self._pieces.text += text

    def _think(self, text: str) -> None:
        self._thoughts = self._thoughts or text[:1]
        self._pieces.reasoning += text
