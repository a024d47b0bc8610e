"""The static budget as a table, for ``plan`` and ``status``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rich.table import Table
from rich.text import Text

from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable


class Row(Protocol):
    """A row of the ledger, as it is planned or as it came over the wire."""

    @property
    def name(self) -> str:
        """What the memory is for."""

    @property
    def bytes(self) -> int:
        """How much it is."""

    @property
    def note(self) -> str:
        """How it was computed."""


def ledger_table(rows: Iterable[Row], *, total: int, budget: int) -> Table:
    """One row for each use of memory, their sum, and the budget beside it.

    Args:
        rows: The uses.
        total: Their sum in bytes.
        budget: What it has to fit in, in bytes.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("memory")
    table.add_column("size", justify="right")
    table.add_column("how", overflow="fold")
    for row in rows:
        table.add_row(row.name, format_size(row.bytes), row.note)
    fits = total <= budget
    table.add_row(
        Text("total", style="bold"),
        Text(format_size(total), style="bold" if fits else "bold red"),
        f"of a budget of {format_size(budget)}" if fits else f"more than the budget of {format_size(budget)}",
    )
    return table
