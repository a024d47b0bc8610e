"""Huge pages for large buffers of the host: weights that are read in full for every token come from memory faster.

Linux hands them out by itself where ``transparent_hugepage`` is ``always``; most distributions have ``madvise``, where a
process must ask for them. Only whole huge pages inside a buffer are asked for, so a buffer takes no byte more.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE = 14


def huge_page_size() -> int:
    """Bytes of a transparent huge page; 0 where the kernel has none."""
    try:
        return int(_SIZE_FILE.read_text("ascii"))
    except (OSError, ValueError):
        return 0


def ask_for_huge_pages(address: int, nbytes: int, *, page: int | None = None) -> bool:
    """Ask for huge pages below a buffer that was not written yet.

    Args:
        address: Of its first byte.
        nbytes: Its size.
        page: Bytes of a huge page; the kernel's by default.

    Returns:
        Whether the kernel heard it. It gives them while it has some; the rest of the buffer has ordinary pages.
    """
    page = huge_page_size() if page is None else page
    if page <= 0:
        return False
    first, end = -(-address // page) * page, (address + nbytes) // page * page
    if first >= end:
        return False
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, end - first, _MADV_HUGEPAGE) == 0)
