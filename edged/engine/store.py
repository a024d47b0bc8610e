"""The engine cache: a folder an engine, named by its key, written whole or not at all.

Layout of the cache folder::

    <key digest>.<random>/   plan, manifest.json and, once the engine ran, check.json
    .building-<key digest>.<random>/   what a build is writing; left over only if it was killed
    locks/                   one file a key, held while that key is built; store.lock, held for moments
    timings/                 what plain TensorRT timed, one file a TensorRT, driver and GPU

Several folders may hold one key: a new engine never replaces one before it has passed its check.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged.engine.durable import sync_folder, write_file
from edged.engine.entries import CHECK, MANIFEST, NAME, PLAN, Entry, StoredEngine, load_engine, read_entry
from edged.engine.file_lock import locked, remove_free_lock, try_lock
from edged.engine.manifest import DamagedError, Manifest
from edged.errors import FailedPreconditionError, ResourceExhaustedError
from edged.units import exact_size, format_size

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping

    from edged.engine.builder import Plan
    from edged.engine.key import EngineKey

DEFAULT_LIMIT = 4 << 30
"""Bytes that the cache may hold."""

_LOCKS, _STORE_LOCK, _BUILDING = "locks", "store.lock", ".building-"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def default_folder() -> Path:
    """Where engines are kept.

    ``$EDGED_CACHE/engines``, under systemd ``$CACHE_DIRECTORY/engines``, else ``edged/engines`` in ``$XDG_CACHE_HOME``
    or ``~/.cache``.
    """
    for name in ("EDGED_CACHE", "CACHE_DIRECTORY"):
        if os.environ.get(name):
            return Path(os.environ[name].split(":")[0]) / "engines"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "edged" / "engines"


class EngineStore:
    """The engines of one cache folder. Any number of processes may share it.

    Args:
        folder: The cache folder; made when the first engine is built.
        limit: Bytes it may hold before the least recently used engines go.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = folder
        self.limit = limit

    # -- reading

    def entries(self) -> list[Entry]:
        """Every engine, the last used first.

        Raises:
            FailedPreconditionError: The cache cannot be read.
        """
        try:
            folders = [each for each in self.folder.iterdir() if NAME.fullmatch(each.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise FailedPreconditionError(
                f"{self.folder} cannot be read ({error.strerror}): name another folder with --cache or EDGED_CACHE"
            ) from error
        found = [entry for each in folders if (entry := read_entry(each)) is not None]
        return sorted(found, key=lambda entry: (-entry.used, entry.folder.name))

    def find(self, key: EngineKey) -> StoredEngine | None:
        """The engine to use for a key, its bytes checked against their hash; None if there is none.

        Engines that passed their check come first, then unchecked ones, then failed ones; of equals the newest.
        """
        for entry in self._candidates(key):
            with contextlib.suppress(DamagedError, OSError):
                engine = load_engine(entry.folder)
                with contextlib.suppress(OSError):  # a read-only cache keeps no order of use
                    os.utime(entry.folder / MANIFEST)
                return engine
        return None

    def _candidates(self, key: EngineKey) -> list[Entry]:
        """Engines that serve a key, the best first."""
        candidates = [
            entry
            for entry in self.entries()
            if entry.manifest is not None and not entry.fault and entry.manifest.key.serves(key)
        ]
        return sorted(
            candidates, key=lambda entry: (entry.passed, not entry.failed, _serial(entry)), reverse=True
        )

    def verify(self) -> list[tuple[Entry, str]]:
        """Every engine with what is wrong with it, its plan read and hashed; an empty text if nothing is."""
        results = []
        for entry in self.entries():
            fault = entry.fault
            if not fault:
                try:
                    load_engine(entry.folder)
                except (DamagedError, OSError) as error:
                    fault = str(error)
            results.append((entry, fault))
        return results

    # -- building

    @contextlib.contextmanager
    def building(
        self,
        key: EngineKey,
        *,
        waiting: Callable[[], None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> Iterator[None]:
        """Be the one process that builds this key; look again with :meth:`find` once inside.

        Args:
            key: The key.
            waiting: Called again and again while another process builds it.
            cancelled: Set it to stop waiting.

        Raises:
            FailedPreconditionError: The cache cannot be written.
            ResourceExhaustedError: The disk is full.
            CancelledError: ``cancelled`` was set.
        """
        with self._writing():
            (self.folder / _LOCKS).mkdir(parents=True, exist_ok=True)
            # Says now, and not after the build, that nothing can be written.
            probe = self.folder / f"{_BUILDING}{key.digest}.{secrets.token_hex(4)}"
            probe.mkdir()
            with contextlib.suppress(FileNotFoundError):  # who builds this key sweeps such folders away
                probe.rmdir()
        with contextlib.ExitStack() as stack:
            with self._writing():
                stack.enter_context(locked(self._lock_of(key.digest), waiting=waiting, cancelled=cancelled))
                self._sweep(key.digest)
            yield

    def publish(self, key: EngineKey, plan: Plan, *, slot: str, label: str) -> StoredEngine:
        """Store a plan; call it inside :meth:`building`. It is there whole, or not at all.

        Older engines of its key that did not pass a check go.

        Raises:
            ResourceExhaustedError: The disk is full; nothing stays behind.
            FailedPreconditionError: The cache cannot be written.
        """
        manifest = Manifest(
            key=key,
            slot=slot,
            label=label,
            plan_bytes=len(plan.data),
            plan_sha256=hashlib.sha256(plan.data).hexdigest(),
            activation_bytes=plan.activation_bytes,
            build_seconds=plan.build_seconds,
            created=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            serial=1 + max((_serial(entry) for entry in self.entries()), default=0),
            refitted=plan.refitted,
        )
        name = f"{key.digest}.{secrets.token_hex(4)}"
        unfinished, folder = self.folder / f"{_BUILDING}{name}", self.folder / name
        with self._writing(f"for the engine's {format_size(len(plan.data))}"):
            try:
                unfinished.mkdir()
                write_file(unfinished / PLAN, plan.data)
                write_file(unfinished / MANIFEST, manifest.to_bytes())
                sync_folder(unfinished)
                unfinished.rename(folder)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            sync_folder(self.folder)
            self._remove_twins(key, folder, also_passed=False)
        return StoredEngine(folder, manifest, bytes(plan.data), None)

    def record_check(self, engine: StoredEngine, figures: Mapping[str, Any], *, passed: bool) -> None:
        """Keep what the comparison with the reference found; the engine's older twins go when it passed.

        Args:
            engine: The engine.
            figures: What was measured; JSON values.
            passed: The verdict.

        Raises:
            ResourceExhaustedError: The disk is full.
            FailedPreconditionError: The cache cannot be written.
        """
        content = json.dumps({**figures, "passed": passed}, sort_keys=True).encode() + b"\n"
        with self._writing():
            fresh = engine.folder / f".{CHECK}.{secrets.token_hex(4)}"
            try:
                write_file(fresh, content)
                fresh.replace(engine.folder / CHECK)
            except FileNotFoundError:
                return  # another process made room; what this one has loaded it can still use
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
            sync_folder(engine.folder)
            if passed:
                (self.folder / _LOCKS).mkdir(exist_ok=True)  # a cache that was copied here may lack it
                self._remove_twins(engine.manifest.key, engine.folder, also_passed=True)

    def _remove_twins(self, key: EngineKey, stays: Path, *, also_passed: bool) -> None:
        """Remove the other engines of a key."""
        with locked(self.folder / _LOCKS / _STORE_LOCK):
            for entry in self.entries():
                is_twin = entry.manifest is not None and entry.manifest.key == key and entry.folder != stays
                if is_twin and (also_passed or not entry.passed):
                    _remove(entry.folder)

    # -- removing

    def prune(
        self, limit: int | None = None, *, keep: Path | None = None, everything: bool = False
    ) -> list[Entry]:
        """Remove damaged engines, leftovers of killed builds and, above the limit, the least recently used engines.

        Of each slot the newest engine that passed its check stays, whatever the limit.

        Args:
            limit: Bytes to come down to; the store's own limit when None.
            keep: A folder that stays too: the engine that is about to be used.
            everything: Remove those that passed as well.

        Returns:
            The engines that were removed.

        Raises:
            FailedPreconditionError: The cache cannot be written.
        """
        limit = self.limit if limit is None else limit
        removed: list[Entry] = []
        if not self.folder.is_dir():
            return removed
        with self._writing():
            (self.folder / _LOCKS).mkdir(exist_ok=True)
            with locked(self.folder / _LOCKS / _STORE_LOCK):
                self._sweep_all()
                entries = self.entries()
                stays = set() if everything else _last_passed(entries)
                removed.extend(_remove_surplus(entries, 0 if everything else limit, {*stays, keep}))
        self._remove_locks()
        return removed

    def _remove_locks(self) -> None:
        """Remove the locks of keys that have no engine and that nobody builds."""
        kept = {each.name.partition(".")[0] for each in self.folder.iterdir() if NAME.fullmatch(each.name)}
        for lock in (self.folder / _LOCKS).glob("*.lock"):
            if lock.name != _STORE_LOCK and lock.stem not in kept:
                remove_free_lock(lock)

    def _sweep(self, digest: str) -> None:
        """Remove what killed builds of this key left, and its damaged engines; the caller holds the key's lock."""
        for each in self.folder.glob(f"{_BUILDING}{digest}.*"):
            shutil.rmtree(each, ignore_errors=True)
        for each in self.folder.glob(f"{digest}.*"):
            try:
                load_engine(each)
            except (DamagedError, FileNotFoundError):
                _remove(each)

    def _sweep_all(self) -> None:
        """Remove what killed builds left, of every key that nobody builds."""
        for each in self.folder.glob(f"{_BUILDING}*"):
            digest = each.name.removeprefix(_BUILDING).partition(".")[0]
            descriptor = try_lock(self._lock_of(digest))
            if descriptor is not None:
                shutil.rmtree(each, ignore_errors=True)
                os.close(descriptor)

    def _lock_of(self, digest: str) -> Path:
        return self.folder / _LOCKS / f"{digest}.lock"

    @contextlib.contextmanager
    def _writing(self, purpose: str = "") -> Iterator[None]:
        """Say what is wrong with the cache folder when it cannot be written."""
        try:
            yield
        except OSError as error:
            room = (
                "free some, name another folder with --cache or EDGED_CACHE, or run `edgectl engines prune`"
            )
            if error.errno in _FULL:
                raise ResourceExhaustedError(
                    f"no space left in {self.folder} {purpose}".rstrip()
                    + f" (limit {exact_size(self.limit)}): {room}"
                ) from error
            if error.errno in _READ_ONLY:
                raise FailedPreconditionError(
                    f"{self.folder} cannot be written ({error.strerror}), so no engine can be built or removed there: "
                    "name another folder with --cache or EDGED_CACHE, or build it beforehand with `edgectl build`"
                ) from error
            if isinstance(error, (FileExistsError, NotADirectoryError)):
                raise FailedPreconditionError(
                    f"{self.folder} is no folder: name another with --cache or EDGED_CACHE"
                ) from error
            raise FailedPreconditionError(
                f"{self.folder} cannot be used ({error.strerror}): name another folder with --cache or EDGED_CACHE"
            ) from error


def _serial(entry: Entry) -> int:
    return entry.manifest.serial if entry.manifest is not None else 0


def _last_passed(entries: list[Entry]) -> set[Path]:
    """Of each slot, the newest engine that passed its check."""
    newest: dict[str, Entry] = {}
    for entry in sorted(entries, key=_serial):
        if entry.passed and not entry.fault and entry.manifest is not None:
            newest[entry.manifest.slot] = entry
    return {entry.folder for entry in newest.values()}


def _remove_surplus(entries: list[Entry], limit: int, stays: set[Path | None]) -> Iterator[Entry]:
    """Remove damaged engines, and the least recently used ones until ``limit`` bytes are left."""
    total = sum(entry.nbytes for entry in entries)
    for entry in reversed(entries):
        if entry.fault or (total > limit and entry.folder not in stays):
            _remove(entry.folder)
            total -= entry.nbytes
            yield entry


def _remove(folder: Path) -> None:
    """Take an engine away at once, then its files: a reader finds it whole or not at all."""
    gone = folder.with_name(f"{_BUILDING}{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
