"""One digest of everything in this package that decides what a plan computes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_SUFFIXES = {".py", ".cu", ".cuh"}
_REFERENCE = "reference.py"


@functools.cache
def source_hash(root: Path = ROOT) -> str:
    """SHA-256 over names and contents of the sources, in hex; references in torch are left out, no plan runs them."""
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.suffix in _SUFFIXES and file.name != _REFERENCE and file.is_file():
            data = file.read_bytes()
            digest.update(f"{file.relative_to(root).as_posix()} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()
