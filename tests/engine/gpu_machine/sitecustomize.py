"""On PYTHONPATH, every process of edged takes this machine for one with an RTX 4090, as the daemon, its engine and its
builder do there. TensorRT-RTX needs none to build for it. A build stands still after its first step until the file
`EDGED_BUILD_GATE` is there, as one on a slow board seems to.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from edged.engine import gpu

gpu.find_gpu = lambda: gpu.Gpu((8, 9), 13000, memory=24 << 30)

if gate := os.environ.get("EDGED_BUILD_GATE"):
    from edged.engine.monitor import Phases

    complete, begun = Phases.complete, threading.Event()

    def gated(self: Phases, name: str, step: int) -> None:
        while begun.is_set() and not Path(gate).exists():
            time.sleep(0.02)
        begun.set()
        complete(self, name, step)

    Phases.complete = gated  # type: ignore[method-assign]
