"""Which models are in memory: reserved ones have a place of their own, evictable ones share what is left.

Nothing here is loaded. The room of the evictable models is a row of the ledger, so whatever is loaded and unloaded, the
total does not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.errors import FailedPreconditionError, ResourceExhaustedError
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

RESERVED, EVICTABLE = "reserved", "evictable"


def shared_room(sizes: Collection[int], left: int) -> int:
    """Bytes that evictable models share: all that they could use of what is left, and at least the largest one.

    Args:
        sizes: Bytes of each.
        left: Bytes of the budget that nothing else needs.
    """
    return max(max(sizes, default=0), min(sum(sizes), left))


class Residency:
    """Which models are loaded, and what has to go for another.

    Args:
        sizes: Bytes of every model, by name, in the configuration's order.
        evictable: Names of the models that share a room; the others have places of their own.
        room: Bytes of that room.
    """

    def __init__(self, sizes: Mapping[str, int], evictable: Collection[str], room: int) -> None:
        self._sizes = dict(sizes)
        self._evictable = frozenset(evictable)
        self._room = room
        self._loaded: dict[str, None] = {}  # the one used last is the last one
        for name in self._sizes:
            if name not in self._evictable or self._used() + self._sizes[name] <= room:
                self._loaded[name] = None

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the models that are, or are to be, in memory, in the configuration's order."""
        return tuple(name for name in self._sizes if name in self._loaded)

    def size(self, name: str) -> int:
        """Bytes of a model."""
        return self._sizes[name]

    def is_evictable(self, name: str) -> bool:
        """Whether a model may be unloaded for another one."""
        return name in self._evictable

    def use(self, name: str) -> None:
        """A request came for a model: the others are to go first."""
        if name in self._loaded:
            del self._loaded[name]
            self._loaded[name] = None

    def victims(self, name: str, busy: Collection[str]) -> tuple[str, ...]:
        """The models to unload, the least recently used first, before ``name`` fits; none where it does.

        Args:
            name: A model that is not loaded.
            busy: Models with open requests: they stay.

        Raises:
            ResourceExhaustedError: It does not fit beside those that are busy.
        """
        missing = self._used() + self._sizes[name] - self._room
        if name not in self._evictable or missing <= 0:
            return ()
        found: list[str] = []
        for other in self._loaded:
            if other in self._evictable and other not in busy and missing > 0:
                found.append(other)
                missing -= self._sizes[other]
        if missing > 0:
            there = [other for other in self._loaded if other in self._evictable and other in busy]
            raise ResourceExhaustedError(
                f"model {name} needs {format_size(self._sizes[name])} and evictable models share "
                f"{format_size(self._room)}: {', '.join(there)} answers requests and stays; try again when it is idle, or "
                "unload it",
                field="name",
                retry_seconds=1.0,
            )
        return tuple(found)

    def add(self, name: str) -> None:
        """A model is loaded.

        Raises:
            FailedPreconditionError: It does not fit; what :meth:`victims` named is still there.
        """
        if name in self._evictable and self._used() + self._sizes[name] > self._room:
            raise FailedPreconditionError(f"model {name} does not fit beside {', '.join(self._loaded)}")
        self._loaded[name] = None

    def remove(self, name: str) -> None:
        """A model is not loaded any more."""
        self._loaded.pop(name, None)

    def _used(self) -> int:
        return sum(self._sizes[name] for name in self._loaded if name in self._evictable)
