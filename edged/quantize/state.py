"""The state of a quantization, in a hidden folder beside its destination: what a run that was killed goes on from.

A stage is a half of a layer (attention, or the MLP). Its results are one safetensors file, whose name appears when all
of it is on the disk, and by then so are the hidden states after it. What follows a stage needs nothing else.

Before the finished folder takes its place the state notes which folder that is. So a run that was killed after that step, and
before its state was gone, is known to be done.
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
from edged.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

Hidden = npt.NDArray[np.float32]
Results = dict[str, tuple[str, np.ndarray[Any, Any]]]
"""Tensors by name: their type in safetensors, and their content (BF16: its bits)."""

_REQUEST = "request.json"
_PUBLISHED = "published.json"


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
        state = cls(state_folder(destination))
        descriptor = state._lock(destination)
        try:
            state._begin(request)
            check_space(state.folder, max(0, needed_bytes - state._size()))
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

    def restart(self) -> None:
        """Forget every stage."""
        self._clear(keep=_REQUEST)

    def note_published(self, folder: Path, request: Mapping[str, Any]) -> None:
        """Note the folder that is about to become the destination."""
        self._write(_PUBLISHED, _published(folder, request))

    def remove(self) -> None:
        """Remove the folder: the model is in its place. The note goes last."""
        self._clear(keep=_PUBLISHED)
        (self.folder / _PUBLISHED).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    def finish_published(cls, destination: Path, request: Mapping[str, Any]) -> bool:
        """Whether the destination is what a run with this request put there before it was killed; removes its state."""
        state = cls(state_folder(destination))
        try:
            noted = (state.folder / _PUBLISHED).read_text("utf-8")
            if noted != _published(destination, request):
                return False
        except (OSError, ValueError):
            return False
        state.remove()
        return True

    def _lock(self, destination: Path) -> int:
        """Make and lock the folder; returns the descriptor that holds the lock."""
        while True:
            try:
                self.folder.mkdir(exist_ok=True)
                descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # a run that came to its end took it away
                continue
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be made: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise CheckpointError(
                    f"{destination}: another process is quantizing to it; let it end"
                ) from None
            if os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)  # taken away between the two

    def _begin(self, request: Mapping[str, Any]) -> None:
        wanted = json.dumps(request, sort_keys=True)
        path = self.folder / _REQUEST
        try:
            same = path.read_text("utf-8") == wanted
        except (OSError, ValueError):
            same = False
        if not same:
            # The request goes first: stages are never taken for those of another one.
            path.unlink(missing_ok=True)
            self._clear()
            self._write(_REQUEST, wanted)
        for stale in (
            self.folder / _PUBLISHED,
            *self.folder.glob("*.partial"),
            *self.folder.glob(".*.partial"),
        ):
            stale.unlink(missing_ok=True)

    def _clear(self, keep: str = "") -> None:
        for path in self.folder.iterdir():
            if path.name != keep:
                path.unlink(missing_ok=True)

    def _write(self, name: str, content: str) -> None:
        write_whole(self.folder / name, content)
        fsync_folder(self.folder)

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def _stage(self, stage: int) -> Path:
        return self.folder / f"stage-{stage:04}.safetensors"

    def _hidden(self, stage: int) -> Path:
        return self.folder / f"hidden-{stage:04}.f32"


def state_folder(destination: Path) -> Path:
    """Where the state of a destination lies."""
    return destination.parent / f".{destination.name}.quantizing"


def _published(folder: Path, request: Mapping[str, Any]) -> str:
    found = folder.stat()
    return json.dumps([found.st_dev, found.st_ino, request], sort_keys=True)
