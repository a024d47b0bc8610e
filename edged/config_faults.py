"""What is wrong with a configuration file: every fault, each with its place and its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_FAULTS = 50
"""Faults reported at once. A file with more is not a configuration; reading stops there."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        path: The key (``models[0].context_length``); empty when the whole file is meant.
        problem: What was found.
        remedy: What is allowed, or what to do.
        line: Line in the file, from 1; 0 when the fault has no place.
        column: Column in the file, from 1; 0 when the fault has no place.
    """

    path: str
    problem: str
    remedy: str
    line: int = 0
    column: int = 0

    def render(self, source: str) -> str:
        """``FILE:LINE:COLUMN: key: problem; remedy`` in one line."""
        place = f"{source}:{self.line}:{self.column}" if self.line else source
        subject = f"{self.path}: " if self.path else ""
        return f"{place}: {subject}{self.problem}; {self.remedy}"


class ConfigFileError(ConfigError):
    """A configuration file is refused; the message has one line for each fault.

    Args:
        faults: Every fault that was found, in the order of the file; at least one.
        source: Name of the file, as it stands in the message.
    """

    def __init__(self, faults: Iterable[Fault], *, source: str) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: (fault.line, fault.column)))
        lines = [fault.render(source) for fault in self.faults]
        if len(lines) > 1:
            more = " or more" if len(lines) >= MOST_FAULTS else ""
            lines.insert(0, f"{source}: {len(lines)}{more} faults")
        super().__init__("\n".join(lines), field=self.faults[0].path)


class TooManyFaultsError(Exception):
    """The bound on faults is reached; reading stops. It never leaves the reader."""


class FaultList:
    """Collects faults while a file is read."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._paths: set[str] = set()

    def add(self, fault: Fault) -> None:
        """Keep a fault.

        Raises:
            TooManyFaultsError: :data:`MOST_FAULTS` are kept; there is no use in more.
        """
        self.faults.append(fault)
        self._paths.add(fault.path)
        if len(self.faults) >= MOST_FAULTS:
            raise TooManyFaultsError

    def sound(self, *paths: str) -> bool:
        """Whether no fault was found at any of these keys."""
        return self._paths.isdisjoint(paths)


def show(value: str) -> str:
    """Text as it appears in a message: in quotes, printable, cut to 60 characters."""
    return _cut(repr(value) if repr(value).isprintable() else ascii(value))


def show_plain(value: str) -> str:
    """As :func:`show`, without quotes where every character is printable: for numbers, tags and keys."""
    return _cut(value) if value and value.isprintable() else show(value)


def child(path: str, key: str) -> str:
    """Path of ``key`` inside ``path``, as messages show it."""
    return f"{path}.{show_plain(key)}" if path else show_plain(key)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
