"""Forked processes for tests of what several of them do."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Run something in a process of its own; its pid. It exits with 0, or 1 and a traceback."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - a forked child may not go on in the parent's test
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def exit_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
