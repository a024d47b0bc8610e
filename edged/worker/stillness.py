"""Whether a process stands still: stopped by a signal, or asleep without having done anything.

A silent engine may be busy with a long step. One whose threads all sleep, and which has used no processor for seconds,
is not: it was stopped, or waits for a lock that nobody will release. A thread that runs, is ready to run (a machine that
is overloaded) or waits for a disk (weights that are read, memory that comes back from swap) is work.
"""

from __future__ import annotations

import enum
import os
import time
from pathlib import Path

_MOST_WORK = 0.01
"""Part of one processor that a process may use while it stands still: helper threads of libraries wake now and then."""
_STOPPED, _ASLEEP, _AT_WORK = frozenset("T"), frozenset("TSI"), frozenset("RD")
"""States of threads (proc(5)). ``t``, a debugger's doing, is none of them: whoever looks at an engine has the longer time."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Stillness(enum.Enum):
    """How a process stands still."""

    NONE = "its process works"
    STOPPED = "its process is stopped (SIGSTOP)"
    ASLEEP = "all threads of its process sleep"


class StillnessWatch:
    """Looks at one process, from time to time.

    Args:
        pid: The process.
        proc: Where the kernel shows processes.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._since: tuple[float, float] | None = None

    def forget(self) -> None:
        """It has given a sign of life: what is seen next is compared to nothing before."""
        self._since = None

    def look(self) -> Stillness | None:
        """How it has stood still since the last look; None where nothing is known, as at the first of one that sleeps."""
        now = time.monotonic()
        states, used = self._read()
        before, self._since = self._since, None
        if not states or used is None or not states <= _ASLEEP | _AT_WORK:
            return None
        worked = bool(states & _AT_WORK)
        if before is not None and used - before[1] > _MOST_WORK * (now - before[0]) + 1 / _TICKS:
            worked = True
        self._since = (now, used) if worked or before is None else before
        if worked or before is None:
            return Stillness.NONE if worked else None
        return Stillness.STOPPED if states <= _STOPPED else Stillness.ASLEEP

    def _read(self) -> tuple[set[str], float | None]:
        """State of each thread, and the seconds that the process has used of a processor."""
        try:
            states = {_fields(thread / "stat")[0] for thread in (self._folder / "task").iterdir()}
            fields = _fields(self._folder / "stat")
            return states, (int(fields[11]) + int(fields[12])) / _TICKS
        except (OSError, ValueError, IndexError):  # it has ended, or this kernel shows nothing
            return set(), None


def _fields(stat: Path) -> list[str]:
    """What follows the name in parentheses, which may hold anything: the state first."""
    return stat.read_text("ascii", "replace").rpartition(")")[2].split()
