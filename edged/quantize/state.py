"""The state of a quantization, in a hidden folder beside its destination: what a run that was killed goes on from.

A stage is a half of a layer (attention, or the MLP). Its results are one safetensors file, whose name appears when all
of it is on the disk, and by then so are the hidden states after it. What follows a stage needs nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edged.checkpoint.model_folder import check_space, make_parents
from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.safetensors_header import TensorSpec
from edged.checkpoint.safetensors_writer import SafetensorsWriter, fsync_folder
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

Hidden = npt.NDArray[np.float32]
Results = dict[str, tuple[str, np.ndarray[Any, Any]]]
"""Tensors by name: their type in safetensors, and their content (BF16: its bits)."""

_REQUEST = "request.json"


class State:
    """An open state folder; use :meth:`open`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    @contextlib.contextmanager
    def open(cls, destination: Path, request: Mapping[str, Any], needed_bytes: int) -> Iterator[Self]:
        """Open the state of a destination; what a different request left is removed first.

        Args:
            destination: The model folder that is to be.
            request: All that decides the results.
            needed_bytes: What the run will write.

        Raises:
            CheckpointError: Another process works on it, the disk is too small or refuses something.
        """
        make_parents(destination.parent)
        folder = state_folder(destination)
        try:
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be made: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    f"{destination}: another process is quantizing to it; let it end"
                ) from None
            state = cls(folder)
            state._begin(request)
            check_space(folder, max(0, needed_bytes - state._size()))
            yield state
        finally:
            os.close(descriptor)

    @property
    def stages(self) -> int:
        """Stages that are finished."""
        count = 0
        while self._stage(count).exists():
            count += 1
        return count

    def hidden(self, stage: int, shape: tuple[int, ...]) -> Hidden | None:
        """Hidden states before a stage, mapped; None where there are none of that shape."""
        path = self._hidden(stage)
        size = 4 * int(np.prod(shape, dtype=np.int64))
        if not path.exists() or path.stat().st_size != size:
            return None
        return np.memmap(path, np.float32, "r", shape=shape)

    @contextlib.contextmanager
    def write_hidden(self, stage: int, shape: tuple[int, ...]) -> Iterator[Hidden]:
        """Hidden states before a stage, to be filled; they are there when the block ends well."""
        partial = self.folder / f"hidden-{stage:04}.partial"
        content = np.memmap(partial, np.float32, "w+", shape=shape)
        yield content
        content.flush()
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(self._hidden(stage))
        fsync_folder(self.folder)

    def commit(self, stage: int, results: Results) -> None:
        """Finish a stage; hidden states before it are no longer needed."""
        specs = [TensorSpec(name, dtype, array.shape) for name, (dtype, array) in results.items()]
        with SafetensorsWriter(self._stage(stage), specs) as writer:
            for name, (_, array) in results.items():
                writer.write(name, array)
        self._hidden(stage).unlink(missing_ok=True)

    def results(self) -> Iterator[WeightFiles]:
        """The results of each finished stage, open one after the other."""
        for stage in range(self.stages):
            with WeightFiles.open_file(self._stage(stage)) as files:
                yield files

    def clear(self) -> None:
        """Remove everything but the folder itself."""
        for path in self.folder.iterdir():
            path.unlink()

    def remove(self) -> None:
        """Remove the folder: the model is in its place."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(self, request: Mapping[str, Any]) -> None:
        wanted = json.dumps(request, sort_keys=True)
        path = self.folder / _REQUEST
        try:
            same = path.read_text("utf-8") == wanted
        except (OSError, ValueError):
            same = False
        if not same:
            self.clear()
            partial = path.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                file.write(wanted)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            fsync_folder(self.folder)
        for stale in (*self.folder.glob("*.partial"), *self.folder.glob(".*.partial")):
            stale.unlink()

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def _stage(self, stage: int) -> Path:
        return self.folder / f"stage-{stage:04}.safetensors"

    def _hidden(self, stage: int) -> Path:
        return self.folder / f"hidden-{stage:04}.f32"


def state_folder(destination: Path) -> Path:
    """Where the state of a destination lies."""
    return destination.parent / f".{destination.name}.quantizing"
