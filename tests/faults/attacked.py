"""The daemon under attack, and what every attack sends to see that it lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fixtures.daemon import DaemonProcess

    from edged.client import Credentials

IDS = [5, 6, 7]
SAMPLED = {"temperature": 0.0, "ignore_eos": True}


class Target:
    """The daemon under attack."""

    def __init__(self, daemon: DaemonProcess, credentials: Credentials | None = None) -> None:
        self.daemon = daemon
        self.credentials = credentials
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
