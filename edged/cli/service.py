"""``edgectl service``: sets up the systemd service of this edged, and takes it away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.exit_codes import ExitCode
from edged.cli.service_files import (
    CONFIG,
    HARDWARE_KINDS,
    hardware_kind,
    hidden_interpreter,
    plan_files,
    remove_files,
    write_plan,
)
from edged.cli.terminal import say_error
from edged.errors import FailedPreconditionError

_ACTIONS = ("install", "uninstall")
_BOOTED = Path("/run/systemd/system")
"""There where systemd runs (sd_booted(3))."""


def command(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="install or uninstall.", show_default=False)
    ],
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-f",
            metavar="FILE",
            help="install: copy this to /etc/edged/edged.yaml where none is; an example otherwise.",
            show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option("--hardware", metavar="KIND", help="install: jetson, rtx or cpu.", show_default="found"),
    ] = "",
    off_host: Annotated[
        bool,
        typer.Option(
            "--off-host",
            help="install: let the service use the network beyond loopback.",
            show_default=False,
        ),
    ] = False,
    now: Annotated[
        bool,
        typer.Option("--now", help="install: enable and start it too.", show_default=False),
    ] = False,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge",
            help="uninstall: remove configuration, models, state and cache too.",
            show_default=False,
        ),
    ] = False,
    root: Annotated[
        Path,
        typer.Option(
            "--root", metavar="FOLDER", help="Write below this folder and call nothing.", show_default="/"
        ),
    ] = Path("/"),
) -> int:
    """Install edged as a systemd service with a user of its own and a sandbox, or uninstall it.

    install writes the unit, a drop-in for the GPU that is found, the user and, where there is none, a configuration.
    uninstall stops the service and removes what install wrote; configuration and models stay without --purge.
    """
    if action not in _ACTIONS:
        raise typer.BadParameter(f"{action!r} is not one of {', '.join(_ACTIONS)}", param_hint="'ACTION'")
    if hardware and hardware not in HARDWARE_KINDS:
        raise typer.BadParameter(
            f"{hardware!r} is not one of {', '.join(HARDWARE_KINDS)}", param_hint="'--hardware'"
        )
    live = root == Path("/")
    if live and os.geteuid() != 0:
        say_error("the service's files belong to root; run it with sudo")
        return ExitCode.NO
    if action == "uninstall":
        return _uninstall(root, live=live, purge=purge)
    program = Path(sys.prefix) / "bin" / "edged"
    hidden = hidden_interpreter(program)
    if hidden and live:
        raise FailedPreconditionError(hidden)
    kind = hardware or hardware_kind()
    plan = plan_files(program=program, config=config, kind=kind, off_host=off_host, root=root)
    for place in write_plan(plan, root):
        sys.stdout.write(f"wrote {place}\n")
    if not live:
        return ExitCode.DONE
    _call("systemd-sysusers", "edged.conf")
    for folder in plan.folders:
        shutil.chown(root / folder, "edged", "edged")
        shutil.chown((root / folder).parent, "edged", "edged")
    _reload_manager()
    if now:
        _call("systemctl", "enable", "--now", "edged.service")
        return ExitCode.DONE
    sys.stdout.write(
        f"for the hardware {kind}. Next: put a model into /var/lib/edged/models, name it in /{CONFIG}, then\n"
        "  systemctl enable --now edged && edgectl status --wait 5min\n"
        "Members of the group edged may use its socket: usermod -aG edged USER\n"
    )
    return ExitCode.DONE


def _uninstall(root: Path, *, live: bool, purge: bool) -> int:
    if live and _BOOTED.is_dir():
        subprocess.run(["systemctl", "disable", "--now", "edged.service"], check=False)  # noqa: S607 - the system's
    gone = remove_files(root, purge=purge)
    for place in gone:
        sys.stdout.write(f"removed {place}\n")
    if live:
        _reload_manager()
    if not gone:
        sys.stdout.write("nothing was installed by edgectl\n")
    return ExitCode.DONE


def _reload_manager() -> None:
    """Let systemd read its units again, where it runs: an image that is being built has none."""
    if _BOOTED.is_dir():
        _call("systemctl", "daemon-reload")


def _call(*words: str) -> None:
    """Run a program of systemd.

    Raises:
        FailedPreconditionError: It is missing or fails.
    """
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603 - constants
    except FileNotFoundError:
        raise FailedPreconditionError(f"{words[0]} is missing: this needs a system with systemd") from None
    if done.returncode:
        raise FailedPreconditionError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
