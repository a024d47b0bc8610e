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

from edged.checkpoint.model_folder import check_space, make_parents, remove_stale
from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.safetensors_header import TensorSpec
from edged.checkpoint.safetensors_writer import SafetensorsWriter, fsync_folder
from edged.errors import CheckpointError, EdgedError
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
_LOCK_TRIES = 100
"""Runs that end and take the folder away between two steps of one that begins: two in a row are rare already."""


class SourceError(CheckpointError):
    """The model to quantize is at fault: once it is another one, nothing that was finished can be used."""


class State:
    """An open state folder; use :meth:`open`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, destination: Path, request: Mapping[str, Any], needed_bytes: int, result_bytes: int = 0
    ) -> Iterator[Self]:
        """Open the state of a destination; what a different request left is removed first.

        Args:
            destination: The model folder that is to be.
            request: All that decides the results.
            needed_bytes: What the state will hold at most.
            result_bytes: What is written beside it in the end.

        Raises:
            CheckpointError: Another process works on it, the disk is too small or refuses something. What can go on is kept,
                and the message says where; what cannot is removed.
        """
        made = make_parents(destination.parent)
        state = cls(state_folder(destination))
        try:
            descriptor = state._lock(destination)
            try:
                with _told(state.folder):
                    state._begin(request)
                remove_stale(destination)  # of a run that was killed as it wrote the model
                with state._kept_if_of_use():
                    check_space(state.folder, max(0, needed_bytes - state._size()) + result_bytes)
                    yield state
            finally:
                os.close(descriptor)
        finally:
            for folder in reversed(made):
                with contextlib.suppress(OSError):  # not empty: it holds the model, or a state
                    folder.rmdir()

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
        """Hidden states before a stage, to be filled; they are there when the block ends well.

        Raises:
            CheckpointError: The disk has no room for them.
        """
        partial = self.folder / f"hidden-{stage:04}.partial"
        try:
            with _told(partial), partial.open("w+b") as file:
                # A mapped page that finds no room on the disk ends the process (SIGBUS): all of them get theirs first.
                os.posix_fallocate(file.fileno(), 0, 4 * int(np.prod(shape, dtype=np.int64)))
            content = np.memmap(partial, np.float32, "r+", shape=shape)
            yield content
            with _told(partial):
                content.flush()
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                partial.replace(self._hidden(stage))
                fsync_folder(self.folder)
        finally:
            partial.unlink(missing_ok=True)

    def commit(self, stage: int, results: Results) -> None:
        """Finish a stage; hidden states before it are no longer needed."""
        specs = [TensorSpec(name, dtype, array.shape) for name, (dtype, array) in results.items()]
        with _told(self._stage(stage)), SafetensorsWriter(self._stage(stage), specs) as writer:
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
        with _told(self.folder):
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

    @staticmethod
    def published_before(destination: Path) -> bool:
        """Whether a run put there what stands there, and was killed before its state was gone."""
        try:
            noted = json.loads((state_folder(destination) / _PUBLISHED).read_text("utf-8"))
            found = destination.stat()
        except (OSError, ValueError):
            return False
        return isinstance(noted, list) and noted[:2] == [found.st_dev, found.st_ino]

    @contextlib.contextmanager
    def _kept_if_of_use(self) -> Iterator[None]:
        """What a refusal leaves: the state and a word about it where the same command can go on from it, else nothing."""
        try:
            yield
        except SourceError:
            self.remove()
            raise
        except EdgedError as error:
            if not self.stages:
                self.remove()
                raise
            error.message += (
                f"; what was finished is kept in {self.folder}: the same command goes on from there (to give the run up, remove "
                "that folder)"
            )
            error.args = (error.message,)
            raise

    def _lock(self, destination: Path) -> int:
        """Make and lock the folder; returns the descriptor that holds the lock."""
        reason = "its state is taken away again and again"
        for _ in range(_LOCK_TRIES):
            try:
                self.folder.mkdir(exist_ok=True)
                descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError as error:  # a run that came to its end took it away, or none can be
                reason = str(error.strerror)
                continue
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be made: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    message = f"{destination}: another process is quantizing to it; let it end"
                else:
                    message = f"{self.folder}: cannot be locked: {error.strerror}; choose a destination on another disk"
                raise CheckpointError(message) from None
            if os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)  # taken away between the two
        raise CheckpointError(f"{destination}: cannot be written: {reason}")

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


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say what the system refuses as the other faults of a destination are said."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error


def _published(folder: Path, request: Mapping[str, Any]) -> str:
    found = folder.stat()
    return json.dumps([found.st_dev, found.st_ino, request], sort_keys=True)
