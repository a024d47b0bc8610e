"""Checked access to the values of a model's configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConfigValues:
    """A mapping from a JSON file whose values are checked as they are read.

    Args:
        values: The mapping.
        path: Where it lies in the file; stands before each key in messages (``rope_scaling.``).
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def has(self, key: str) -> bool:
        """Whether the key is there with a value (null counts as absent)."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:  # noqa: ANN401 - what JSON holds
        """The value as it stands.

        Raises:
            CheckpointError: The key is missing.
        """
        if not self.has(key):
            name = self._path + key
            raise CheckpointError(f"{name} is missing: the configuration must say it", field=name)
        return self._values[key]

    def refusal(self, key: str, why: str) -> CheckpointError:
        """The error that refuses this key's value; the caller raises it."""
        name = self._path + key
        shown = repr(self._values.get(key))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{name} {shown} {why}", field=name)

    def text(self, key: str) -> str:
        """A string.

        Raises:
            CheckpointError: Missing, or something else.
        """
        value = self.raw(key)
        if not isinstance(value, str):
            raise self.refusal(key, "must be a string")
        return value

    def count(self, key: str, *, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to ``most``.

        Raises:
            CheckpointError: Missing, or something else.
        """
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, "must be a whole number of at least 1")
        if value > most:
            raise self.refusal(key, f"must be at most {most}")
        return value

    def number(self, key: str, *, above: float | None = None, default: float | None = None) -> float:
        """A finite number.

        Raises:
            CheckpointError: Missing without a default, not a finite number, or not above ``above``.
        """
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refusal(key, "must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.refusal(key, "must be a finite number")
        if above is not None and number <= above:
            raise self.refusal(key, f"must be above {above:g}")
        return number

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false.

        Raises:
            CheckpointError: Something else.
        """
        if not self.has(key):
            return default
        value = self.raw(key)
        if not isinstance(value, bool):
            raise self.refusal(key, "must be true or false")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of ``length`` finite positive numbers.

        Raises:
            CheckpointError: Missing, or something else.
        """
        value = self.raw(key)
        if not isinstance(value, list) or len(value) != length:
            found = f"has {len(value)}" if isinstance(value, list) else "is no list"
            raise CheckpointError(
                f"{self._path}{key} {found}; it must list {length} numbers, one for each pair of a head's elements",
                field=self._path + key,
            )
        return tuple(self._positive(key, item) for item in value)

    def _positive(self, key: str, item: object) -> float:
        """One number of a list."""
        try:
            if isinstance(item, (int, float)) and not isinstance(item, bool) and 0 < float(item) < math.inf:
                return float(item)
        except OverflowError:  # a whole number that no float holds
            pass
        raise self.refusal(key, f"must hold finite numbers above 0, found {str(item)[:40]}")

    def part(self, key: str) -> ConfigValues:
        """A mapping inside this one.

        Raises:
            CheckpointError: Missing, or something else.
        """
        value = self.raw(key)
        if not isinstance(value, dict):
            raise self.refusal(key, "must be an object")
        return ConfigValues(value, f"{self._path}{key}.")
