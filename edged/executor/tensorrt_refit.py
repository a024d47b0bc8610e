"""The weights that a plan was stripped of, on their way from the checkpoint into the loaded engine."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edged.engine.held_weights import total_bytes
from edged.errors import InternalError, ResourceExhaustedError
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt
    from typing_extensions import Self

    from edged.engine.held_weights import HeldWeight
    from edged.executor.tensorrt_weights import Numbers


@dataclass(frozen=True)
class HostWeight:
    """A weight in host memory."""

    dtype: str
    address: int
    elements: int


class HostWeights:
    """All of them in a file without a name, mapped into memory: its pages need not stay there. Close it once they are in.

    Args:
        held: The weights.
        folder: Where the file takes its room; a temporary folder where that cannot be written.

    Raises:
        ResourceExhaustedError: There is not so much room.
    """

    def __init__(self, held: tuple[HeldWeight, ...], folder: Path) -> None:
        self._held = {each.name: each for each in held}
        where = str(folder) if os.access(folder, os.W_OK) else tempfile.gettempdir()
        size = total_bytes(held)
        with tempfile.TemporaryFile(dir=where) as file:
            try:
                # Written through a map, a full disk would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise ResourceExhaustedError(
                    f"no room for {format_size(size)} of weights in {where} while they are put into the engine "
                    f"({error.strerror}): free some, name another folder with EDGED_CACHE, or build an engine without --refit"
                ) from error
            self._map = mmap.mmap(file.fileno(), size)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)

    def __enter__(self) -> Self:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the file back; addresses are worth nothing from now on."""
        self._bytes = None
        self._map.close()

    def __contains__(self, name: str) -> bool:
        """Whether a weight belongs here."""
        return name in self._held

    def store(self, name: str, offset: int, data: Numbers) -> None:
        """Put an array's bytes ``offset`` bytes behind the start of a weight."""
        held = self._held[name]
        if self._bytes is None or offset + data.nbytes > held.nbytes:
            raise InternalError(f"{name}: {offset + data.nbytes} bytes do not fit {held.nbytes}")
        start = held.offset + offset
        content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._bytes[start : start + len(content)] = content

    def weights(self) -> Mapping[str, HostWeight]:
        """Where each lies."""
        assert self._bytes is not None, "asked before it is closed"  # noqa: S101
        base = int(self._bytes.ctypes.data)
        return {
            name: HostWeight(each.dtype, base + each.offset, each.elements)
            for name, each in self._held.items()
        }
