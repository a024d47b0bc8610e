"""The doctor's checks of the service: its unit, its credentials, its sockets."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from edged.cli.checks import FAILURE, NOTE, OK, WARNING, Finding
from edged.errors import EdgedError
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edged.config import Config, ListenConfig

_DAY = 86400.0
_SOON_DAYS = 30
_FREE_BYTES = 2**30


def check_unit() -> Iterator[Finding]:
    """The systemd service, where there is one."""
    if shutil.which("systemctl") is None:
        return
    names = ("LoadState", "ActiveState", "SubState", "StatusText", "Result", "UnitFileState", "NRestarts")
    try:
        done = subprocess.run(  # noqa: S603 - constants
            ["systemctl", "show", "edged.service", "--property", ",".join(names)],  # noqa: S607 - the system's
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if done.returncode or values.get("LoadState", "not-found") == "not-found":
        if not done.returncode:
            yield Finding(
                "service", NOTE, "not installed", "to run edged at boot: sudo edgectl service install"
            )
        return
    state, said = values.get("ActiveState", ""), values.get("StatusText", "")
    text = f"{state} ({values.get('SubState', '')}){': ' + said if said else ''}"
    restarts = int(values.get("NRestarts") or 0)
    if state == "failed":
        yield Finding(
            "service",
            FAILURE,
            f"{text}, {values.get('Result', '')}",
            "see journalctl -u edged, then: systemctl reset-failed edged && systemctl start edged",
        )
    elif restarts:
        yield Finding(
            "service",
            WARNING,
            f"{text}; systemd has restarted it {restarts} times",
            "see journalctl -u edged",
        )
    elif values.get("UnitFileState") != "enabled":
        yield Finding(
            "service", NOTE, f"{text}; it does not start at boot", "run: sudo systemctl enable edged"
        )
    else:
        yield Finding("service", OK, text)


def check_listen(listen: ListenConfig) -> Iterator[Finding]:
    """Certificates, tokens and sockets of a configuration."""
    yield from _check_certificates(listen)
    if listen.tokens is not None:
        from edged.server.tokens import TokenFile  # noqa: PLC0415 - grpc may be what is broken

        try:
            TokenFile(listen.tokens).check()
        except EdgedError as error:
            yield Finding("tokens", FAILURE, error.message, "see edgectl token --help")
        else:
            yield Finding("tokens", OK, str(listen.tokens))
    if listen.i_accept_off_host_access_without_tls_and_authentication:
        yield Finding(
            "access",
            WARNING,
            "listen.i_accept_off_host_access_without_tls_and_authentication is set: everybody on the network may call",
            "set listen.tls and listen.tokens, and remove the key",
        )
    for index, socket in enumerate(listen.sockets):
        yield from _check_socket(f"listen.sockets[{index}]", socket.path, socket.owner, socket.group)
    if listen.unix is not None:
        yield from _check_socket("listen.unix", listen.unix, "", "")


def _check_certificates(listen: ListenConfig) -> Iterator[Finding]:
    tls = listen.tls
    if tls.certificate is None or tls.key is None:
        return
    from edged.server.certificates import Certificates  # noqa: PLC0415 - cryptography may be what is broken

    certificates = Certificates(tls)
    try:
        certificates.check()
    except EdgedError as error:
        yield Finding("certificate", FAILURE, error.message, "give a certificate and its key, both in PEM")
        return
    expiry = certificates.expires_at()
    days = (0.0 if expiry is None else expiry - time.time()) / _DAY
    if days < 0:
        yield Finding(
            "certificate",
            FAILURE,
            f"{tls.certificate} expired {-days:.0f} days ago",
            "put a new pair in place",
        )
    elif days < _SOON_DAYS:
        yield Finding(
            "certificate", WARNING, f"{tls.certificate} expires in {days:.0f} days", "put a new pair in place"
        )
    else:
        yield Finding("certificate", OK, f"{tls.certificate}, {days:.0f} days left")
    mode = tls.key.stat().st_mode
    if mode & 0o007:
        yield Finding(
            "certificate", WARNING, f"everybody may read the key {tls.key}", f"run: chmod o-rwx {tls.key}"
        )


def _check_socket(field: str, path: Path, owner: str, group: str) -> Iterator[Finding]:
    """Whether a socket's folder, owner and group exist."""
    if not path.parent.is_dir():
        yield Finding(
            "socket",
            NOTE if str(path).startswith("/run/") else FAILURE,
            f"{field}: there is no folder {path.parent}",
            "the service makes /run/edged by itself; any other has to be made: mkdir -p",
        )
    for name, find, kind in ((owner, pwd.getpwnam, "user"), (group, grp.getgrnam, "group")):
        if name and not name.isdecimal():
            try:
                find(name)
            except KeyError:
                yield Finding(
                    "socket", FAILURE, f"{field}: there is no {kind} {name}", f"make it: {kind}add {name}"
                )


def check_places(config: Config) -> Iterator[Finding]:
    """Room where the models lie, and whether the service's user may read them."""
    for model in config.models:
        if not model.path.is_dir():
            continue
        free = shutil.disk_usage(model.path).free
        if free < _FREE_BYTES:
            yield Finding(
                "disk",
                WARNING,
                f"{format_size(free)} free beside model {model.name}",
                "make room in its file system",
            )
        try:
            user = pwd.getpwnam("edged")
        except KeyError:
            continue
        if os.geteuid() == 0 and not _may_read(model.path, user.pw_uid, user.pw_gid):
            yield Finding(
                "permissions",
                WARNING,
                f"the service's user edged may not read {model.path}",
                f"run: chgrp -R edged {model.path} && chmod -R g+rX {model.path}; home folders are hidden from it",
            )


def _may_read(path: Path, user: int, group: int) -> bool:
    """Whether a user reaches a folder by its mode bits; lists are not looked at."""
    for folder in (path, *path.parents):
        status = folder.stat()
        shift = 6 if status.st_uid == user else 3 if status.st_gid == group else 0
        wanted = 0o5 if folder == path else 0o1
        if (status.st_mode >> shift) & wanted != wanted:
            return False
    return True
