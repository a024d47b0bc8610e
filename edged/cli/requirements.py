"""The packages that edged asks for, and which of them are here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_COMPARISONS = {
    ">=": lambda have, want: have >= want,
    "==": lambda have, want: have == want,
    ">": lambda have, want: have > want,
    "<=": lambda have, want: have <= want,
    "<": lambda have, want: have < want,
    "!=": lambda have, want: have != want,
}


@dataclass(frozen=True)
class Requirement:
    """One package of the metadata of edged.

    Attributes:
        name: Name of the package.
        wanted: Versions that will do, such as ``>=2.4``; empty for any.
        extra: The extra that asks for it; empty for the product itself.
        installed: Version that is here; empty when it is not.
    """

    name: str
    wanted: str
    extra: str
    installed: str

    @property
    def satisfied(self) -> bool:
        """Whether the installed version will do."""
        if not self.installed:
            return False
        for clause in filter(None, (part.strip() for part in self.wanted.split(","))):
            match = re.fullmatch(r"(>=|==|<=|!=|>|<)\s*([0-9][^\s]*)", clause)
            if match is None:
                continue
            if not _COMPARISONS[match[1]](_numbers(self.installed), _numbers(match[2])):
                return False
        return True


def requirements() -> list[Requirement]:
    """Every package that the installed edged names.

    Raises:
        metadata.PackageNotFoundError: edged runs from a source tree and is not installed.
    """
    found = []
    for line in metadata.requires("edged") or ():
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is not None:
            extra = _EXTRA.search(match[3] or "")
            found.append(
                Requirement(
                    match[1], match[2].strip(), extra[1] if extra else "", installed_version(match[1])
                )
            )
    return found


def installed_version(package: str) -> str:
    """Version of a package; empty when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """``(2, 13)`` of ``2.13.0+cpu``: its leading numbers without zeros at the end."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
