"""The unix socket, claimed safely.

gRPC itself removes whatever lies at a socket's path, so a second daemon would silently take the first one's clients. A
lock file beside the socket and a test connection refuse that with the reason.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from edged.config import UNIX_PATH_LIMIT, default_socket
from edged.errors import ListenError
from edged.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import grpc

SOCKET_MODE = 0o660
_ALIVE_TIMEOUT_SECONDS = 1.0

log = get_logger("server")


class UnixListener:
    """The unix socket at ``path``; ``claim``, ``bind``, and ``close`` in that order.

    Args:
        path: Where the socket is to be; None takes the default that edgectl looks for.
        owner: User that is to own it, by name or number; empty: this process's.
        group: Likewise its group.
        mode: Rights on it.
        field: Its key in the configuration, for messages.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        owner: str = "",
        group: str = "",
        mode: int = SOCKET_MODE,
        field: str = "listen.unix",
    ) -> None:
        self._owner, self._group, self._mode, self._field = owner, group, mode, field
        self.path = (path or default_socket()).absolute()
        self._is_private_default = path is None and self.path.parent.name == f"edged-{os.getuid()}"
        self._lock: int | None = None
        self._bound: tuple[int, int, int] | None = None

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix:{self.path}"

    def check(self) -> None:
        """Refuse a path that can never work.

        Raises:
            ListenError: The path is too long, its folder is missing or not writable, or something else lies there.
        """
        length = len(os.fsencode(self.path))
        if length > UNIX_PATH_LIMIT:
            raise ListenError(
                f"{self._field}: {self.path} has {length} bytes and Linux allows {UNIX_PATH_LIMIT} for a socket; choose a "
                "shorter path",
                field=self._field,
            )
        folder = self.path.parent
        if self._is_private_default:
            self._check_private_folder(folder)
        elif not folder.is_dir():
            raise ListenError(
                f"{self._field}: the folder {folder} does not exist; make it with: mkdir -p {folder}",
                field=self._field,
            )
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise ListenError(
                f"{self._field}: user {os.getuid()} may not create files in {folder}; change its owner or mode, or choose "
                "another path",
                field=self._field,
            )
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise ListenError(
                    f"{self._field}: {self.path} exists and is no socket; remove it or choose another path",
                    field=self._field,
                )

    def claim(self) -> None:
        """Make the path ours: lock it, and remove the socket that a dead daemon left.

        Raises:
            ListenError: As ``check``, or a living process has the socket.
        """
        self.check()
        if self._is_private_default:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._check_private_folder(self.path.parent)
        try:
            self._take_lock()
            self._remove_stale()
        except OSError as error:
            self._release_lock()
            raise ListenError(
                f"{self._field}: {self.path} cannot be claimed: {error.strerror}; check the rights of its folder",
                field=self._field,
            ) from error
        except ListenError:
            self._release_lock()
            raise

    def bind(self, server: grpc.aio.Server) -> None:
        """Add the socket to ``server``, with its owner, group and rights.

        Raises:
            ListenError: It cannot be bound, or not be given away.
        """
        user, group = self._ids()
        try:
            with _umask(0o777):  # nobody's until it is whose it is to be
                server.add_insecure_port(f"unix:{quote(str(self.path))}")
            self._bound = self._identity()
            self._give(user, group)
            self.path.chmod(self._mode)
            self._bound = self._identity()
        except (RuntimeError, OSError) as error:
            raise ListenError(
                f"{self._field}: {self.path} cannot be bound ({error}); choose another path",
                field=self._field,
            ) from error

    def _ids(self) -> tuple[int, int]:
        """Numbers of owner and group; -1 leaves it as it is.

        Raises:
            ListenError: There is no user or group of that name.
        """
        try:
            user = -1 if not self._owner else pwd.getpwnam(self._owner).pw_uid
        except KeyError:
            user = self._number(self._owner, "owner", "user")
        try:
            group = -1 if not self._group else grp.getgrnam(self._group).gr_gid
        except KeyError:
            group = self._number(self._group, "group", "group")
        return user, group

    def _number(self, text: str, key: str, kind: str) -> int:
        if text.isdecimal() and int(text) < 2**32 - 1:
            return int(text)
        field = f"{self._field.rpartition('.')[0]}.{key}"
        raise ListenError(f"{field}: there is no {kind} {text}; make it, or correct the name", field=field)

    def _give(self, user: int, group: int) -> None:
        """Give the socket away.

        Raises:
            ListenError: This process may not.
        """
        if user == -1 and group == -1:
            return
        try:
            os.chown(self.path, user, group)
        except OSError as error:
            field = f"{self._field.rpartition('.')[0]}.{'group' if user in (-1, os.getuid()) else 'owner'}"
            raise ListenError(
                f"{field}: {self.path} cannot be given to {self._owner or 'its owner'}:{self._group or 'its group'} "
                f"({error.strerror}); a daemon may give a socket to groups that it is a member of: "
                f"systemctl edit edged, SupplementaryGroups={self._group or 'GROUP'}",
                field=field,
            ) from error

    def close(self) -> None:
        """Remove the socket if it is still ours, and the lock."""
        with suppress(OSError):
            if self._bound == self._identity():
                self.path.unlink()
        self._bound = None
        self._release_lock()

    def _identity(self) -> tuple[int, int, int]:
        """What tells the socket from a successor at the same path, which may get the same inode."""
        status = self.path.lstat()
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def _check_private_folder(self, folder: Path) -> None:
        """In a folder of /tmp that another user made, that user could replace the socket."""
        with suppress(FileNotFoundError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise ListenError(
                    f"{folder} belongs to user {status.st_uid} or is no folder, so it is not safe; remove it, or name a "
                    "socket with listen.unix",
                    field=self._field,
                )
            if status.st_mode & 0o077:
                folder.chmod(0o700)

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _take_lock(self) -> None:
        while self._lock is None:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(lock, 32).decode("ascii", "replace").strip()
                os.close(lock)
                raise self._in_use(f"the edged with process id {owner or 'unknown'}") from None
            # Another daemon may have removed the file between our open and our lock.
            with suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == self._lock_path.lstat().st_ino:
                    with suppress(OSError):  # a full disk: the number is for a message alone
                        os.ftruncate(lock, 0)
                        os.write(lock, f"{os.getpid()}\n".encode())
                    self._lock = lock
                    return
            os.close(lock)

    def _release_lock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = None

    def _remove_stale(self) -> None:
        if not self.path.exists():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_ALIVE_TIMEOUT_SECONDS)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                log.warning("removed the socket of a daemon that is gone", path=str(self.path))
                self.path.unlink()
                return
            except FileNotFoundError:
                return
            except (TimeoutError, BlockingIOError):
                pass  # somebody listens and is too busy to accept
            except PermissionError as error:
                raise ListenError(
                    f"{self._field}: {self.path} belongs to another user, and user {os.getuid()} may not see whether it "
                    "is in use; remove it or choose another path",
                    field=self._field,
                ) from error
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:
                    raise
        raise self._in_use("another process")

    def _in_use(self, owner: str) -> ListenError:
        return ListenError(
            f"{self._field}: {self.path} is in use by {owner}; stop it, or give this daemon a socket of its own with "
            "listen.unix",
            field=self._field,
        )


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    """Files made inside have no right that ``mask`` names, from the moment they exist."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
