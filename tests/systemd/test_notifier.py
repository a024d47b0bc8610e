"""What systemd receives."""

from __future__ import annotations

import os
import socket

import pytest

from edged.systemd import Notifier


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
