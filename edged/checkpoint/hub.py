"""Asks the Hugging Face Hub, or whatever speaks its protocol (``HF_ENDPOINT``), what a repository holds.

``huggingface_hub`` does the talking: addresses, tokens (``HF_TOKEN``), redirects, retries.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged.errors import (
    EdgedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIXES = re.compile(r"^(?:https?://)?(?:huggingface\.co|hf\.co)/")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class HubFile:
    """One file of a repository.

    Attributes:
        name: Its path there.
        size: Bytes.
        digest: ``sha256:…`` of the content, or ``git:…``: the SHA-1 of Git's object, for small files; empty where the
            hub does not say.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class HubModel:
    """What a repository holds at one commit."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]

    def find(self, name: str) -> HubFile:
        """The file of that name."""
        return next(file for file in self.files if file.name == name)


def parse_repository(text: str) -> tuple[str, str | None]:
    """Repository and revision of ``OWNER/NAME[@REVISION]``; the address of its page is read too.

    Raises:
        InvalidArgumentError: It is none.
    """
    repository, sign, revision = _PREFIXES.sub("", text).rstrip("/").partition("@")
    tree = re.fullmatch(r"([^/]+/[^/]+)/tree/(.+)", repository)
    if tree and not sign:
        repository, sign, revision = tree[1], "@", tree[2]
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or bool(sign) != bool(revision):
        raise InvalidArgumentError(
            f"{text[:200]!r} is no repository; write OWNER/NAME or OWNER/NAME@REVISION, such as "
            "openbmb/MiniCPM4-0.5B@main",
            field="repository",
        )
    return repository, revision or None


def find_model(repository: str, revision: str | None) -> HubModel:
    """Ask the hub what a repository holds.

    Raises:
        NotFoundError: There is no such repository or revision, or it is private.
        FailedPreconditionError: Its terms have to be accepted first, or the hub is switched off (``HF_HUB_OFFLINE``).
        UnavailableError: The hub does not answer.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - takes a second to import

    with hub_errors(repository, revision):
        info = HfApi().model_info(
            repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )
    files = tuple(
        HubFile(item.rfilename, item.size or 0, _digest_of(item))
        for item in info.siblings or ()
        if item.rfilename
    )
    if not info.sha or not re.fullmatch(r"[0-9a-f]{40}", info.sha):
        raise UnavailableError(f"{repository}: the hub names no commit; is HF_ENDPOINT right?")
    return HubModel(repository, info.sha, files)


def cached_snapshot(repository: str, revision: str | None) -> Path:
    """The folder of a repository in the hub's cache of this machine; nothing is asked of the hub.

    Raises:
        NotFoundError: It is not there.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - takes a second to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415 - as above

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
        raise NotFoundError(
            f"{repository}@{revision or 'main'}: is not in the hub's cache of this machine (HF_HOME), and offline nothing "
            "is fetched",
            field="repository",
        ) from None


def _digest_of(item: Any) -> str:  # noqa: ANN401 - the hub's RepoSibling
    lfs = item.lfs
    sha256 = (lfs.get("sha256") or lfs.get("oid")) if lfs else None
    if isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256):
        return f"sha256:{sha256}"
    if not lfs and isinstance(item.blob_id, str) and re.fullmatch(r"[0-9a-f]{40}", item.blob_id):
        return f"git:{item.blob_id}"
    return ""


@contextlib.contextmanager
def hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's library raises into edged's errors."""
    from huggingface_hub import errors  # noqa: PLC0415 - takes a second to import

    where = f"{repository}@{revision}" if revision else repository
    try:
        yield
    except EdgedError:
        raise
    except errors.GatedRepoError:
        raise FailedPreconditionError(
            f"{where}: its owner wants terms to be accepted on its page first; then set HF_TOKEN to your token"
        ) from None
    except errors.RevisionNotFoundError:
        raise NotFoundError(f"{where}: the repository has no such revision", field="repository") from None
    except errors.RepositoryNotFoundError:
        raise NotFoundError(
            f"{where}: there is no such repository, or it is private; for a private one set HF_TOKEN to your token",
            field="repository",
        ) from None
    except errors.HFValidationError as error:
        raise InvalidArgumentError(f"{where}: {error}", field="repository") from None
    except errors.OfflineModeIsEnabled:
        raise FailedPreconditionError(
            f"{where}: HF_HUB_OFFLINE is set; --offline takes a model from the hub's cache of this machine"
        ) from None
    except Exception as error:  # the classes of HTTP errors differ between versions of the library
        if not isinstance(error, OSError) and "http" not in type(error).__module__:
            raise
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise UnavailableError(f"{where}: the hub does not answer: {reason}; try again later") from None
