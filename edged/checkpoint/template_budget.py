"""What one rendering of a chat template may use: steps, processor time and characters."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from contextvars import Token

T = TypeVar("T")

MAX_COUNT = 100_000
"""The largest number that a template may pass where the result grows with it (a width, a count of columns)."""
_MAX_CONTAINER = 10_000_000
_STEPS_BETWEEN_CLOCKS = 256
# What a template keeps is bounded by what it makes: at the default limits 64 MB of text or two million items, and
# as much again as 32 times its input.
_CHARACTERS_OF_A_STEP = 32
_WIDTH = 4
"""Bytes that a character outside of ASCII may take."""


class BudgetError(Exception):
    """A template used more than it may; the message says what."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one rendering.

    Attributes:
        seconds: Processor time of the rendering thread, so that a busy machine does not shorten it.
        steps: Values looked at or made, on top of one for each character of the input; a text counts one for 32
            characters (for 8 that are not ASCII), an iteration of a loop or a call of a macro ten.
        characters: Of the result, and of every text on the way, on top of four times the input's.
    """

    seconds: float = 2.0
    steps: int = 2_000_000
    characters: int = 8 << 20


class Budget:
    """What is left to one rendering. A context manager that makes it the current one of this thread."""

    def __init__(self, limits: RenderLimits, input_characters: int = 0) -> None:
        self._limits = limits
        self.characters = limits.characters + 4 * input_characters
        self._steps = self._allowed = limits.steps + input_characters
        self._next_clock = self._steps - _STEPS_BETWEEN_CLOCKS
        self._end = time.thread_time() + limits.seconds
        self._token: Token[Budget] | None = None

    def __enter__(self) -> Budget:  # noqa: PYI034 - no subclasses
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)

    def spend(self, steps: int = 1) -> None:
        """Take steps from the budget.

        Raises:
            BudgetError: There are none left, or the time is over.
        """
        self._steps -= steps
        if self._steps < 0:
            raise BudgetError(f"it did not end within {self._allowed} steps")
        if self._steps < self._next_clock:
            self._next_clock = self._steps - _STEPS_BETWEEN_CLOCKS
            if time.thread_time() > self._end:
                raise BudgetError(f"it did not end within {self._limits.seconds:g} s")

    def check_characters(self, count: int, *, ascii_only: bool = True) -> None:
        """Allow a text of that many characters to be made; many texts together cost steps.

        Raises:
            BudgetError: It is too long, or too many were made.
        """
        self.check_length_of_text(count)
        self.spend((count if ascii_only else _WIDTH * count) // _CHARACTERS_OF_A_STEP)

    def check_length_of_text(self, count: int) -> None:
        """Allow a text to be that long.

        Raises:
            BudgetError: It is too long.
        """
        if count > self.characters:
            raise BudgetError(f"it makes a text of {count} characters; {self.characters} are allowed")


# Constant expressions are evaluated while a template is compiled, outside of any rendering.
_COMPILING = RenderLimits(seconds=60.0, steps=1 << 40, characters=1 << 20)
_CURRENT: ContextVar[Budget] = ContextVar("budget")


def current() -> Budget:
    """Return the budget of the rendering in this thread, or a fresh one for compiling."""
    return _CURRENT.get(None) or Budget(_COMPILING)


def check_count(value: object) -> None:
    """Allow a number that a result grows with.

    Raises:
        BudgetError: It is too large.
    """
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise BudgetError(f"it asks for {value:.0e} of something; {MAX_COUNT} are allowed")


def check_length(count: int) -> None:
    """Allow a list of that many items.

    Raises:
        BudgetError: It is too long.
    """
    if count > _MAX_CONTAINER:
        raise BudgetError(f"it makes a list of {count} items; {_MAX_CONTAINER} are allowed")
    current().spend(count)


def check_size(value: object) -> None:
    """Allow a value to be written out or compared, all that it contains included.

    A list that holds another one many times is small, but writing it is not.

    Raises:
        BudgetError: It has more values than there are steps left, or more characters than a text may have.
    """
    if value is None or isinstance(value, (str, int, float)):
        return
    budget = current()
    characters = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            characters += len(item)
            budget.check_length_of_text(characters)
        elif isinstance(item, dict):
            budget.spend(1 + 2 * len(item))
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            budget.spend(1 + len(item))
            waiting.extend(item)


def count_result(value: T) -> T:
    """Return what a filter, a method or a slice made, after counting it.

    Raises:
        BudgetError: It is too long, or too much was made.
    """
    if isinstance(value, str):
        current().check_characters(len(value), ascii_only=value.isascii())
    elif isinstance(value, (list, tuple, dict, bytes)):
        check_length(len(value))
    return value
