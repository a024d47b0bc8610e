"""What systemd receives."""

from __future__ import annotations

import os
import socket
import time

import pytest

from edged.systemd import CrashRecord, Notifier


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        yield receiver


def test_each_call_is_one_datagram(manager):
    notifier = Notifier(manager.getsockname())
    notifier.extend_timeout(30)
    notifier.ready("serving\nsmollm")
    notifier.status("x" * 2000)
    notifier.stopping("draining")
    assert manager.recv(4096) == b"EXTEND_TIMEOUT_USEC=30000000"
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving smollm"
    assert len(manager.recv(4096)) < 600
    assert manager.recv(4096) == b"STOPPING=1\nSTATUS=draining"


def test_abstract_socket():
    name = f"edged-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        receiver.settimeout(5)
        Notifier(f"@{name}").status("hello")
        assert receiver.recv(100) == b"STATUS=hello"


def test_without_systemd_nothing_happens(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notifier.from_environment().ready("serving")


def test_a_manager_that_is_gone_stops_nothing(tmp_path):
    Notifier(str(tmp_path / "gone")).ready("serving")


def test_children_do_not_inherit_the_socket(monkeypatch, manager):
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    Notifier.from_environment().status("mine")
    assert manager.recv(100) == b"STATUS=mine"
    assert "NOTIFY_SOCKET" not in os.environ


def test_signs_of_life_are_passed_on_and_not_all_of_them(manager, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("edged.systemd.time.monotonic", lambda: now[0])
    notifier = Notifier(manager.getsockname())
    notifier.alive()  # nothing was promised yet
    notifier.expect(8)
    assert manager.recv(100) == b"WATCHDOG_USEC=8000000\nWATCHDOG=1"
    notifier.expect(8)
    for _ in range(80):
        now[0] += 0.1
        notifier.alive()
    notifier.status("end")
    fed = list(iter(lambda: manager.recv(100), b"STATUS=end"))
    assert set(fed) == {b"WATCHDOG=1"}
    assert 4 <= len(fed) <= 8


def test_a_reload_says_when_it_began(manager):
    notifier = Notifier(manager.getsockname())
    notifier.reloading("reading")
    lines = manager.recv(200).decode().split("\n")
    assert lines[0] == "RELOADING=1"
    assert int(lines[1].removeprefix("MONOTONIC_USEC=")) > 0
    assert lines[2] == "STATUS=reading"


def test_children_do_not_believe_that_they_are_watched(monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    Notifier.from_environment()
    assert "WATCHDOG_USEC" not in os.environ
    assert "WATCHDOG_PID" not in os.environ


def test_a_second_crash_loop_within_the_hour_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHE_DIRECTORY", f"{tmp_path}:/elsewhere")
    assert CrashRecord.from_environment().note() is False
    assert CrashRecord.from_environment().note() is True
    CrashRecord.from_environment().clear()
    assert CrashRecord.from_environment().note() is False
    old = time.time() - CrashRecord.SECONDS - 1
    os.utime(tmp_path / "crash-loop", (old, old))
    assert CrashRecord.from_environment().note() is False


def test_a_clock_that_jumped_back_and_a_missing_folder_are_no_second_loop(tmp_path, monkeypatch):
    record = CrashRecord(str(tmp_path))
    record.note()
    later = time.time() + 1000
    os.utime(tmp_path / "crash-loop", (later, later))
    assert record.note() is False
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    assert CrashRecord.from_environment().note() is False
    assert CrashRecord(str(tmp_path / "none")).note() is False
