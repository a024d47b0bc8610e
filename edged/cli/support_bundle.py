"""``edgectl support-bundle``: one file with all that helps whoever helps, and nothing of secrets or prompts."""

import io
import json
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from edged import __version__
from edged.cli.exit_codes import ExitCode
from edged.cli.options import AddressOption
from edged.whole_file import whole_file

_SECRETS = (
    (re.compile(r"edged_(?=[a-z_]*[A-Z0-9-])[A-Za-z0-9_-]{43}"), "[token]"),
    (re.compile(r"(?i)(bearer\s+)\S+"), r"\1[token]"),
    (
        re.compile(
            r"(?i)((?:password|passwd|secret|token|api[-_]?key)[\"']?\s*[=:]\s*[\"']?)(?!/)[^\s\"',;]{6,}"
        ),
        r"\1[hidden]",
    ),
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        "[key]",
    ),
    (re.compile(r"sha256:[0-9a-f]{64}"), "sha256:[digest]"),
    (re.compile(r"(https?://)[^/\s:@]+:[^/\s@]+@"), r"\1[user]@"),
)
_COMMANDS = {
    "systemd/status.txt": ["systemctl", "status", "--no-pager", "--full", "edged.service"],
    "systemd/unit.txt": ["systemctl", "cat", "edged.service"],
    "systemd/journal.txt": [
        "journalctl",
        "--unit",
        "edged.service",
        "--lines",
        "2000",
        "--no-pager",
        "--output",
        "short-iso",
    ],
    "system/kernel.txt": ["uname", "-a"],
    "system/memory.txt": ["free", "-m"],
    "system/disks.txt": ["df", "-h"],
    "system/kernel-gpu.txt": ["dmesg", "--level", "err,warn", "--time-format", "iso"],
    "gpu/nvidia-smi.txt": ["nvidia-smi", "-q"],
    "gpu/devices.txt": ["sh", "-c", "ls -l /dev/nvidia* /dev/nvmap /dev/nvgpu/* /dev/dri 2>&1"],
    "gpu/nvpmodel.txt": ["nvpmodel", "-q"],
}
_FILES = {
    "system/os-release.txt": "/etc/os-release",
    "system/meminfo.txt": "/proc/meminfo",
    "system/cpuinfo.txt": "/proc/cpuinfo",
    "gpu/driver.txt": "/proc/driver/nvidia/version",
    "gpu/l4t.txt": "/etc/nv_tegra_release",
}
_LIMIT = 2**20
_SECONDS = 15


def command(
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write it.",
            show_default="edged-support-TIME.tar.gz",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-f", metavar="FILE", help="The configuration.", show_default="/etc/edged/edged.yaml"
        ),
    ] = None,
    address: AddressOption = None,
) -> int:
    """Collect state, configuration, log and facts of this machine into one file to send with a report.

    Tokens, keys and passwords are cut out, and prompts and answers are in none of it: the daemon logs neither. Read it
    before you send it all the same.
    """
    place = (output or Path(f"edged-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")).expanduser()
    config = config or Path("/etc/edged/edged.yaml")
    # Nobody else's to read from its first byte on.
    with whole_file(place, 0o600) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in _content(config, address):
            data = without_secrets(content).encode("utf-8", "replace")[:_LIMIT]
            member = tarfile.TarInfo(f"edged-support/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))
            sys.stderr.write(f"  {name}\n")
    sys.stdout.write(f"{place}\n")
    return ExitCode.DONE


def without_secrets(text: str) -> str:
    """``text`` with tokens, keys, passwords and digests cut out."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def _content(config: Path, address: str | None) -> Iterator[tuple[str, str]]:
    """Name and text of every file; one that cannot be had says why."""
    parts: dict[str, Callable[[], str]] = {
        "about.txt": lambda: (
            f"edged {__version__}, Python {sys.version}, {platform.platform()}, {time.ctime()}\n"
        ),
        "status.json": lambda: _status(address),
        "metrics.txt": lambda: _metrics(address),
        "configuration.json": lambda: _configuration(config),
        "ledger.txt": lambda: _ledger(config),
        "doctor.json": lambda: _doctor(config, address),
        "packages.txt": _packages,
        "board.json": _board,
    }
    parts |= {name: partial(_run, words) for name, words in _COMMANDS.items()}
    parts |= {name: partial(_read, Path(path)) for name, path in _FILES.items()}
    for name, make in parts.items():
        try:
            yield name, make()
        except Exception as error:  # noqa: BLE001 - the rest is wanted all the more
            yield name, f"not available: {type(error).__name__}: {error}\n"


def _status(address: str | None) -> str:
    from edged.cli.connection import connect  # noqa: PLC0415 - grpc may be what is broken
    from edged.cli.message_json import as_object  # noqa: PLC0415

    with connect(address) as client:
        return json.dumps(as_object(client.status(timeout=5.0)), indent=2)


def _metrics(address: str | None) -> str:
    import http.client  # noqa: PLC0415
    import socket  # noqa: PLC0415

    from edged.cli.connection import connect  # noqa: PLC0415

    with connect(address) as client:
        place = client.status(timeout=5.0).metrics_address
    if not place:
        return "metrics.listen is not set\n"
    connection = http.client.HTTPConnection("localhost" if place.startswith("unix:") else place, timeout=5)
    if place.startswith("unix:"):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(5)
        connection.sock.connect(place.removeprefix("unix:"))
    connection.request("GET", "/metrics")
    return connection.getresponse().read(_LIMIT).decode("utf-8", "replace")


def _configuration(path: Path) -> str:
    """What the file means, key by key: paths and numbers, and no content of any file that it names."""
    from edged.config_reader import read_config  # noqa: PLC0415

    return json.dumps({"file": str(path), **asdict(read_config(path))}, indent=2, default=str)


def _ledger(path: Path) -> str:
    from edged.config_reader import read_config  # noqa: PLC0415
    from edged.memory.ledger import compute_ledger  # noqa: PLC0415

    ledger = compute_ledger(read_config(path))
    rows = [f"{row.bytes:>16,}  {row.name}  ({row.note})" for row in ledger.rows]
    return "\n".join(
        [*rows, f"{ledger.total:>16,}  total", f"{ledger.budget:>16,}  budget", ledger.advice, ""]
    )


def _doctor(config: Path, address: str | None) -> str:
    from edged.cli.doctor import examine  # noqa: PLC0415

    findings = examine(config if config.is_file() else None, address)
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def _packages() -> str:
    from edged.cli.requirements import requirements  # noqa: PLC0415

    lines = [
        f"{item.name} {item.installed or 'missing'} (wanted {item.wanted or 'any'})"
        for item in requirements()
    ]
    return "\n".join([*sorted(set(lines)), ""])


def _board() -> str:
    from edged.jetson import read_board  # noqa: PLC0415

    board = read_board()
    return "no Jetson\n" if board is None else json.dumps(asdict(board), indent=2)


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - constants
            words, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        return f"{words[0]} is not on this machine\n"
    return (done.stdout + done.stderr)[-_LIMIT:] or f"exit status {done.returncode}\n"


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_LIMIT).decode("utf-8", "replace")
