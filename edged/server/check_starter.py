"""Keeps the process running that constraints are checked in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

from edged.errors import UnavailableError
from edged.log import get_logger

log = get_logger("server")

_START_SECONDS = 10.0
_RESTART_SECONDS = 1.0
"""Between two starts."""


class CheckStarter:
    """Starts :mod:`edged.decoding.constraints.check_process`, and starts it again should it end."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        """The one that runs, or was the last to run."""
        self._keeping: asyncio.Task[None] | None = None
        self._control: asyncio.Future[socket.socket] | None = None

    def start(self) -> None:
        """Begin to keep it running. After the first call the others do nothing."""
        if self._keeping is None:
            self._control = asyncio.get_running_loop().create_future()
            self._keeping = asyncio.ensure_future(self._keep())

    def ready(self) -> bool:
        """Whether constraints can be checked at once."""
        return self._control is not None and self._control.done()

    async def control(self) -> socket.socket:
        """What takes an end of a socket pair for each check, once the process is ready.

        Raises:
            UnavailableError: It does not start.
        """
        self.start()
        assert self._control is not None, "start makes it"  # noqa: S101
        if self._control.done():
            return self._control.result()
        try:
            return await asyncio.wait_for(asyncio.shield(self._control), _START_SECONDS)
        except asyncio.TimeoutError:
            raise UnavailableError(
                "the process that checks constraints does not start; look for its message in the daemon's log",
                retry_seconds=5.0,
            ) from None

    async def close(self) -> None:
        """End the process and all checks, and wait for its end."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._control is not None:
            self._control.cancel()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ours, theirs = socket.socketpair()
            with ours:
                ours.setblocking(False)
                try:
                    await self._run(ours, theirs)
                except OSError as error:
                    log.warning("the process that checks constraints does not start", reason=str(error))
                finally:
                    theirs.close()
                    if self._control is not None and self._control.done():
                        self._control = loop.create_future()
            await asyncio.sleep(_RESTART_SECONDS)

    async def _run(self, ours: socket.socket, theirs: socket.socket) -> None:
        """Start the process and wait for its end, or end it.

        Raises:
            OSError: The system starts none.
        """
        # Its own session: a terminal's ^C is the daemon's to act on, which then closes the socket.
        process = self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "edged.decoding.constraints.check_process",
            stdin=theirs.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"},
        )
        theirs.close()
        try:
            ready = await asyncio.get_running_loop().sock_recv(ours, 1)
            if ready and self._control is not None:
                self._control.set_result(ours)
            status = await process.wait()
            log.warning("the process that checks constraints ended and is started again", status=status)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)  # its checks, too
                await process.wait()
