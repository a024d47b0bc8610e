"""One daemon of the fake model that every attack of a module shares: each test must leave it serving."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fixtures.daemon import FAKE_MODEL_DAEMON, DaemonProcess, demo_configuration

IDS = [5, 6, 7]
SAMPLED = {"temperature": 0.0, "ignore_eos": True}


class Target:
    """The daemon under attack."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        with daemon.client() as client:
            status = client.status()
        self.address = next(address for address in status.addresses if not address.startswith("unix:"))
        host, port = self.address.rsplit(":", 1)
        self.place = (host, int(port))
        self.pid = status.daemon_pid

    def memory(self) -> int:
        """Resident bytes of the daemon process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def answer(self, tokens: int = 3):
        """A real request over TCP; fails unless it is answered in full."""
        with self.daemon.client() as client:
            answer = client.generate(IDS, max_tokens=tokens, timeout=60, **SAMPLED).answer()
        assert answer.finished.usage.generated_tokens == tokens
        return answer


@pytest.fixture(scope="module")
def target(demo_model):
    daemon = DaemonProcess(
        demo_configuration(
            demo_model, listen={"tcp": "127.0.0.1:0"}, log={"level": "info", "format": "json"}
        ),
        {"FAKE_ENGINE": json.dumps({})},
        (str(FAKE_MODEL_DAEMON),),
    )
    try:
        daemon.wait_ready()
        yield Target(daemon)
        assert daemon.stop() == 0, daemon.log()[-3000:]
        assert "Traceback" not in daemon.log()
    finally:
        daemon.close()
