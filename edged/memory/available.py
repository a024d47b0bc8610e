"""How much memory this machine, or the control group the process lives in, still has."""

from __future__ import annotations

from pathlib import Path


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that programs can still take: ``MemAvailable``, or less where a control group (version 2) allows less.

    None where the system does not say.
    """
    rooms = _cgroup_rooms(root)
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split()[:1]:
            rooms.append(int(rest.split()[0]) * 1024)
    return min(rooms) if rooms else None


def _cgroup_rooms(root: Path) -> list[int]:
    """What each control group around this process has left, in bytes."""
    path = next(
        (line[3:] for line in _read(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/"
    )
    mount = root / "sys/fs/cgroup"
    folder = mount / path.lstrip("/")
    rooms = []
    while True:
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            rooms.append(max(0, int(limit) - int(used)))
        if folder == mount or mount not in folder.parents:
            return rooms
        folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
