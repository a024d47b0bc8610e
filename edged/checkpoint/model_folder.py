"""Makes a model folder as a whole or not at all.

The folder is built beside its destination under a hidden name and takes its place, in one step of the file system, when
it is complete and on the disk. Whatever ends the work before that, nothing is left but the destination as it was; after
a power cut or a SIGKILL the hidden folder is removed by the next one that is made in the same place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE
from edged.checkpoint.safetensors_writer import fsync_folder
from edged.errors import CheckpointError
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG_FILE = "config.json"
SOURCE_FILE = "edged.json"
REFERENCE_FILE = "reference_logits.safetensors"
TEMPLATE_FOLDER = "additional_chat_templates"
FILES = frozenset(
    {
        CONFIG_FILE,
        "generation_config.json",
        SINGLE_FILE,
        INDEX_FILE,
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        TEMPLATE_FOLDER,
        SOURCE_FILE,
        REFERENCE_FILE,
    }
)
"""Names that a model folder made by edged may hold, besides the shards that its index names."""

_SPARE_BYTES = 64 << 20  # tokenizer and file system's own needs, on top of the weights
_BUILDING, _REPLACED = "importing", "replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def absolute(path: Path) -> Path:
    """The path from the root, symbolic links kept."""
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - resolve() would follow them


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that holds anything but, with ``overwrite``, a model folder that edged made.

    Raises:
        CheckpointError: It does; the message names what is there.
    """
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise CheckpointError(f"{destination}: exists and is no folder; choose another destination")
    present = sorted(entry.name for entry in destination.iterdir())
    if present and not overwrite:
        raise CheckpointError(
            f"{destination}: is not empty; choose another destination or allow overwriting it"
        )
    foreign = [name for name in present if name not in FILES and not is_shard(name)]
    if foreign:
        raise CheckpointError(
            f"{destination}: holds {foreign[0]!r}, which no import wrote; it is not overwritten, remove it yourself"
        )


def is_shard(name: str) -> bool:
    """Whether the name is one that a shard of a model has (``model-00001-of-00004.safetensors``)."""
    return name.startswith("model-") and name.endswith(".safetensors")


@contextlib.contextmanager
def new_folder(destination: Path, needed_bytes: int) -> Iterator[Path]:
    """Make a hidden folder beside ``destination`` that is gone when the block ends, unless it was published.

    Raises:
        CheckpointError: The disk has less than ``needed_bytes``, or refuses something.
    """
    parent = destination.parent
    made = make_parents(parent)
    folder = parent / f".{destination.name}.{secrets.token_hex(4)}.{_BUILDING}"
    try:
        remove_stale(destination)
        check_space(parent, needed_bytes)
        with _locked_folder(folder):
            yield folder
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # not empty: it holds the model
                path.rmdir()


def publish(folder: Path, destination: Path) -> None:
    """Put a folder of :func:`new_folder` in its place, once all of it is on the disk.

    What stood there is exchanged for it in one step, so that at every moment one of the two is there as a whole.
    """
    for path in sorted(folder.rglob("*")):
        with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
            if file is not None:
                os.fsync(file.fileno())
            else:
                fsync_folder(path)
    fsync_folder(folder)
    if not destination.is_dir() or not any(destination.iterdir()):
        folder.rename(destination)
    elif _exchange(folder, destination):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        # A file system without exchange: the old one steps aside first.
        old = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.{_REPLACED}")
        destination.rename(old)
        try:
            folder.rename(destination)
        except BaseException:
            old.rename(destination)
            raise
        shutil.rmtree(old, ignore_errors=True)
    fsync_folder(destination.parent)


def remove_stale(destination: Path) -> None:
    """Remove what was left beside ``destination`` by work that was killed: its lock is free.

    A model that stepped aside for a new one which never came goes back to its place.
    """
    for folder in destination.parent.glob(f".{glob.escape(destination.name)}.*.{_REPLACED}"):
        with contextlib.suppress(OSError):
            if os.path.lexists(destination):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.rename(destination)
    for folder in destination.parent.glob(f".{glob.escape(destination.name)}.*.{_BUILDING}"):
        with contextlib.suppress(OSError), _descriptor(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock; one of the same name that another process took for stale is made again."""
    while True:
        folder.mkdir()
        with _descriptor(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                yield
                return


@contextlib.contextmanager
def _descriptor(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse work that the disk has no room for.

    Raises:
        CheckpointError: With both numbers.
    """
    needed = needed_bytes + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: the model needs {format_size(needed)}, {format_size(free)} are free; free some, or choose a "
            "destination on another disk"
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file of a model folder."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n", "utf-8")


def make_parents(parent: Path) -> list[Path]:
    """Make a folder and those above it; return the ones that were missing, the outermost first.

    Raises:
        CheckpointError: The system refuses.
    """
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    missing.reverse()
    try:
        parent = missing[-1] if missing else parent
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        dangling = next(
            (each for each in (parent, *parent.parents) if each.is_symlink() and not each.exists()), None
        )
        if dangling is not None:
            raise CheckpointError(
                f"{dangling}: is a link to {dangling.readlink()}, which is missing; make that folder, or name another"
            ) from error
        raise CheckpointError(f"{parent}: cannot be made: {error.strerror}") from error
    return missing


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one))
