"""What an operator relies on, under a real systemd."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import run

from edged.client import Chunk, Client, Finished
from edged.errors import UnavailableError

ADDRESS = "127.0.0.1:50051"
LONG = {"temperature": 0.0, "ignore_eos": True}


def test_the_unit_is_clean_and_tight(package):
    done = run("systemd-analyze", "verify", "/usr/lib/systemd/system/edged.service")
    assert (done.stdout + done.stderr).strip() == ""
    assert run("systemctl", "is-enabled", "edged", check=False).stdout.strip() == "disabled"


def test_ready_comes_after_the_first_token(service):
    service.start()  # returns when the unit is active
    assert service.status()["state"] == "serving"
    assert service.show("StatusText") == "serving smollm"
    messages = service.journal()
    loaded = next(index for index, text in enumerate(messages) if "first_token_seconds" in text)
    started = next(index for index, text in enumerate(messages) if text.startswith("Started edged"))
    assert loaded < started
    answer = service.edgectl("generate", "Once upon a time", "-n", "5", "-t", "0").stdout
    assert len(answer.split()) >= 3


def test_it_runs_as_its_user_without_any_privilege(running):
    for pid in (running.status()["daemon_pid"], running.status()["engine_pid"]):
        lines = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert lines["NoNewPrivs"] == "1"
        assert lines["Seccomp"] == "2"
        assert int(lines["CapEff"], 16) == int(lines["CapBnd"], 16) == 0
        assert int(lines["Uid"].split()[0]) != 0
    assert "exposure level for edged.service" in (
        text := run("systemd-analyze", "security", "edged.service").stdout
    )
    assert float(text.rsplit("edged.service: ", 1)[1].split()[0]) <= 2.0


def test_it_sees_no_homes_and_writes_nowhere_but_in_its_folders(running):
    """Through the eyes of the engine: its mounts and its user."""
    Path("/home/friend/letter").write_text("dear")
    pid = str(running.status()["engine_pid"])

    def tries(script):
        inside = [
            "nsenter",
            "--target",
            pid,
            "--mount",
            "setpriv",
            "--reuid=edged",
            "--regid=edged",
            "--clear-groups",
        ]
        return run(*inside, "sh", "-c", script, check=False).returncode == 0

    assert tries("true")
    assert not tries("cat /home/friend/letter")
    assert not tries("ls /root/.")
    for folder in ("/usr", "/opt/edged", "/etc/edged", "/srv/edged"):
        assert not tries(f"touch {folder}/written"), folder
    for folder in ("/var/lib/edged", "/var/cache/edged", "/run/edged", "/tmp"):
        assert tries(f"touch {folder}/written && rm {folder}/written"), folder
    assert run("nsenter", "--target", pid, "--mount", "touch", "/usr/written", check=False).returncode, (
        "for root"
    )


def test_the_folders_and_the_socket_have_the_rights_that_are_documented(running):
    socket = Path("/run/edged/edged.sock")
    assert stat.S_IMODE(socket.stat().st_mode) == 0o660
    assert socket.owner() == socket.group() == "edged"
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o755
    for folder in ("/var/lib/edged", "/var/cache/edged"):
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o750
        assert Path(folder).owner() == "edged"
    path = f"unix:{socket}"
    assert running.edgectl("status", "--address", path, user="friend").returncode == 0
    refused = running.edgectl("status", "--address", path, user="stranger", check=False)
    assert refused.returncode == 2
    assert "join the group" in refused.stderr


def test_a_reload_takes_over_what_it_can_and_loses_no_stream(running):
    with Client(ADDRESS) as client:
        stream = iter(client.generate("Once upon a time", max_tokens=60, **LONG))
        next(event for event in stream if isinstance(event, Chunk))
        running.configure(log={"level": "debug"}, queue={"capacity": 3})
        run("systemctl", "reload", "edged")
        running.wait_status("a restart is needed for queue.capacity")
        assert list(stream)[-1].usage.generated_tokens == 60
    running.configure()
    run("systemctl", "reload", "edged")
    running.wait_status("reloaded: ")
    Path("/etc/edged/edged.yaml").write_text("nonsense: 1\n")
    run("systemctl", "reload", "edged")
    running.wait_status("reload refused")
    assert running.status()["state"] == "serving"
    running.configure()


def test_stopping_drains(running):
    with Client(ADDRESS) as client:
        stream = iter(client.generate("Once upon a time", max_tokens=80, **LONG))
        next(event for event in stream if isinstance(event, Chunk))
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(lambda: list(stream))
            running.stop()
            last = rest.result(300)[-1]
        assert isinstance(last, Finished)
        assert last.usage.generated_tokens == 80
    assert running.show("Result") == "success"
    assert not Path("/run/edged").exists()


def test_a_waiting_client_bridges_a_restart(running):
    with Client(ADDRESS, wait_for_ready=True) as client:
        assert client.generate("Hello", max_tokens=2, **LONG).answer()
        with ThreadPoolExecutor(1) as pool:
            restart = pool.submit(run, "systemctl", "restart", "edged")
            while running.show("ActiveState") == "active":
                time.sleep(0.01)
            client.wait_ready(60)
            answer = client.generate("Hello", max_tokens=4, timeout=60, **LONG).answer()
            restart.result(60)
        assert answer.finished.usage.generated_tokens == 4


@pytest.mark.parametrize("busy", [False, True])
def test_a_frozen_engine_is_ended_by_the_daemon_and_is_back(running, busy):
    """With the watchdog's defaults, in which a step on the CPU may take five minutes."""
    restarts = running.show("NRestarts")
    engine = running.status()["engine_pid"]
    with Client(ADDRESS) as client, Client(ADDRESS, wait_for_ready=True) as patient:
        if busy:
            stream = iter(client.generate("Once upon a time", max_tokens=400, **LONG))
            next(event for event in stream if isinstance(event, Chunk))
        os.kill(engine, signal.SIGSTOP)
        began = time.monotonic()
        if busy:
            answer = patient.generate("Hello", max_tokens=2, timeout=120, **LONG)
            with pytest.raises(UnavailableError, match="the engine hung"):
                list(stream)
            assert len(answer.answer().token_ids) == 2, "it was sent into the frozen engine"
    while not busy and running.edgectl("status", check=False).returncode == 0:
        assert time.monotonic() - began < running.back_seconds
        time.sleep(0.1)
    running.wait_serving(max(1.0, running.back_seconds - (time.monotonic() - began)))
    status = running.status()
    assert status["engine_pid"] != engine
    assert ("no step was finished" if busy else "no sign of life") in status["last_error"]
    assert "watchdog.stall_timeout" in status["last_error"]
    assert running.show("NRestarts") == restarts, "the daemon stayed"


