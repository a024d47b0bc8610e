"""Where models lie on this machine, and which are there."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from edged.checkpoint.folder_record import FolderRecord
from edged.checkpoint.model_folder import CONFIG_FILE, absolute
from edged.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE
from edged.errors import CheckpointError, NotFoundError

VARIABLE = "EDGED_MODELS"
SYSTEM_FOLDER = Path("/var/lib/edged/models")


@dataclass(frozen=True)
class ModelEntry:
    """One model folder."""

    name: str
    folder: Path
    size: int
    """Bytes of its files."""
    record: FolderRecord | None


def models_folders() -> tuple[Path, ...]:
    """Folders where models are looked for; a new one goes to :func:`models_folder`.

    ``$EDGED_MODELS`` alone where it is set, else ``/var/lib/edged/models`` and ``$XDG_DATA_HOME/edged/models``
    (``~/.local/share/edged/models``).
    """
    named = os.environ.get(VARIABLE)
    if named:
        return (absolute(Path(named)),)
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (SYSTEM_FOLDER, absolute(Path(data)) / "edged" / "models")


def models_folder() -> Path:
    """Where a new model goes: the first of :func:`models_folders` that can be written or made."""
    folders = models_folders()
    return next((folder for folder in folders if _is_writable(folder)), folders[-1])


def list_models() -> list[ModelEntry]:
    """Every model of this machine, by name. Folders whose names begin with a dot are not finished, and are none."""
    found = []
    for parent in models_folders():
        try:
            folders = sorted(path for path in parent.iterdir() if not path.name.startswith("."))
        except OSError:
            continue
        found += [read_entry(folder) for folder in folders if is_model(folder)]
    return sorted(found, key=lambda entry: (entry.name, str(entry.folder)))


def find_model(name: str) -> ModelEntry:
    """The model of that name, or the model folder at that path.

    Raises:
        NotFoundError: There is none; the message lists those that are there.
    """
    for entry in list_models():
        if name in (entry.name, str(entry.folder)):
            return entry
    path = absolute(Path(name))
    if is_model(path):
        return read_entry(path)
    if "/" in name and path.is_dir():
        raise NotFoundError(f"{path}: is no model folder: it has no {CONFIG_FILE}")
    names = ", ".join(entry.name for entry in list_models()) or "none"
    where = " and ".join(str(folder) for folder in models_folders())
    raise NotFoundError(f"there is no model {name!r} in {where}; there are: {names}")


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model in safetensors."""
    weights = (folder / SINGLE_FILE, folder / INDEX_FILE)
    return (folder / CONFIG_FILE).is_file() and any(path.is_file() for path in weights)


def read_entry(folder: Path) -> ModelEntry:
    """What a model folder is called and how large it is."""
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return ModelEntry(folder.name, folder, size, FolderRecord.read(folder))


def remove_model(entry: ModelEntry) -> None:
    """Remove a model; from the first moment on it is listed no more.

    Raises:
        CheckpointError: The folder lies elsewhere than models do, or the system refuses.
    """
    if entry.folder.parent not in models_folders():
        where = " and ".join(str(folder) for folder in models_folders())
        raise CheckpointError(f"{entry.folder}: lies elsewhere than in {where}; remove it yourself")
    hidden = entry.folder.with_name(f".{entry.name}.{secrets.token_hex(4)}.removing")
    try:
        if entry.folder.is_symlink():
            entry.folder.unlink()
            return
        entry.folder.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise CheckpointError(f"{entry.folder}: cannot be removed: {error.strerror or error}") from None


def _is_writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
