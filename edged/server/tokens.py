"""Bearer tokens from a file that holds their digests, with the scopes of each.

One token a line: its name, its scopes, its SHA-256 (``edgectl token`` makes both). A token is 256 random bits, so a
plain digest gives nothing away and a slow one would only serve who floods the daemon with guesses.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import pwd
import re
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.config import SCOPES
from edged.errors import ListenError
from edged.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FIELD = "listen.tokens"
_LOOK_SECONDS = 0.5
"""A change of the file is seen this much later at most."""
_SIZE_LIMIT = 2**20
_SERVICE_USER = "edged"
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._@-]{0,63})\s+([a-z,]+)\s+sha256:([0-9a-f]{64})")

log = get_logger("server")


@dataclass(frozen=True)
class Token:
    """One line of the file."""

    name: str
    scopes: frozenset[str]
    digest: bytes


def make_token() -> str:
    """A new token: 256 random bits."""
    return f"edged_{secrets.token_urlsafe(32)}"


def token_line(name: str, scopes: tuple[str, ...], token: str) -> str:
    """The line of the file that lets ``token`` in."""
    return f"{name} {','.join(scopes)} sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def parse_tokens(text: str) -> tuple[list[Token], list[str]]:
    """The tokens of a file, and what is wrong with its other lines (which are not quoted: one may hold a token)."""
    tokens: list[Token] = []
    faults: list[str] = []
    names: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        scopes = frozenset(match[2].split(",")) if match else frozenset()
        if match is None:
            faults.append(f"line {number} is not NAME SCOPES sha256:DIGEST (edgectl token makes such lines)")
        elif not scopes <= set(SCOPES):
            faults.append(f"line {number} has a scope that is none of {', '.join(SCOPES)}")
        elif match[1] in names:
            faults.append(f"line {number} has the name of an earlier line, {match[1]}")
        else:
            names.add(match[1])
            tokens.append(Token(match[1], scopes, bytes.fromhex(match[3])))
    return tokens, faults


class TokenFile:
    """The tokens of a file, which is read again when it changes.

    A file that is gone, empty or unreadable lets nobody in; a line that is wrong lets its token not in. A file that others
    could have written is not taken, and the tokens that were known stay. Calls that have begun go on.

    Args:
        path: The file.
        owners: Users, by number, whom the file may belong to; by default root, the one who runs this, and the service's.
    """

    def __init__(self, path: Path, owners: Iterable[int] | None = None) -> None:
        self.fault = ""
        """What is wrong with the file as it was last seen; empty where nothing is."""
        self._path = path
        self._owners = _owners() if owners is None else frozenset(owners)
        self._tokens: list[Token] = []
        self._seen: object = None
        self._looked = float("-inf")

    def check(self) -> None:
        """Read the file at the start.

        Raises:
            ListenError: It cannot be read, holds a wrong line or no token, or others can have written it.
        """
        try:
            status, text = self._read()
            tokens, faults = parse_tokens(text)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise ListenError(
                f"{FIELD}: {self._path} cannot be read ({reason}); make it with: edgectl token NAME >> {self._path}",
                field=FIELD,
            ) from error
        if faults or not tokens:
            said = "; ".join(faults[:5]) or "it holds no token, so nobody could call"
            raise ListenError(f"{FIELD}: {self._path}: {said}", field=FIELD)
        self._tokens, self._seen = tokens, _signature(status)

    def find(self, secret: str) -> Token | None:
        """The token that a caller showed, compared in a time that says nothing about the known ones."""
        self._refresh()
        digest = hashlib.sha256(secret.encode("utf-8", "replace")).digest()
        found = None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def look(self) -> None:
        """Read the file again now, if it has changed; :attr:`fault` says what is wrong with it."""
        self._looked = float("-inf")
        self._refresh()

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        try:
            seen = _signature(self._path.stat())
            if seen == self._seen:
                return
            status, text = self._read()
            seen = _signature(status)
            tokens, faults = parse_tokens(text)
        except ListenError as error:
            self._seen, self.fault = seen, f"{error.message}; the tokens that were known stay"
            log.error("the new token file is not taken", reason=self.fault)  # noqa: TRY400
            return
        except (OSError, UnicodeError) as error:
            seen, tokens, faults = None, [], [f"it cannot be read ({type(error).__name__})"]
            if not self._tokens and self._seen is None:
                return
        first, self._seen = self._seen is None, seen
        self._tokens = tokens
        said = "; ".join([*faults[:5], *([] if tokens else ["it lets nobody in"])])
        self.fault = f"{FIELD}: {self._path}: {said}" if said else ""
        if faults:
            log.error("token file has faults", path=str(self._path), faults=faults[:5])
        if not tokens:
            log.error("the token file lets nobody in", path=str(self._path))
        elif not first:
            log.info("token file read again", path=str(self._path), names=[token.name for token in tokens])

    def _read(self) -> tuple[os.stat_result, str]:
        """Status and content of one and the same file.

        Raises:
            ListenError: Others than its owner may write to it, or that is one who may not.
            OSError, UnicodeError: It cannot be read.
        """
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            self._check_rights(status)
            data = file.read(_SIZE_LIMIT + 1)
        if len(data) > _SIZE_LIMIT:
            raise OSError(errno.EFBIG, f"larger than {_SIZE_LIMIT} bytes")
        return status, data.decode("utf-8")

    def _check_rights(self, status: os.stat_result) -> None:
        if status.st_mode & 0o022:
            raise ListenError(
                f"{FIELD}: others than its owner may write to {self._path}; run: chmod go-w {self._path}",
                field=FIELD,
            )
        if status.st_uid not in self._owners:
            raise ListenError(
                f"{FIELD}: {self._path} belongs to user {status.st_uid}, who could let in whom he likes; run: "
                f"chown root {self._path}",
                field=FIELD,
            )


def _owners() -> frozenset[int]:
    owners = {0, os.geteuid()}
    with suppress(KeyError):
        owners.add(
            pwd.getpwnam(_SERVICE_USER).pw_uid
        )  # an administrator may check what the service will read
    return frozenset(owners)


def _signature(status: os.stat_result) -> object:
    """Changes when a file does, its rights and its owner among it."""
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns
