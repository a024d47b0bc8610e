"""Progress of long work on standard error."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from edged.cli.terminal import console
from edged.units import format_size

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_SILENCE_SECONDS = 5.0
"""Between two lines of progress where there is no terminal."""


class ProgressBars:
    """Progress on standard error: bars on a terminal, a line every few seconds elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live: Any = None
        self._tasks: dict[str, TaskID] = {}
        self._said = 0.0

    def __enter__(self) -> Self:
        sys.stderr.write(self._title + "\n")
        sys.stderr.flush()
        if sys.stderr.isatty():
            self._live = Progress(
                TextColumn("{task.description:>9}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %", markup=False),
                TextColumn("{task.fields[sizes]}", markup=False),
                TimeRemainingColumn(),
                console=console(sys.stderr),
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def report(self, what: str, done: int, total: int) -> None:
        """Take ``done`` of ``total`` units of ``what``; units are bytes for weights."""
        sizes = f"{format_size(done)} of {format_size(total)}" if total > 1024 else ""
        if self._live is not None:
            if what not in self._tasks:
                self._tasks[what] = self._live.add_task(what, total=total, sizes=sizes)
            self._live.update(self._tasks[what], completed=done, total=total, sizes=sizes)
            return
        now = time.monotonic()
        if not done or (done < total and now - self._said < _SILENCE_SECONDS):
            return
        self._said = now
        percent = 100 * done // total if total else 100
        sys.stderr.write(f"  {what} {percent} %{'  ' + sizes if sizes else ''}\n")
        sys.stderr.flush()
