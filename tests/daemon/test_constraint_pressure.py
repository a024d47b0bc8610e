"""Constraints that are dear to check, at a real daemon: refused one beside another, and nothing of them is left."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edged.errors import EdgedError, InvalidArgumentError, ResourceExhaustedError


def remainders(number):
    """A schema with a state for each of a million remainders."""
    return {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009 + number}]}


DEAR = (
    *({"json_schema": remainders(number)} for number in range(4)),
    {"regex": "x*" * 40_000},
    {"regex": "(ab?)*" * 20_000},
    {"regex": "(a|b)?" * 10_000},
    {"json_schema": {"allOf": [{"pattern": f".*{number}.*"} for number in range(100)]}},
    {"lark": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} | 'q'" for i in range(4500)) + '\na4500: "x"'},
    {"lark": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "x"'},
)


def processes_below(parent):
    """Ids of the processes that check constraints for a daemon, with all they forked."""
    found, added = {parent}, True
    names: dict[int, str] = {}
    while added:
        added = False
        for folder in Path("/proc").iterdir():
            try:
                number = int(folder.name)
                above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                names[number] = (folder / "cmdline").read_text()
            except (ValueError, OSError):
                continue
            if above in found and number not in found:
                found.add(number)
                added = True
    return {number for number in found if "check_process" in names.get(number, "")}


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_dear_constraints_at_once_are_refused_each_and_others_go_on(start_daemon):
    daemon = start_daemon(fake={}, forked=False)
    with daemon.client() as client, ThreadPoolExecutor(len(DEAR)) as threads:

        def refused(constraint):
            with pytest.raises((InvalidArgumentError, ResourceExhaustedError)) as caught:
                next(iter(client.generate([1, 2], max_tokens=2, **constraint)))
            return caught.value

        errors = list(threads.map(refused, DEAR))
        for constraint, error in zip(DEAR, errors, strict=True):
            if isinstance(error, ResourceExhaustedError):
                assert (
                    error.retry_seconds
                )  # more than can be checked in time, or no time at all on this machine
            else:
                assert error.field == next(iter(constraint))
        assert client.generate([1, 2], max_tokens=2).answer().token_ids
        # The next ones find the process that they are forked from where it was.
        assert len(processes_below(daemon.process.pid)) >= 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_check_outlives_the_daemon(start_daemon, number):
    daemon = start_daemon(fake={}, forked=False)
    until(lambda: processes_below(daemon.process.pid))
    checking = processes_below(daemon.process.pid)
    with daemon.client() as client, ThreadPoolExecutor(2) as threads:

        def ask(wanted):
            with pytest.raises(EdgedError) as caught:
                list(client.generate([1, 2], max_tokens=2, json_schema=json.dumps(wanted)))
            return caught.value

        asked = [threads.submit(ask, remainders(each)) for each in range(2)]
        daemon.signal(number)
        for each in asked:
            assert each.result()
    daemon.wait(60)
    until(lambda: not any(map(runs, checking)))