@pytest.mark.parametrize("busy", [False, True])
def test_a_frozen_daemon_is_ended_by_systemd_and_is_back(running, busy):
    """Also while a request runs, though a step on the CPU may take five minutes."""
    restarts = int(running.show("NRestarts"))
    status = running.status()
    time.sleep(2)  # the daemon looks at its engine each half second, and then expects a sign of life sooner
    with Client(ADDRESS) as client:
        if busy:
            stream = iter(client.generate("Once upon a time", max_tokens=400, **LONG))
            next(event for event in stream if isinstance(event, Chunk))
        os.kill(status["daemon_pid"], signal.SIGSTOP)
        began = time.monotonic()
        if busy:
            with pytest.raises(UnavailableError):
                list(stream)
    while int(running.show("NRestarts")) == restarts:
        assert time.monotonic() - began < running.back_seconds
        time.sleep(0.1)
    running.wait_serving(max(1.0, running.back_seconds - (time.monotonic() - began)))
    assert any("Watchdog timeout" in text for text in running.journal())
    assert not Path(f"/proc/{status['engine_pid']}").exists(), "no engine outlives its daemon"


@pytest.mark.parametrize("which", ["daemon_pid", "engine_pid"])
def test_a_killed_process_comes_back(running, which):
    status = running.status()
    os.kill(status[which], signal.SIGKILL)
    end = time.monotonic() + running.back_seconds
    while time.monotonic() < end:
        done = running.edgectl("status", "--json", check=False)
        if done.returncode == 0 and running.status()[which] != status[which]:
            break
        time.sleep(0.05)
    running.wait_serving(5)


