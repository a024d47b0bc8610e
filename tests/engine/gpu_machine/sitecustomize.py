"""On PYTHONPATH, every process of edged takes this machine for one with an RTX 4090, as the daemon, its engine and its
builder do there. TensorRT-RTX needs none to build for it. `EDGED_BUILD_PAUSE` seconds at each of TensorRT's steps make a
build as long as a slow board's.
"""

from __future__ import annotations

import os
import time

from edged.engine import gpu

gpu.find_gpu = lambda: gpu.Gpu((8, 9), 13000, memory=24 << 30)

if pause := float(os.environ.get("EDGED_BUILD_PAUSE", "0")):
    from edged.engine.monitor import Phases

    complete = Phases.complete

    def slow(self: Phases, name: str, step: int) -> None:
        time.sleep(pause)
        complete(self, name, step)

    Phases.complete = slow  # type: ignore[method-assign]
