"""The CUDA sources of the operators: each `.cu` file of a package beside this one is a module of its own."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""What `#include` paths begin at."""

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_ONLY = re.compile(r"^// For compute capability (\d+)\.(\d+) alone\.$", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One source file of an operator."""

    operator: str
    path: Path
    hash: str
    """Of the file and everything it includes."""
    only: tuple[int, int] | None = None
    """The one compute capability that has its instructions, when the file says so; elsewhere it holds no kernel."""

    def suits(self, capability: tuple[int, int]) -> bool:
        """Whether the file has kernels for a device of this compute capability."""
        return self.only in (None, capability)

    @property
    def name(self) -> str:
        """`operator/file`, without the ending."""
        return f"{self.operator}/{self.path.stem}"


def included(path: Path, folder: Path = FOLDER) -> list[Path]:
    """The file and all it includes, each once, in the order first met.

    Raises:
        FileNotFoundError: A file includes one that does not exist.
    """
    files = [path]
    for file in files:
        for name in _INCLUDE.findall(file.read_text()):
            found = folder / name
            if found not in files:
                files.append(found)
    return files


@lru_cache(maxsize=1)
def sources() -> tuple[Source, ...]:
    """Every source file, ordered by name."""
    found = []
    for path in sorted(FOLDER.glob("*/*.cu")):
        digest = hashlib.sha256()
        for file in included(path):
            digest.update(file.read_bytes())
        only = _ONLY.search(path.read_text())
        found.append(
            Source(
                path.parent.name,
                path,
                digest.hexdigest()[:16],
                (int(only[1]), int(only[2])) if only else None,
            )
        )
    return tuple(found)
