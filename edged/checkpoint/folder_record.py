"""``edged.json`` in a model folder: where the model came from, and the digests of its files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edged import __version__
from edged.checkpoint.json_file import read_optional_json_object
from edged.checkpoint.model_folder import CONFIG_FILE, REFERENCE_FILE, SOURCE_FILE, write_json
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Progress = Callable[[str, int, int], None]

_FORMAT = 1
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class FileDigest:
    """What one file was when it was read: size and time of change tell whether it still is."""

    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class FolderRecord:
    """The content of ``edged.json``.

    Attributes:
        source: Where the model came from: ``{"kind": "hub", "repository": …, "commit": …}`` or
            ``{"kind": "file", "path": …}``.
        files: Digests by file name.
    """

    source: Mapping[str, Any]
    files: Mapping[str, FileDigest]

    @classmethod
    def read(cls, folder: Path) -> FolderRecord | None:
        """The record of a folder; None where there is none that this version can read."""
        try:
            content = read_optional_json_object(folder / SOURCE_FILE)
            if content.get("format") != _FORMAT:
                return None
            files = {name: FileDigest(**entry) for name, entry in content["files"].items()}
            source = dict(content["source"])
        except (CheckpointError, KeyError, TypeError, AttributeError, ValueError):
            return None
        if not all(_is_digest(digest) for digest in files.values()):
            return None
        return cls(source, files)


def record_folder(folder: Path, source: Mapping[str, Any], progress: Progress | None = None) -> FolderRecord:
    """Hash every file of a folder and write ``edged.json``.

    Raises:
        CheckpointError: A file cannot be read, or the record not be written.
    """
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.name not in (SOURCE_FILE, REFERENCE_FILE)
    )
    total = sum((folder / name).stat().st_size for name in names)
    done = 0
    files = {}
    for name in names:
        path = folder / name
        files[name] = digest_file(path, _part(progress, done, total))
        done += path.stat().st_size
    write_json(
        folder / SOURCE_FILE,
        {
            "format": _FORMAT,
            "edged": __version__,
            "source": dict(source),
            "files": {name: vars(digest) for name, digest in files.items()},
        },
    )
    return FolderRecord(dict(source), files)


def model_key(folder: Path, progress: Progress | None = None) -> str:
    """A digest of all that decides a model's logits: its configuration and its weights.

    Files that are as ``edged.json`` remembers them are not read again.

    Raises:
        CheckpointError: A file cannot be read.
    """
    record = FolderRecord.read(folder)
    names = sorted(path.name for path in folder.glob("*.safetensors") if path.name != REFERENCE_FILE)
    digest = hashlib.sha256()
    for name in [CONFIG_FILE, *names]:
        path = folder / name
        known = record.files.get(name) if record is not None else None
        try:
            now = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if known is None or (known.size, known.mtime_ns) != (now.st_size, now.st_mtime_ns):
            known = digest_file(path, _part(progress, 0, now.st_size))
        digest.update(json.dumps([name, known.sha256]).encode())
    return digest.hexdigest()


def digest_file(path: Path, progress: Callable[[int], None] | None = None) -> FileDigest:
    """Hash a file.

    Raises:
        CheckpointError: It cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            before = path.stat()
            while part := file.read(_READ_BYTES):
                digest.update(part)
                if progress is not None:
                    progress(file.tell())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return FileDigest(before.st_size, before.st_mtime_ns, digest.hexdigest())


def _part(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    """Report bytes of one file as a part of all."""

    def report(count: int) -> None:
        if progress is not None:
            progress("checksums", before + count, total)

    return report


def _is_digest(digest: FileDigest) -> bool:
    return (
        isinstance(digest.size, int) and isinstance(digest.mtime_ns, int) and isinstance(digest.sha256, str)
    )
