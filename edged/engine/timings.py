"""What plain TensorRT timed while it built, kept for the next build on this GPU."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from edged.engine.durable import write_file

if TYPE_CHECKING:
    from pathlib import Path

    from edged.engine.key import EngineKey

_FOLDER = "timings"


class TimingCaches:
    """One file a TensorRT, driver and GPU, beside the engines.

    The bytes are TensorRT's own and it refuses those that it did not write, so they need no hash.

    Args:
        folder: The cache folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER

    def read(self, key: EngineKey) -> bytes | None:
        """What earlier builds timed; None before the first."""
        try:
            return self._path(key).read_bytes()
        except OSError:
            return None

    def keep(self, key: EngineKey, data: bytes) -> None:
        """Keep timings; without room for them the next build times again."""
        path = self._path(key)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(exist_ok=True)
            write_file(fresh, data)
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)

    def _path(self, key: EngineKey) -> Path:
        text = f"{key.tensorrt}\n{key.driver}\n{key.targets}"
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]
