"""The engine as a child process of the daemon: its environment, its start, its channel and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from edged.errors import UnavailableError
from edged.worker.channel import DaemonChannel
from edged.worker.messages import Configure, Message, ToDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.config import Config

ENGINE_COMMAND = (sys.executable, "-m", "edged.worker.engine")
_ABORT_SECONDS = 2.0
"""An engine that was told to abort has this long to say where it hangs."""
_EXIT_SECONDS = 5.0
"""An engine whose channel is closed has this long to exit before it is killed."""


def engine_environment(config: Config) -> dict[str, str]:
    """Environment of the engine process: the daemon's, with the thread settings of the steps.

    What the operator has set stays as it is.
    """
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    threads = max((model.threads or cores for model in config.models), default=cores)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if "OMP_WAIT_POLICY" not in environment:
        # A worker thread that waits for the next piece of a step spins first, for milliseconds by default, and takes
        # the core from the daemon, or from the very thread it waits for. Some ten microseconds cover the gaps inside
        # a step; after it the threads sleep (libgomp of torch's wheels; KMP_BLOCKTIME is Intel's and LLVM's, in ms).
        environment.setdefault("GOMP_SPINCOUNT", "1000")
        environment.setdefault("KMP_BLOCKTIME", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


class EngineProcess:
    """One engine from its start to its end.

    Args:
        process: The child.
        channel: To it.
        closed: Resolves with the reason when the channel is closed.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, channel: DaemonChannel, closed: asyncio.Future[str]
    ) -> None:
        self._process = process
        self._channel = channel
        self._closed = closed

    @classmethod
    async def start(
        cls,
        config: Config,
        on_message: Callable[[ToDaemon], None],
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        load: tuple[str, ...] | None = None,
    ) -> EngineProcess:
        """Start an engine and send it its configuration.

        Args:
            config: The whole configuration.
            on_message: Called with everything that the engine says.
            command: Program and arguments.
            load: Names of the models to load; None: all of them.

        Raises:
            OSError: The process cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_close(reason: str) -> None:
            if not closed.done():
                closed.set_result(reason)

        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                "--parent",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=engine_environment(config),
            )
            theirs.close()
            channel = await DaemonChannel.connect(ours, on_message, on_close)
        except BaseException:
            ours.close()
            theirs.close()
            if process is not None:
                process.kill()
            raise
        channel.send(Configure(config, load))
        return cls(process, channel, closed)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message; without effect once the engine is gone."""
        self._channel.send(message)

    def kill(self) -> None:
        """SIGKILL; without effect once the engine is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def abort(self) -> None:
        """SIGABRT, at which an engine that can still act prints where each thread is, then SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _ABORT_SECONDS)
        await self.end()

    async def end(self) -> None:
        """SIGKILL, and close the channel."""
        self.kill()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
        self._channel.close()  # also where the process does not end: a driver may hold it in the kernel

    async def wait_closed(self) -> None:
        """Wait until the engine can answer nothing more: its channel is closed or the process has ended.

        Every message it had sent has been handed on by then.
        """
        exited = asyncio.ensure_future(self._process.wait())
        try:
            both: tuple[asyncio.Future[Any], ...] = (exited, self._closed)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not self._closed.done():
                # The kernel closes the engine's end with the process, unless a child of it holds a copy.
                await asyncio.wait({self._closed}, timeout=0.5)
        finally:
            exited.cancel()
            self._channel.close()

    async def wait_exited(self) -> str:
        """Wait until the process has ended, killing one that does not; return how it ended, in words.

        Raises:
            UnavailableError: SIGKILL does not end it.
        """
        try:
            code = await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
        except asyncio.TimeoutError:
            self.kill()
            try:
                code = await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
            except asyncio.TimeoutError:
                raise UnavailableError(
                    f"the engine, process {self.pid}, does not end after SIGKILL: the kernel holds it, most likely in the "
                    "GPU driver (journalctl -k); the GPU needs a reset or the machine a reboot"
                ) from None
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
