"""An engine's folder, read."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edged.engine.manifest import DamagedError, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PLAN, MANIFEST, CHECK = "plan", "manifest.json", "check.json"
"""Files of an engine."""

NAME = re.compile(r"([0-9a-f]{32})\.[0-9a-f]{8}")
"""Of an engine's folder: its key's digest and a random part."""


@dataclass(frozen=True)
class Entry:
    """One engine's folder.

    Attributes:
        folder: Where it lies.
        manifest: What is known of it; None if that cannot be read.
        fault: What is wrong with it, if its manifest or its files' sizes are.
        check: What its check found (``passed``, figures); None before it was checked.
        nbytes: Size of its files.
        used: When it was last used, in seconds since 1970.
    """

    folder: Path
    manifest: Manifest | None
    fault: str
    check: Mapping[str, Any] | None
    nbytes: int
    used: float

    @property
    def passed(self) -> bool:
        """Whether its check passed."""
        return self.check is not None and self.check.get("passed") is True

    @property
    def failed(self) -> bool:
        """Whether its check failed."""
        return self.check is not None and not self.passed

    @property
    def state(self) -> str:
        """``damaged``, ``passed``, ``failed`` or ``unchecked``."""
        if self.fault:
            return "damaged"
        return "unchecked" if self.check is None else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class StoredEngine:
    """An engine whose bytes are what was built."""

    folder: Path
    manifest: Manifest
    plan: bytes
    check: Mapping[str, Any] | None


def read_entry(folder: Path) -> Entry | None:
    """Look at a folder without reading its plan; None if it is gone."""
    manifest, fault, check = None, "", None
    try:
        files = {each.name: each.stat() for each in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Entry(folder, None, f"cannot be read: {error}", None, 0, 0.0)
    try:
        manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
        size = files[PLAN].st_size if PLAN in files else 0
        if not folder.name.startswith(manifest.key.digest + "."):
            fault = "the folder bears another key than its manifest"
        elif size != manifest.plan_bytes:
            fault = f"the plan has {size} bytes instead of {manifest.plan_bytes}"
        check = _read_check(folder)
    except (DamagedError, OSError) as error:
        fault = str(error)
    used = files[MANIFEST].st_mtime if MANIFEST in files else 0.0
    return Entry(folder, manifest, fault, check, sum(each.st_size for each in files.values()), used)


def _read_check(folder: Path) -> Mapping[str, Any] | None:
    try:
        check = json.loads((folder / CHECK).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return None  # unreadable: the engine is checked again
    return check if isinstance(check, dict) else None


def load_engine(folder: Path) -> StoredEngine:
    """Read an engine and hold its bytes against its manifest.

    Raises:
        DamagedError: They are not what was written.
        OSError: They cannot be read.
    """
    manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
    plan = (folder / PLAN).read_bytes()
    if len(plan) != manifest.plan_bytes or hashlib.sha256(plan).hexdigest() != manifest.plan_sha256:
        raise DamagedError("the plan's bytes are not those that were built")
    return StoredEngine(folder, manifest, plan, _read_check(folder))
