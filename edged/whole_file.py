"""Files that are written as a whole or not at all: a full disk leaves what was there before, and nothing else."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME_BYTES = 200
"""Of a file's name in that of its part: a name may have 255 bytes."""


@contextmanager
def whole_file(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A file beside ``path`` that takes its place when the block ends well, and is gone when it does not.

    What is no regular file (a terminal, a pipe, ``/dev/null``) is written itself; a link stays, and what it leads to is
    replaced.

    Args:
        path: The file.
        mode: Rights that it has from its first byte on; by default those of the file that is replaced, or what the umask
            leaves of 0666.

    Raises:
        OSError: The system refuses; ``filename`` is ``path``.
    """
    place = Path(os.path.realpath(path))
    try:
        before = _status(place)
        if before is not None and not stat.S_ISREG(before.st_mode):
            with place.open("wb") as file:
                yield file
            return
        part = place.with_name(f".{_clipped(place.name)}.{secrets.token_hex(4)}.partial")
        try:
            with os.fdopen(os.open(part, _FLAGS, 0o600 if mode is not None else 0o666), "wb") as file:
                if mode is None and before is not None:
                    mode = stat.S_IMODE(before.st_mode)
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                yield file
                file.flush()
                os.fsync(file.fileno())  # some disks say only now that they are full
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        error.filename = str(path)
        raise


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Write a text as :func:`whole_file` does, in UTF-8.

    Raises:
        OSError: The system refuses; ``filename`` is ``path``.
    """
    with whole_file(path, mode) as file:
        file.write(text.encode("utf-8"))


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _status(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return path.stat()
    return None


def _clipped(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
