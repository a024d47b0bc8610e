"""The process's own heap."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give freed memory back to the system, which the allocator keeps otherwise.

    glibc has a call for it; other libraries have none and need none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
