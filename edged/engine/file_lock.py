"""Locks between processes. The kernel lets go of them when their holder ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

from edged.errors import CancelledError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

_POLL_SECONDS = 0.1


@contextlib.contextmanager
def locked(
    path: Path,
    *,
    waiting: Callable[[], None] | None = None,
    cancelled: threading.Event | None = None,
) -> Iterator[None]:
    """Hold the lock file ``path``, which is made when it is missing.

    Args:
        path: The file.
        waiting: Called again and again while another process holds it.
        cancelled: Set it to stop waiting.

    Raises:
        CancelledError: ``cancelled`` was set while waiting.
        OSError: The file cannot be made.
    """
    while (descriptor := try_lock(path)) is None:
        if cancelled is not None and cancelled.is_set():
            raise CancelledError(f"cancelled while another process held {path.name}")
        if waiting is not None:
            waiting()
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Take the lock if it is free.

    Returns:
        An open descriptor that holds it until it is closed; None if another process (or thread) has it.

    Raises:
        OSError: The file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EWOULDBLOCK:
                return None
            raise
        # Its last holder may have removed the file between our opening and locking it.
        try:
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def remove_free_lock(path: Path) -> bool:
    """Remove a lock file that nobody holds.

    Returns:
        Whether it is gone.
    """
    try:
        descriptor = try_lock(path)
        if descriptor is None:
            return False
        path.unlink(missing_ok=True)
        os.close(descriptor)
    except OSError:
        return False
    return True