def test_a_refused_configuration_is_not_tried_again(service):
    service.stop()
    run("systemctl", "reset-failed", "edged", check=False)
    service.configure(memory={"budget": "300MiB"})
    assert run("systemctl", "start", "edged", check=False).returncode
    assert service.show("ActiveState") == "failed"
    assert service.show("ExecMainStatus") == "78"
    assert service.show("NRestarts") == "0"
    assert "300.00 MiB" in run("systemctl", "status", "edged", check=False).stdout


def test_a_model_without_its_torch_is_not_tried_again(service, torch_file):
    hidden = torch_file.with_suffix(".off")
    torch_file.rename(hidden)
    try:
        run("systemctl", "reset-failed", "edged", check=False)
        service.configure()
        assert run("systemctl", "start", "edged", check=False).returncode
        assert (service.show("ExecMainStatus"), service.show("NRestarts")) == ("78", "0")
        assert "executor auto needs torch, which is not installed" in service.show("StatusText")
    finally:
        hidden.rename(torch_file)


@pytest.fixture
def full_cache():
    """No room for anything in the service's cache folder."""
    folder = Path("/var/cache/edged")
    run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
    run("dd", "if=/dev/zero", f"of={folder}/filling", check=False)
    yield folder
    run("umount", folder)


def test_a_second_crash_loop_ends_as_failed_with_a_status_that_says_why(service, torch_file, full_cache):
    """Also where the disk is full, on which the first loop is noted."""
    service.stop()
    (full_cache / "crash-loop").unlink(missing_ok=True)
    kept = torch_file.read_text()
    broken = Path("/opt/broken")
    broken.mkdir()
    (broken / "torch.py").write_text("raise RuntimeError('this torch does not start')\n")
    torch_file.write_text(f"{broken}\n")
    try:
        run("systemctl", "reset-failed", "edged", check=False)
        service.configure()
        run("systemctl", "start", "--no-block", "edged")
        end = time.monotonic() + 60 + 3 * service.back_seconds
        while service.show("ActiveState") != "failed":
            assert time.monotonic() < end, service.journal()[-5:]
            time.sleep(0.2)
        assert service.show("NRestarts") == "1"
        assert service.show("ExecMainStatus") == "76"
        shown = run("systemctl", "status", "edged", check=False).stdout
        assert "the engine ended 6 times in a row" in shown
        assert "this torch does not start" in shown
    finally:
        torch_file.write_text(kept)
        run("systemctl", "reset-failed", "edged", check=False)


def test_edgectl_installs_and_uninstalls_the_service(service):
    unit = Path("/etc/systemd/system/edged.service")
    home = run("/srv/edged/.venv/bin/python", "-m", "edged.cli", "service", "install", check=False)
    if os.path.realpath("/srv/edged/.venv/bin/python").startswith("/root"):
        assert home.returncode
        assert "ProtectHome" in home.stderr
        assert not unit.exists()
    done = run("edgectl", "service", "install", "--hardware", "cpu", "--now")
    assert f"wrote {unit}" in done.stdout
    assert "/etc/edged/edged.yaml" not in done.stdout, "a configuration that is there stays"
    service.wait_serving(60)
    assert run("systemctl", "is-enabled", "edged").stdout.strip() == "enabled"
    done = run("edgectl", "service", "uninstall")
    assert f"removed {unit}" in done.stdout
    assert not unit.exists()
    assert Path("/etc/edged/edged.yaml").exists()


def test_the_package_goes_without_a_trace_but_the_models(service):
    service.start()
    model = Path("/var/lib/edged/models/mine/config.json")
    model.parent.mkdir()
    model.write_text("{}")
    run("dpkg", "--purge", "edged")
    assert service.show("ActiveState") == "inactive"
    assert not Path("/opt/edged/bin").exists()
    assert not Path("/etc/edged").exists()
    assert model.exists()
    assert subprocess.run(["which", "edgectl"], check=False, capture_output=True).returncode
