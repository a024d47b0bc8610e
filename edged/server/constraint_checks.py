"""Constraints are checked beside the daemon: who waits, how long, and what was found is remembered."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections import OrderedDict, deque

import msgspec

from edged.config import CHECKS, LimitsConfig
from edged.decoding.constraints.base import Check, Constraint, End, Grammar
from edged.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from edged.log import get_logger
from edged.server.check_starter import CheckStarter

log = get_logger("server")

_SECONDS = 0.7
"""From a constraint's arrival to what is said of it."""
_LEAST_SECONDS = 0.2
"""What a check must have left of that when its turn comes."""
_GRACE_SECONDS = 0.1
"""How long after its time a check's process may take to end."""
_CPU_SECONDS = 0.2
_CPU_SECONDS_FOR_MEBIBYTE = 1.6
"""A small text that takes long explodes; a large one has more to read."""
_MOST_CPU_SECONDS = 0.6
_RETRY_SECONDS = 1.0
_REMEMBERED = 64
_REMEMBERED_BYTES = 2**20
_LINE_BYTES = 64 * 2**20


class ConstraintChecker:
    """Has constraints checked by :mod:`edged.decoding.constraints.check_process`, some beside each other.

    What was said of the last ones is remembered; a constraint that several requests bring at once is checked once.

    Args:
        limits: Bound a constraint's text, and with it the memory of a check.
    """

    def __init__(self, limits: LimitsConfig | None = None) -> None:
        self._limits = limits or LimitsConfig()
        self._starter = CheckStarter()
        self._free = CHECKS
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._running: dict[Constraint, asyncio.Task[Grammar | str]] = {}
        self._remembered: OrderedDict[Constraint, Grammar | str] = OrderedDict()
        self._remembered_bytes = 0

    def start(self) -> None:
        """Begin to start the process, so that no request has to wait for that."""
        self._starter.start()

    async def check(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        Raises:
            InvalidArgumentError: It cannot be enforced, is malformed or too complex.
            ResourceExhaustedError: So many are checked, or the machine is so busy, that nothing can be said of it in time.
            UnavailableError: The process does not start.
            InternalError: The check failed, which is a fault of edged's own.
        """
        known = self._remembered.get(constraint)
        if known is None:
            task = self._running.get(constraint)
            if task is None:
                task = self._running[constraint] = asyncio.ensure_future(self._find(constraint))
                task.add_done_callback(lambda done: self._forget(constraint, done))
            known = await asyncio.shield(task)  # others may wait for it, too
        else:
            self._remembered.move_to_end(constraint)
        if isinstance(known, str):
            raise InvalidArgumentError(known, field=constraint.kind)
        return known

    async def close(self) -> None:
        """End the process and wait for its end."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._starter.close()

    def _forget(self, constraint: Constraint, task: asyncio.Task[Grammar | str]) -> None:
        del self._running[constraint]
        if not task.cancelled():
            task.exception()  # those who waited have it; where nobody does any more it is no news

    async def _find(self, constraint: Constraint) -> Grammar | str:
        """The grammar, or why there is none."""
        control = await self._starter.control()
        end = asyncio.get_running_loop().time() + _SECONDS
        await self._take_place(_SECONDS - _LEAST_SECONDS)
        try:
            return await self._ask(control, constraint, end)
        finally:
            self._give_place()

    async def _take_place(self, seconds: float) -> None:
        """Wait until fewer than ``CHECKS`` are under way, in the order of arrival.

        Raises:
            ResourceExhaustedError: It takes longer than ``seconds``.
        """
        if self._free:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        timer = loop.call_later(seconds, _pass_over, turn)
        try:
            mine = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._give_place()
            raise
        finally:
            timer.cancel()
        if not mine:
            self._waiting.remove(turn)
            raise ResourceExhaustedError(
                f"{CHECKS} constraints are being checked and {len(self._waiting) + 1} wait, more than can be done in {_SECONDS} s; "
                "try again",
                retry_seconds=_RETRY_SECONDS,
            )

    def _give_place(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1

    async def _ask(self, control: socket.socket, constraint: Constraint, end: float) -> Grammar | str:
        """Have it checked until ``end``, in the loop's time; remember what was found."""
        loop = asyncio.get_running_loop()
        size = len(constraint.text.encode())
        cpu = min(_MOST_CPU_SECONDS, _CPU_SECONDS + _CPU_SECONDS_FOR_MEBIBYTE * size / 2**20)
        asked = Check(
            constraint.kind,
            constraint.text,
            memory=self._limits.check_memory(size),
            cpu=cpu,
            seconds=end - loop.time(),
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [b"\n"], [theirs.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
        except OSError as error:
            ours.close()
            raise _lost() from error
        try:
            writer.write(msgspec.json.encode(asked) + b"\n")
            lines = await asyncio.wait_for(_lines(reader), end - loop.time() + _GRACE_SECONDS)
        except asyncio.TimeoutError:
            raise _busy() from None
        finally:
            writer.close()
        return self._judge(constraint, cpu, lines)

    def _judge(self, constraint: Constraint, cpu: float, lines: list[bytes]) -> Grammar | str:
        """What a check's process wrote before it ended, and how it ended."""
        first = json.loads(lines[0]) if lines else {}
        if "grammar" in first:
            return self._remember(constraint, Grammar(first["grammar"]))
        if "error" in first:
            return self._remember(constraint, str(first["error"]))
        if not lines:
            raise _lost()
        end = msgspec.json.decode(lines[0], type=End)
        log.warning(
            "the check of a constraint ended its process",
            kind=constraint.kind,
            status=end.status,
            cpu=end.cpu,
        )
        slow = f"{constraint.kind}: the constraint takes more than {cpu / 2:.1f} s of a core to compile; simplify it"
        if end.status == -signal.SIGPROF:
            return self._remember(constraint, slow)
        if end.status == -signal.SIGALRM:
            if end.cpu < cpu / 2:
                raise _busy()
            return slow  # on a machine with less to do it may be found to be a good one
        if end.status == -signal.SIGKILL:
            raise _busy()  # the system has no memory left for it
        if end.status >= 0:
            raise InternalError(
                f"the check of a constraint ended with status {end.status} and says nothing of it; see the daemon's log"
            )
        return self._remember(
            constraint,
            f"{constraint.kind}: the constraint is too deeply nested or needs more than "
            f"{self._limits.check_memory(len(constraint.text.encode())) >> 20} MiB to compile; simplify it",
        )

    def _remember(self, constraint: Constraint, known: Grammar | str) -> Grammar | str:
        def size(key: Constraint, value: Grammar | str) -> int:
            return len(key.text) + len(value if isinstance(value, str) else value.text)

        self._remembered[constraint] = known
        self._remembered_bytes += size(constraint, known)
        while len(self._remembered) > _REMEMBERED or self._remembered_bytes > _REMEMBERED_BYTES:
            self._remembered_bytes -= size(*self._remembered.popitem(last=False))
        return known


def _pass_over(turn: asyncio.Future[bool]) -> None:
    if not turn.done():
        turn.set_result(False)


async def _lines(reader: asyncio.StreamReader) -> list[bytes]:
    """All lines up to the end: of an answer, if there is one, and of how the process ended.

    The answer is enough: how a process ended that has answered is of no interest.
    """
    lines: list[bytes] = []
    while not lines or not lines[0].startswith((b'{"grammar"', b'{"error"')):
        try:
            line = await reader.readline()
        except (OSError, ValueError):
            break
        if not line.endswith(b"\n"):
            break
        lines.append(line)
        if line.startswith(b'{"status"'):
            break
    return lines


def _busy() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the machine is too busy to check a constraint within {_SECONDS} s; try again",
        retry_seconds=_RETRY_SECONDS,
    )


def _lost() -> UnavailableError:
    return UnavailableError(
        "the process that checks constraints has ended and is started again; try again",
        retry_seconds=_RETRY_SECONDS,
    )
