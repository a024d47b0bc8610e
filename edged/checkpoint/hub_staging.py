"""Fetches the files of a model from the hub, and goes on where an earlier process was cut off.

``huggingface_hub`` does not do the latter; so each file grows under a name that holds its digest, and is a file of the
model when the digest is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from typing import TYPE_CHECKING, Any, BinaryIO

from edged.checkpoint.hub import hub_errors
from edged.checkpoint.json_file import read_optional_json_object
from edged.checkpoint.model_folder import check_space, make_parents, write_json
from edged.errors import CheckpointError, FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from edged.checkpoint.hub import HubFile, HubModel

    Progress = Callable[[str, int, int], None]

STATE_FILE = "pull.json"
STAGING_SUFFIX = "pulling"
_READ_BYTES = 4 << 20
_CHUNK_BYTES = 256 << 10
"""What a cut connection loses at most, and how fine progress is; the library writes 10 MiB at a time otherwise."""


class Staging:
    """The hidden folder where the files of one model gather until they are complete. A context manager.

    It stays when a pull is cut off, so that the next one goes on; :meth:`remove` ends it.

    Args:
        destination: The model folder that is to be; the staging folder lies beside it.
        model: What is fetched. Files that an earlier pull left of another commit are kept if they are the same.

    Raises:
        FailedPreconditionError: Another process fetches it.
        CheckpointError: The folder cannot be made.
    """

    def __init__(self, destination: Path, model: HubModel) -> None:
        self.folder = destination.parent / f".{destination.name}.{STAGING_SUFFIX}"
        self._model = model
        self._descriptor = -1
        self._whole: dict[str, str] = {}
        """Digest of each file that has been checked."""

    def __enter__(self) -> Staging:  # noqa: PYI034 - no subclasses
        make_parents(self.folder.parent)
        try:
            self.folder.mkdir(exist_ok=True)
            self._descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise FailedPreconditionError(
                f"{self.folder}: another edgectl pull fetches this model; wait for it, or stop it"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be made: {error.strerror}") from None
        with contextlib.suppress(CheckpointError):
            known = read_optional_json_object(self.folder / STATE_FILE).get("files")
            self._whole = (
                {str(key): str(value) for key, value in known.items()} if isinstance(known, dict) else {}
            )
        self._drop_others()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the folder: the model has been made of it, or will not be."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def fetch(self, names: Sequence[str], progress: Progress) -> None:
        """Fetch files of the model, each under the last part of its name unless it is a named chat template.

        Raises:
            CheckpointError: The disk is too small or refuses, or the content of a file is not what the hub says it is.
            UnavailableError: The hub does not answer any more; what has come stays for the next try.
        """
        files = [self._model.find(name) for name in names]
        missing = [file for file in files if not self._has(file)]
        check_space(self.folder, sum(file.size - self._part_size(file) for file in missing))
        total = sum(file.size for file in files)
        done = total - sum(file.size for file in missing)
        for file in missing:
            self._fetch(file, _part_of(progress, done, total))
            done += file.size
        progress("fetching", done, total)

    def _drop_others(self) -> None:
        """Remove what an earlier pull left of another commit."""
        kept = {self._part(file) for file in self._model.files}
        kept |= {self.path(file.name) for file in self._model.files if self._has(file)}
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in kept and path.name != STATE_FILE:
                path.unlink()

    def path(self, name: str) -> Path:
        """Where a file of the repository lies here."""
        parts = name.split("/")
        return self.folder.joinpath(*(parts if name.endswith(".jinja") else parts[-1:]))

    def _fetch(self, file: HubFile, report: Callable[[int], None]) -> None:
        from huggingface_hub import constants, hf_hub_url, utils  # noqa: PLC0415 - takes a second to import
        from huggingface_hub.file_download import http_get  # noqa: PLC0415 - as above

        library: Any = utils  # does not say what it exports
        library.disable_progress_bars()
        constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
        library.logging.set_verbosity_error()
        model, part = self._model, self._part(file)
        headers = {**library.build_hf_headers(), "Accept-Encoding": "identity"}
        with hub_errors(model.repository, model.commit), _disk_errors(part):
            part.parent.mkdir(exist_ok=True)
            with part.open("ab") as raw:
                if raw.tell() > file.size:
                    raw.truncate(0)
                    raw.seek(0)
                counted: Any = _Counted(raw, report)
                http_get(
                    hf_hub_url(model.repository, file.name, revision=model.commit),
                    counted,
                    resume_size=raw.tell(),
                    headers=headers,
                    expected_size=file.size,
                )
                raw.flush()
                os.fsync(raw.fileno())
            self._check(file, part)
            part.replace(self.path(file.name))
        self._whole[self._key(file)] = file.digest
        write_json(self.folder / STATE_FILE, {"commit": model.commit, "files": self._whole})

    def _check(self, file: HubFile, part: Path) -> None:
        kind, _, wanted = file.digest.partition(":")
        found = _hash(part, kind) if kind else wanted
        if found != wanted:
            part.unlink()
            raise CheckpointError(
                f"{file.name}: what was fetched has the digest {found}, the hub says {wanted}; it was thrown away, "
                "fetch it again"
            )

    def _key(self, file: HubFile) -> str:
        return str(self.path(file.name).relative_to(self.folder))

    def _has(self, file: HubFile) -> bool:
        path = self.path(file.name)
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        return bool(file.digest) and self._whole.get(self._key(file)) == file.digest

    def _part(self, file: HubFile) -> Path:
        mark = file.digest.partition(":")[2][:16] or self._model.commit[:16]
        path = self.path(file.name)
        return path.with_name(f".{path.name}.{mark}.partial")

    def _part_size(self, file: HubFile) -> int:
        part = self._part(file)
        return min(part.stat().st_size, file.size) if part.exists() else 0


def _part_of(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    """Report bytes of one file as a part of all."""
    return lambda count: progress("fetching", before + count, total)


class _Counted:
    """A file that says how large it is after each write."""

    def __init__(self, file: BinaryIO, report: Callable[[int], None]) -> None:
        self._file = file
        self._report = report

    def write(self, data: bytes) -> int:
        count = self._file.write(data)
        self._report(self._file.tell())
        return count

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def truncate(self) -> int:
        return self._file.truncate(self._file.tell())


def _hash(path: Path, kind: str) -> str:
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if kind == "git":
        digest.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Errors of the network are OSErrors too; those of the disk have a number.
        if isinstance(error, ConnectionError) or error.errno is None or error.strerror is None:
            raise
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
