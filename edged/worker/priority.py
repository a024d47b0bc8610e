"""Which of the two processes gives way when a core is short.

Every token wakes the daemon. Where all cores are busy the kernel would put it at once on the core of the thread that
has sent the token and would start the next step, and the step waits until the daemon is done. A SCHED_BATCH process is
not put in place of a running one when it wakes (sched(7)); on a free core it runs at once as ever. Measured on 2 busy
cores with the demo model: 0.4 instead of 1.0 ms between two steps.
"""

from __future__ import annotations

import os
from contextlib import suppress

_NO_PRIORITY = os.sched_param(0)


def give_way() -> None:
    """For the daemon, before it starts threads: do not interrupt steps. An operator's own choice of policy stays."""
    with suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, _NO_PRIORITY)


def take_way() -> None:
    """For the engine, before it starts threads: undo what it inherits from the daemon."""
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, _NO_PRIORITY)
