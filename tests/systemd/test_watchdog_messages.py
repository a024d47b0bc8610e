"""What a running daemon tells systemd's watchdog."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest

from edged.client import Chunk

LONG = 5.0
"""Seconds of one step, in which the engine says nothing and works."""


@pytest.fixture
def manager(tmp_path):
    """Stands for systemd: the socket's path, and what came through it when."""
    heard = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))

        def listen():
            while text := receiver.recv(4096).decode():
                heard.append((time.monotonic(), text))

        thread = threading.Thread(target=listen)
        thread.start()
        yield str(tmp_path / "notify"), heard
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", str(tmp_path / "notify"))
        thread.join()


@pytest.mark.one_python
def test_a_long_step_that_works_is_told_of_and_asks_for_no_more_time(start_daemon, manager):
    """So that a daemon which freezes now is found as soon as at any other moment."""
    address, heard = manager
    daemon = start_daemon(
        fake={"long_at": 10, "long_seconds": LONG},
        watchdog={"stall_timeout": "1s"},
        environment={"NOTIFY_SOCKET": address},
    )
    with daemon.client() as client:
        stream = client.generate([5, 6, 7], max_tokens=20, temperature=0.0, ignore_eos=True)
        times = [time.monotonic() for event in stream if isinstance(event, Chunk)]
    assert daemon.stop() == 0
    began, ended = max(itertools.pairwise(times), key=lambda pair: pair[1] - pair[0])
    during = [text for when, text in heard if began < when < ended]
    assert sum("WATCHDOG=1" in text for text in during) > 1
    assert not any(f"WATCHDOG_USEC={305 * 10**6}" in text for text in during), (
        "five minutes, and five seconds"
    )
    assert any("READY=1" in text for _, text in heard)
    assert any("STOPPING=1" in text for _, text in heard)
