"""The process that constraints are checked in: ``python -m edged.decoding.constraints.check_process``, started by the daemon.

It has all libraries loaded and forks for each check, which takes milliseconds; a library that runs into its stack's end,
takes too much memory or hangs ends the fork and nothing else. Standard input is a stream socket. It says a byte when
it is ready. Each byte that comes carries one end of a socket pair: the fork reads a :class:`Check` there, a line of JSON,
and answers with one line, ``{"grammar": ..}`` or ``{"error": ..}``; when it has ended, an :class:`End` follows.

Nobody needs to end a fork: it has timers of its own, for the processor's time and the clock's, whose signals end it.
When the daemon is gone, standard input ends, and all of them do.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from edged.decoding.constraints.base import CHOICE, JSON_SCHEMA, LARK, REGEX, Check, End
from edged.decoding.constraints.checker import check
from edged.errors import InvalidArgumentError

_STACK = 8 * 2**20
_TRIALS = 0.7
"""Part of a check's time after which it tries no further steps of an answer."""


def _answer(asked: Check) -> dict[str, Any]:
    try:
        return {"grammar": check(asked.kind, asked.text, seconds=_TRIALS * asked.cpu)}
    except InvalidArgumentError as error:
        return {"error": error.message}
    except MemoryError:
        return {
            "error": f"{asked.kind}: the constraint needs more than {asked.memory >> 20} MiB to compile; simplify it"
        }
    except BaseException as error:  # noqa: BLE001 - the library's Rust panics are no Exceptions
        return {"error": f"{asked.kind}: the constraint is refused: {str(error)[:400]}"}


def _check_one(end: socket.socket) -> None:
    """Answer on one end of a socket pair, within the limits that stand in the question."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with end.makefile("rb") as lines:
        asked = msgspec.json.decode(lines.readline(), type=Check)
    signal.setitimer(signal.ITIMER_REAL, max(asked.seconds, 0.001))
    signal.setitimer(signal.ITIMER_PROF, max(asked.cpu - time.process_time(), 0.001))
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, size + asked.memory)
    _limit(resource.RLIMIT_STACK, _STACK)
    _limit(resource.RLIMIT_CORE, 0)
    answer = json.dumps(_answer(asked)).encode() + b"\n"
    end.setblocking(True)
    end.sendall(answer)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _fork(end: socket.socket, inherited: list[socket.socket]) -> int:
    """Begin a check; its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for each in inherited:
            each.close()
        # What a Rust panic or a failed allocation writes is for nobody: the status says what happened.
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 2)
        # Where the machine runs out of memory, this goes before the engine does.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        _check_one(end)
        code = 0
    finally:
        os._exit(code)


def _reap(running: dict[int, socket.socket]) -> None:
    """Say how checks have ended."""
    for process in list(running):
        found, status, usage = os.wait4(process, os.WNOHANG)
        if not found:
            continue
        end = End(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        with running.pop(process) as line:
            line.setblocking(False)
            with contextlib.suppress(OSError):  # the asker is gone, or has the whole answer still to read
                line.sendall(msgspec.json.encode(end) + b"\n")


def serve(control: socket.socket) -> None:
    """Check until the other side of the socket is closed.

    Args:
        control: Brings an end of a socket pair for each check.
    """
    wake, waker = socket.socketpair()
    for each in (wake, waker):
        each.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A service manager's word to stop goes to the daemon, which lets running requests finish first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    running: dict[int, socket.socket] = {}
    control.sendall(b"\n")
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            _reap(running)
        if control in ready:
            data, files, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                break
            end = socket.socket(fileno=files[0])
            try:
                running[_fork(end, [control, wake, waker, *running.values()])] = end
            except OSError:
                end.close()  # no process can be made now, which the asker takes from the missing answer
    for process in running:
        os.kill(process, signal.SIGKILL)


def main() -> None:
    """Load what checks need, by some checks, and serve."""
    for kind, text in (
        (REGEX, "[a-z]{1,3}"),
        (LARK, 'start: "a" %json {"type": "object"}'),
        (CHOICE, '["a"]'),
        (JSON_SCHEMA, '{"type": "array", "items": {"type": "string", "format": "date"}, "maxItems": 2}'),
    ):
        check(kind, text)
    gc.disable()
    gc.freeze()
    serve(socket.socket(fileno=os.dup(sys.stdin.fileno())))


if __name__ == "__main__":
    main()
