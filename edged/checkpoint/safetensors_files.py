"""Weights of a model folder in safetensors: one file, or shards with an index.

Tensors are read with ``preadv`` straight into memory that the caller owns (a page-locked buffer, a torch tensor, a
numpy array), and the page cache is told to drop what was read. A model therefore exists once in memory while it
loads, also where GPU and CPU share it; a mapping would count twice there.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from edged.checkpoint.safetensors_header import TensorInfo, read_header
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_CPMCU_FILES = ("model_gptq_marlin.safetensors", "model_gptq.safetensors")  # in CPM.cu's own order
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
# One call reads at most this much, so that the page cache holds no more than this of a file.
_READ_BYTES = 32 << 20

_NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
}


@final
class WeightFiles:
    """The open weight files of one model folder. Use :meth:`open`; a context manager that closes them."""

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo], descriptors: dict[Path, int]) -> None:
        self.folder = folder
        self._tensors = tensors
        self._descriptors = descriptors

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Open and check all weight files of ``folder``; no tensor is read yet.

        Raises:
            CheckpointError: No weights, a shard is missing or damaged, or the index contradicts the shards.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not a model folder; give the folder that holds config.json")
        if (folder / SINGLE_FILE).exists():
            return cls._open_files(folder, [SINGLE_FILE], None)
        index = folder / INDEX_FILE
        if not index.exists():
            whole = _whole_file(folder)
            if whole:
                return cls._open_files(folder, [whole], None)
            raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}{_hint(folder)}")
        weight_map = read_index(index)
        return cls._open_files(folder, sorted(set(weight_map.values())), weight_map)

    @classmethod
    def open_file(cls, path: Path) -> WeightFiles:
        """Open and check one file, whatever lies beside it.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        return cls._open_files(path.parent, [path.name], None)

    @classmethod
    def _open_files(cls, folder: Path, files: list[str], weight_map: dict[str, str] | None) -> WeightFiles:
        tensors: dict[str, TensorInfo] = {}
        descriptors: dict[Path, int] = {}
        try:
            for name in files:
                file = folder / name
                descriptors[file] = open_regular(file)
                _add_all(tensors, read_header(descriptors[file], file))
            if weight_map is not None:
                _check_index(folder / INDEX_FILE, weight_map, tensors)
        except BaseException:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise
        return cls(folder, tensors, descriptors)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading afterwards is a fault."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self._tensors.values())

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, file by file in the order of their data (the fastest order to read them)."""
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Return what ``name`` is and where it lies.

        Raises:
            CheckpointError: No such tensor.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: there is no tensor {name!r} in the weight files") from None

    def read_into(self, name: str, buffer: memoryview, start: int | None = None) -> None:
        """Read a tensor's bytes (row-major, little-endian) into ``buffer``, which must have exactly its size.

        With ``start``, the part of the tensor that begins at that byte and is as long as ``buffer``.

        Raises:
            CheckpointError: No such tensor, or the file changed or cannot be read; ``buffer`` is then undefined.
            ValueError: ``buffer`` has another size, is read-only or not contiguous, or the part does not exist.
        """
        info = self.info(name)
        wanted = info.nbytes if start is None else buffer.nbytes
        begin = start or 0
        if buffer.nbytes != wanted or buffer.readonly or not buffer.c_contiguous:
            raise ValueError(
                f"{name}: needs a writable contiguous buffer of {wanted} bytes, "
                f"got {buffer.nbytes} (readonly={buffer.readonly}, contiguous={buffer.c_contiguous})"
            )
        if begin < 0 or begin + wanted > info.nbytes:
            raise ValueError(f"{name}: bytes {begin} to {begin + wanted} are outside its {info.nbytes}")
        if wanted:
            pread_into(
                self._descriptors[info.file],
                buffer.cast("B"),
                info.offset + begin,
                f"{info.file}: tensor {name!r}",
            )

    def read_array(self, name: str) -> np.ndarray[Any, Any]:
        """Read a tensor into a new numpy array; BF16 comes as uint16 and 8-bit floats as uint8 (their bits).

        Raises:
            CheckpointError: As :meth:`read_into`.
        """
        info = self.info(name)
        array: np.ndarray[Any, Any] = np.empty(info.shape, _NUMPY[info.dtype])
        if info.nbytes:
            self.read_into(name, array.reshape(-1).view(np.uint8).data)
        return array


def pread_into(file_descriptor: int, buffer: memoryview, offset: int, where: str) -> None:
    """Fill a byte buffer from ``offset`` on, dropping what was read from the page cache.

    Raises:
        CheckpointError: The file ends early or cannot be read; the message begins with ``where``.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(file_descriptor, [buffer[done : done + _READ_BYTES]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{where}: cannot be read at byte {offset + done}: {error.strerror}"
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{where}: the file ends at byte {offset + done}; it was truncated while in use"
            )
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file_descriptor, offset + done, count, os.POSIX_FADV_DONTNEED)
        done += count


def _add_all(tensors: dict[str, TensorInfo], found: list[TensorInfo]) -> None:
    for info in found:
        if info.name in tensors:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} is also in {tensors[info.name].file.name}"
            )
        tensors[info.name] = info


def open_regular(file: Path) -> int:
    """Open a file for reading and return its descriptor.

    Raises:
        CheckpointError: It is missing, cannot be opened or is no regular file.
    """
    try:
        # O_NONBLOCK: opening a named pipe must fail the check below instead of waiting for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: this file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{file}: is no regular file")
    return descriptor


def _whole_file(folder: Path) -> str:
    """The only weight file of a folder, under a name of its own (quantizers give theirs such); else nothing."""
    names = [file.name for file in folder.glob("*.safetensors")]
    for name in _CPMCU_FILES:
        if name in names:
            return name
    return names[0] if len(names) == 1 and not _SHARD.search(names[0]) else ""


def _hint(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "; it holds a GGUF file, which `edgectl import` turns into a model folder"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return "; edged reads weights from safetensors only, convert the pickled ones first"
    if any(folder.glob("*.safetensors")):
        return "; the shards it holds need their index"
    return ""


def read_index(index: Path) -> dict[str, str]:
    """The file that each tensor lies in, by the index of a model's shards.

    Raises:
        CheckpointError: The index is damaged, or names a file outside its folder.
    """
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{index}: larger than {_MAX_INDEX_BYTES >> 20} MiB")
        content = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: cannot be read: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to files")
    for name, file in weight_map.items():
        # A shard lies beside its index: anything else is a way out of the folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map[{name!r}] is {str(file)[:200]!r}; it must name a .safetensors file in this folder"
            )
    return weight_map


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{index}: names tensor {name!r} in {file}, but it is not there")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(
            f"{index}: does not list {len(unlisted)} tensors of the shards, the first is {unlisted[0]!r} "
            f"in {tensors[unlisted[0]].file.name}"
        )
