"""The unit and its drop-ins as systemd reads them, without booting it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edged.cli import service_files
from edged.cli.main import main
from edged.daemon import ExitCode
from edged.errors import FailedPreconditionError

SYSTEMD = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
EXPOSURE = 2.0
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def installed(tmp_path, kind, *, off_host=False):
    """The unit and its drop-ins as they would be installed, with a program that exists."""
    plan = service_files.plan_files(
        program=Path("/bin/true"), config=None, kind=kind, off_host=off_host, root=tmp_path
    )
    service_files.write_plan(plan, tmp_path)
    return tmp_path / service_files.UNIT


@needs_systemd
@pytest.mark.parametrize("kind", service_files.HARDWARE_KINDS)
@pytest.mark.parametrize("off_host", [False, True])
def test_systemd_finds_nothing_to_say(tmp_path, kind, off_host):
    unit = installed(tmp_path, kind, off_host=off_host)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "edged" in line]
    assert said == []
    assert done.returncode == 0


@needs_systemd
@pytest.mark.parametrize("kind", service_files.HARDWARE_KINDS)
@pytest.mark.parametrize("off_host", [False, True])
def test_the_exposure_is_small(tmp_path, kind, off_host):
    unit = installed(tmp_path, kind, off_host=off_host)
    # The drop-ins are joined to one file: the offline mode reads just that.
    text = unit.read_text() + "".join(
        path.read_text() for path in sorted(unit.with_name("edged.service.d").glob("*.conf"))
    )
    joined = tmp_path / "joined" / "edged.service"
    joined.parent.mkdir()
    joined.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", joined],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd before 250 rates no files")
    match = re.search(r"exposure level for edged\.service: ([0-9.]+)", done.stdout)
    assert match, done.stdout + done.stderr
    assert float(match[1]) <= EXPOSURE


def test_what_is_not_tried_again_are_the_statuses_that_no_new_try_changes():
    text = (SYSTEMD / "edged.service").read_text()
    (line,) = re.findall(r"(?m)^RestartPreventExitStatus=(.*)$", text)
    final = {ExitCode.USAGE, ExitCode.MODEL, ExitCode.ENGINE_AGAIN, ExitCode.CONFIG}
    assert {int(word) for word in line.split()} == {int(code) for code in final}


def test_the_unit_runs_no_program_that_a_small_system_may_lack():
    """Debian's smallest has no /bin/kill: a reload failed there."""
    for path in SYSTEMD.rglob("*"):
        text = path.read_text() if path.suffix in (".service", ".conf") else ""
        programs = set(re.findall(r"(?m)^Exec\w+=[-@:+!]*(\S+)", text))
        assert programs <= {"/opt/edged/bin/edged", "/bin/sh"}, path


def test_every_hardware_has_its_devices():
    jetson = (SYSTEMD / "drop-ins" / "jetson.conf").read_text()
    assert "char-nvmap" in jetson
    assert "char-nvgpu*" in jetson
    assert "SupplementaryGroups=video render" in jetson
    assert "modprobe@nvidia_uvm.service" in (SYSTEMD / "drop-ins" / "rtx.conf").read_text()


def test_every_group_of_a_drop_in_is_made_where_it_is_missing():
    """systemd starts no unit with a group that does not exist."""
    made = re.findall(r"(?m)^[ug] (\S+)", (SYSTEMD / "edged.sysusers").read_text())
    for path in [SYSTEMD / "edged.service", *(SYSTEMD / "drop-ins").glob("*.conf")]:
        for line in re.findall(r"(?m)^(?:SupplementaryGroups|User|Group)=(.*)$", path.read_text()):
            assert set(line.split()) <= set(made), path


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ({"proc/device-tree/compatible": b"nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0"}, "jetson"),
        ({"dev/nvmap": b""}, "jetson"),
        ({"dev/nvidiactl": b""}, "rtx"),
        ({"proc/device-tree/compatible": b"raspberrypi,5-model-b\0"}, "cpu"),
        ({}, "cpu"),
    ],
)
def test_the_hardware_is_found(tmp_path, made, kind):
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert service_files.hardware_kind(tmp_path) == kind


def test_install_and_uninstall_leave_nothing_but_the_configuration(tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text("models: []\n")
    root = tmp_path / "root"
    words = ["--root", str(root), "--hardware", "jetson", "--off-host", "--config", str(config)]
    assert main(["service", "install", *words]) == 0
    unit = (root / service_files.UNIT).read_text()
    assert f"ExecStart={sys.prefix}/bin/edged --config /etc/edged/edged.yaml\n" in unit
    assert (root / service_files.CONFIG).read_text() == "models: []\n"
    assert (root / service_files.OFF_HOST).exists()
    assert main(["service", "install", *words]) == 0, "a second time writes the same"
    assert main(["service", "uninstall", "--root", str(root)]) == 0
    left = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    assert left == {service_files.CONFIG}
    assert main(["service", "uninstall", "--root", str(root), "--purge"]) == 0
    assert not (root / "etc/edged").exists()
    assert "removed" in capsys.readouterr().out


def test_a_unit_of_somebody_else_is_left_alone(tmp_path, capsys):
    unit = tmp_path / service_files.UNIT
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    assert main(["service", "install", "--root", str(tmp_path), "--hardware", "cpu"]) == 3
    assert "was not written by edgectl" in capsys.readouterr().err
    assert main(["service", "uninstall", "--root", str(tmp_path)]) == 0
    assert unit.read_text() == "[Service]\n"


def test_a_program_in_a_home_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    assert service_files.hidden_interpreter(Path("/opt/edged/bin/edged")) == ""
    assert "ProtectHome" in service_files.hidden_interpreter(Path("/home/me/.venv/bin/edged"))
    monkeypatch.setattr("sys.executable", "/root/.pyenv/versions/3.11.7/bin/python3")
    assert "ProtectHome" in service_files.hidden_interpreter(Path("/opt/edged/bin/edged"))


def test_missing_sources_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(service_files, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    with pytest.raises(FailedPreconditionError, match="install edged again"):
        service_files.sources()
