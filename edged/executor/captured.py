"""What executors on a GPU have in common: captured steps, and the devices that scratch memory is planned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.errors import LedgerError
from edged.memory.packed_scratch import MULTIPROCESSORS

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Bucket:
    """A captured step."""

    tokens: int
    rows: int
    replay: Callable[[], None]
    replay_dense: Callable[[], None]
    """The same for steps none of whose queries attends sparsely: the launches of block selection are left out."""
    draw: Callable[[], None]
    """Draws the rows with a temperature, after either."""
    draw_with_options: Callable[[], None]
    """Draws these and the rows with options."""


def check_multiprocessors(count: int) -> None:
    """Refuses a device with more multiprocessors than scratch memory is planned for.

    Raises:
        LedgerError: It has.
    """
    if count > MULTIPROCESSORS:
        raise LedgerError(
            f"this device has {count} multiprocessors; scratch memory is planned for {MULTIPROCESSORS}: "
            "report this card"
        )
