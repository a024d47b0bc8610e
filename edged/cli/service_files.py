"""The files of the systemd service: which ones, with which content, for this machine."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from edged.errors import FailedPreconditionError
from edged.whole_file import write_whole

MARK = "# Installed by `edgectl service install`; `edgectl service uninstall` removes it.\n"
"""First line of what is written, so that nothing of anybody else is removed."""
UNIT = Path("etc/systemd/system/edged.service")
HARDWARE = Path("etc/systemd/system/edged.service.d/10-hardware.conf")
OFF_HOST = Path("etc/systemd/system/edged.service.d/20-off-host.conf")
USER = Path("etc/sysusers.d/edged.conf")
CONFIG = Path("etc/edged/edged.yaml")
HARDWARE_KINDS = ("jetson", "rtx", "cpu")


def sources() -> Path:
    """The folder of the unit and its drop-ins: of the installed package, or of the source tree.

    Raises:
        FailedPreconditionError: Neither is there.
    """
    places = (
        Path(sys.prefix) / "share" / "edged" / "systemd",
        Path(__file__).resolve().parents[2] / "deploy" / "systemd",
    )
    for place in places:
        if (place / "edged.service").is_file():
            return place
    raise FailedPreconditionError(
        f"the unit's files are in neither of {', '.join(map(str, places))}; install edged again"
    )


def hardware_kind(root: Path = Path("/")) -> str:
    """``jetson``, ``rtx`` or ``cpu``: what the devices of this machine say."""
    try:
        compatible = (root / "proc/device-tree/compatible").read_bytes().split(b"\0")
    except OSError:
        compatible = []
    if any(name.startswith(b"nvidia,tegra") for name in compatible) or (root / "dev/nvmap").exists():
        return "jetson"
    if (root / "dev/nvidiactl").exists() or (root / "proc/driver/nvidia/version").exists():
        return "rtx"
    return "cpu"


def hidden_interpreter(program: Path, home: Path = Path("/home")) -> str:
    """Why a service with ProtectHome could not run ``program``; empty where it could.

    Args:
        program: The daemon's program; its first line names its interpreter.
        home: Folder of home folders.
    """
    interpreter = Path(sys.executable).resolve()
    for path in (program, interpreter):
        if any(path.is_relative_to(folder) for folder in (home, Path("/root"), Path("/run/user"))):
            return (
                f"{path} lies in a home folder, which the service cannot see (ProtectHome) and another user may not "
                "read; install edged elsewhere, such as: /usr/bin/python3 -m venv /opt/edged && "
                "/opt/edged/bin/pip install edged"
            )
    return ""


@dataclass(frozen=True)
class Plan:
    """What an installation writes.

    Attributes:
        files: Path below the root → content.
        folders: Folders that are made, below the root.
    """

    files: dict[Path, str]
    folders: tuple[Path, ...] = (Path("var/lib/edged/models"),)


def plan_files(
    *, program: Path, config: Path | None, kind: str, off_host: bool, user: str = "edged", root: Path
) -> Plan:
    """The files of an installation; an existing configuration is left as it is.

    Args:
        program: The daemon's program.
        config: A configuration to copy; None copies the example.
        kind: One of ``HARDWARE_KINDS``.
        off_host: Whether the service may use the network beyond loopback.
        user: User and group of the service.
        root: Where the files will lie below.
    """
    source = sources()
    unit = (source / "edged.service").read_text("utf-8")
    unit = re.sub(r"(?m)^ExecStart=.*$", f"ExecStart={program} --config /{CONFIG}".replace("\\", r"\\"), unit)
    unit = re.sub(r"(?m)^(User|Group)=.*$", rf"\1={user}", unit)
    files = {UNIT: MARK + unit}
    if user == "edged":
        files[USER] = MARK + (source / "edged.sysusers").read_text("utf-8")
    if kind != "cpu":
        files[HARDWARE] = MARK + (source / "drop-ins" / f"{kind}.conf").read_text("utf-8")
    if off_host:
        files[OFF_HOST] = MARK + (source / "drop-ins" / "off-host.conf").read_text("utf-8")
    if not (root / CONFIG).exists():
        files[CONFIG] = (config or source / "edged.yaml").read_text("utf-8")
    return Plan(files)


def write_plan(plan: Plan, root: Path) -> list[Path]:
    """Write the files, each as a whole; return their places.

    Raises:
        FailedPreconditionError: A file is there that somebody else wrote.
    """
    for path in plan.files:
        place = root / path
        if path != CONFIG and place.exists() and not is_ours(place):
            raise FailedPreconditionError(
                f"{place} is there and was not written by edgectl; move it away, or keep it and install nothing"
            )
    written = []
    for path, content in plan.files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, content, 0o644)
        written.append(place)
    for folder in plan.folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    return written


def is_ours(path: Path) -> bool:
    """Whether ``edgectl service install`` wrote a file."""
    try:
        return path.read_text("utf-8", errors="replace").startswith(MARK)
    except OSError:
        return False


def remove_files(root: Path, *, purge: bool) -> list[Path]:
    """Remove what an installation wrote; with ``purge`` also configuration, state and cache. Return what is gone."""
    gone = []
    for path in (UNIT, HARDWARE, OFF_HOST, USER):
        place = root / path
        if is_ours(place):
            place.unlink()
            gone.append(place)
    folder = root / HARDWARE.parent
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if purge:
        for name in ("etc/edged", "var/lib/edged", "var/cache/edged"):
            if (root / name).is_dir():
                shutil.rmtree(root / name)
                gone.append(root / name)
    return gone
