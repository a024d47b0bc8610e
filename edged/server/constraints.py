"""The constraint of a request: read, checked in a process of its own, and remembered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING

from edged.decoding.constraints.base import CHOICE, JSON_SCHEMA, LARK, READY_MADE, REGEX, Constraint, Grammar
from edged.errors import InvalidArgumentError, UnavailableError
from edged.log import get_logger

if TYPE_CHECKING:
    from edged.config import LimitsConfig
    from edged.v1 import inference_pb2

log = get_logger("server")

MOST_CHOICES = 10_000
_CHECK_SECONDS = 0.8
_START_SECONDS = 10.0
_IDLE_SECONDS = 60.0
_REMEMBERED = 64
_REMEMBERED_BYTES = 2**20
_LINE_BYTES = 64 * 2**20


def read_constraint(request: inference_pb2.GenerateRequest, limits: LimitsConfig) -> Constraint | None:
    """The constraint of a request, or None.

    Raises:
        InvalidArgumentError: It is too large, has no texts, or contradicts what else the request says.
    """
    kind = request.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == CHOICE:
        texts = list(request.choice.texts)
        if not 1 <= len(texts) <= MOST_CHOICES or "" in texts:
            raise InvalidArgumentError(
                f"choice has {len(texts)} texts{', one of them empty' if '' in texts else ''}; give 1 to {MOST_CHOICES}, "
                "none of them empty",
                field="choice.texts",
            )
        text = json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False)
    else:
        text = {
            JSON_SCHEMA: request.json_schema,
            REGEX: request.regex,
            LARK: request.lark,
            READY_MADE: request.ready_made,
        }[kind]
    size = len(text.encode())
    if size > limits.constraint_size:
        raise InvalidArgumentError(
            f"{kind} has {size} bytes, and at most {limits.constraint_size} are allowed; shorten it or raise "
            "limits.constraint_size in the configuration",
            field=kind,
        )
    check_settings(request, kind)
    return Constraint(kind, text)


def check_settings(request: inference_pb2.GenerateRequest, kind: str) -> None:
    """Refuse what cannot hold together with a constraint.

    Raises:
        InvalidArgumentError: The request says that it goes on after its end, or does not end early.
    """
    stops = request.stops
    if stops.ignore_eos:
        raise InvalidArgumentError(
            f"stops.ignore_eos and {kind} contradict each other: an answer of a given form ends with it; leave one out",
            field="stops.ignore_eos",
        )
    if stops.min_tokens:
        raise InvalidArgumentError(
            f"stops.min_tokens is {stops.min_tokens} beside {kind}: the form says when an answer may end; leave one out",
            field="stops.min_tokens",
        )


class ConstraintChecker:
    """Has constraints checked by :mod:`edged.decoding.constraints.checker`, one after the other.

    The process starts with the first constraint and ends when none came for a minute. What it said of the last ones is
    remembered.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._remembered: OrderedDict[Constraint, Grammar | str] = OrderedDict()
        self._remembered_bytes = 0

    async def check(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        Raises:
            InvalidArgumentError: It cannot be enforced, is malformed or too complex.
            UnavailableError: The process does not start.
        """
        known = self._remembered.get(constraint)
        if known is None:
            async with self._lock:
                known = self._remembered.get(constraint) or await self._ask(constraint)
                self._remember(constraint, known)
                self._idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._end)
        else:
            self._remembered.move_to_end(constraint)
        if isinstance(known, str):
            raise InvalidArgumentError(known, field=constraint.kind)
        return known

    async def close(self) -> None:
        """End the process and wait for its end."""
        process = self._process
        self._end()
        if process is not None:
            await process.wait()

    def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _ask(self, constraint: Constraint) -> Grammar | str:
        """The grammar, or why there is none."""
        process = await self._start()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"  # noqa: S101, PT018
        line = json.dumps({"kind": constraint.kind, "text": constraint.text}) + "\n"
        try:
            process.stdin.write(line.encode())
            answer = await asyncio.wait_for(process.stdout.readline(), _CHECK_SECONDS)
        except asyncio.TimeoutError:
            await self.close()
            log.warning("a constraint took too long to check", kind=constraint.kind)
            return f"{constraint.kind}: the constraint takes more than {_CHECK_SECONDS} s to compile; simplify it"
        except asyncio.CancelledError:
            await self.close()  # its answer would be taken for that to the next question
            raise
        except (OSError, ValueError):
            answer = b""
        if not answer:
            await self.close()
            log.warning("the check of a constraint ended its process", kind=constraint.kind)
            return (
                f"{constraint.kind}: the constraint is too deeply nested or needs too much memory to compile; "
                "simplify it"
            )
        found = json.loads(answer)
        return Grammar(found["grammar"]) if "grammar" in found else str(found["error"])

    async def _start(self) -> asyncio.subprocess.Process:
        """The process, which is ready to answer."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._process is not None and self._process.returncode is None:
            return self._process
        # Its own session: a terminal's ^C is the daemon's to act on, which then closes its standard input.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "edged.decoding.constraints.checker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_BYTES,
            env={**os.environ, "RAYON_NUM_THREADS": "1"},
        )
        self._process = process
        assert process.stdout is not None, "it is a pipe"  # noqa: S101
        try:
            ready = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
        except asyncio.TimeoutError:
            ready = b""
        except asyncio.CancelledError:
            await self.close()
            raise
        if not ready:
            await self.close()
            raise UnavailableError(
                "the process that checks constraints does not start; look for its message in the daemon's log",
                retry_seconds=5.0,
            )
        return process

    def _remember(self, constraint: Constraint, known: Grammar | str) -> None:
        def size(key: Constraint, value: Grammar | str) -> int:
            return len(key.text) + len(value if isinstance(value, str) else value.text)

        if constraint not in self._remembered:
            self._remembered[constraint] = known
            self._remembered_bytes += size(constraint, known)
        while len(self._remembered) > _REMEMBERED or self._remembered_bytes > _REMEMBERED_BYTES:
            self._remembered_bytes -= size(*self._remembered.popitem(last=False))
