"""The processes that check constraints: their limits, their ends, who waits for them and what is remembered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from edged.config import CHECK_BYTES, CHECKS, Config, LimitsConfig, ModelConfig
from edged.decoding.constraints import check_process
from edged.decoding.constraints.base import Check, Constraint
from edged.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from edged.server import check_starter, constraint_checks
from edged.server.constraint_checks import ConstraintChecker

# Long enough to run llguidance's own recursion into the end of its stack.
CRASH = Constraint("lark", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(7000)) + '\na7000: "x"')
GOOD = Constraint("regex", "[a-z]+")


def endless(number=0):
    """A constraint that compiles for seconds and takes gigabytes: a remainder for each of a million numbers."""
    both = [{"multipleOf": 997}, {"multipleOf": 1009 + number}]
    return Constraint("json_schema", json.dumps({"type": "integer", "allOf": both}))


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    """Time that a busy machine has, too. Tests that are about it set their own."""
    monkeypatch.setattr(constraint_checks, "_SECONDS", 120.0)
    monkeypatch.setattr(constraint_checks, "_CPU_SECONDS", 60.0)
    monkeypatch.setattr(constraint_checks, "_MOST_CPU_SECONDS", 60.0)
    monkeypatch.setattr(check_starter, "_START_SECONDS", 60.0)


def run(scenario, limits=None):
    async def main():
        checker = ConstraintChecker(limits)
        try:
            return await scenario(checker)
        finally:
            await checker.close()

    return asyncio.run(main())


def stat_of(process):
    """The fields of proc(5) behind the name, the state first; none of a process that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def processes_of(parent):
    """Ids of the processes whose parent this is."""
    numbers = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [number for number in numbers if stat_of(number)[1:2] == [str(parent)]]


async def stopped_checks(checker, process, count):
    """So many checks under way whose processes are stopped: one that went on might be over before it was seen.

    Returns:
        The checks, and their processes.
    """
    numbers, asked, stopped = iter(range(1000)), [], set()
    while len(stopped) < count or any(each.done() for each in asked):
        for each in [each for each in asked if each.done()]:  # over before it was stopped
            asked.remove(each)
            with pytest.raises(InvalidArgumentError):
                await each
        asked += [
            asyncio.ensure_future(checker.check(endless(next(numbers)))) for _ in range(count - len(asked))
        ]
        await asyncio.sleep(0.002)
        stopped = {each for each in processes_of(process) if stat_of(each)[:1] == ["T"]}
        for each in set(processes_of(process)) - stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)
    return asked, stopped


async def until(condition, seconds=60):
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("constraint", "field"),
    [(CRASH, "lark"), (endless(), "json_schema"), (Constraint("regex", "x*" * 40_000), "regex")],
)
def test_what_ends_its_process_is_refused_and_others_are_checked_by_the_same_one(constraint, field):
    async def scenario(checker):
        await checker.check(GOOD)
        first = checker._starter.process.pid
        with pytest.raises(InvalidArgumentError, match="too deeply nested or needs more than") as caught:
            await checker.check(constraint)
        assert caught.value.field == field
        assert await checker.check(Constraint("regex", "[a-b]+"))
        assert checker._starter.process.pid == first
        await until(lambda: not processes_of(first))

    run(scenario)


def test_what_takes_too_long_is_refused_and_remembered(monkeypatch):
    async def scenario(checker):
        monkeypatch.setattr(constraint_checks, "_CPU_SECONDS", 0.001)
        monkeypatch.setattr(constraint_checks, "_CPU_SECONDS_FOR_MEBIBYTE", 0)
        large = Constraint("json_schema", json.dumps({"enum": [f"value {number}" for number in range(5000)]}))
        with pytest.raises(InvalidArgumentError, match="of a core to compile; simplify it"):
            await checker.check(large)
        monkeypatch.setattr(constraint_checks, "_CPU_SECONDS", 60)
        with pytest.raises(InvalidArgumentError, match="of a core to compile; simplify it"):
            await checker.check(large)
        assert await checker.check(Constraint("choice", '["a", "b"]'))

    run(scenario)


def test_on_a_machine_that_has_no_time_nothing_is_said_of_the_constraint(monkeypatch):
    async def scenario(checker):
        await checker.check(GOOD)
        monkeypatch.setattr(constraint_checks, "_SECONDS", 0.002)
        monkeypatch.setattr(constraint_checks, "_LEAST_SECONDS", 0)
        monkeypatch.setattr(constraint_checks, "_GRACE_SECONDS", 60)
        large = Constraint("json_schema", json.dumps({"enum": [f"value {number}" for number in range(5000)]}))
        with pytest.raises(ResourceExhaustedError, match="too busy to check") as caught:
            await checker.check(large)
        assert caught.value.retry_seconds
        monkeypatch.setattr(constraint_checks, "_SECONDS", 120.0)
        assert await checker.check(large)

    run(scenario)


def test_more_than_can_be_checked_in_time_are_told_to_come_again(monkeypatch):
    async def scenario(checker):
        await checker.check(GOOD)
        process = checker._starter.process.pid
        await until(lambda: not processes_of(process))
        slow, stopped = await stopped_checks(checker, process, CHECKS)
        monkeypatch.setattr(constraint_checks, "_SECONDS", 0.35)
        late = [asyncio.ensure_future(checker.check(Constraint("regex", "x" * n))) for n in range(1, 4)]
        for each in late:
            with pytest.raises(
                ResourceExhaustedError, match=f"{CHECKS} constraints are being checked"
            ) as caught:
                await each
            assert caught.value.retry_seconds
        assert not checker._waiting
        monkeypatch.setattr(constraint_checks, "_SECONDS", 120.0)
        again = asyncio.ensure_future(checker.check(Constraint("regex", "x")))
        for check in stopped:
            os.kill(check, signal.SIGCONT)
        for each in slow:
            with pytest.raises(InvalidArgumentError):
                await each
        assert await again
        assert checker._free == CHECKS

    run(scenario)


def test_one_constraint_of_many_requests_is_checked_once():
    async def scenario(checker):
        found = await asyncio.gather(*(checker.check(GOOD) for _ in range(20)))
        assert all(grammar is found[0] for grammar in found)
        refused = await asyncio.gather(*(checker.check(endless()) for _ in range(20)), return_exceptions=True)
        assert {type(error) for error in refused} == {InvalidArgumentError}
        assert not checker._running

    run(scenario)


def test_what_was_checked_is_remembered_within_bounds(monkeypatch):
    async def scenario(checker):
        grammar = await checker.check(GOOD)
        checker._starter.process.kill()
        await checker._starter.process.wait()
        assert await checker.check(GOOD) is grammar
        monkeypatch.setattr(constraint_checks, "_REMEMBERED", 3)
        for number in range(5):
            await until(checker._starter.ready)
            await checker.check(Constraint("choice", json.dumps([str(number)])))
        assert len(checker._remembered) == 3
        sizes = sum(len(key.text) + len(value.text) for key, value in checker._remembered.items())
        assert sizes == checker._remembered_bytes

    run(scenario)


def test_a_caller_that_goes_away_leaves_no_answer_for_the_next_one_and_no_place_taken():
    async def scenario(checker):
        await checker.check(GOOD)
        tasks = [
            asyncio.ensure_future(checker.check(Constraint("choice", json.dumps([f"first {number}"]))))
            for number in range(CHECKS + 3)
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert "second" in (await checker.check(Constraint("choice", '["second"]'))).text
        await until(lambda: not checker._running)
        assert checker._free == CHECKS

    run(scenario)


def test_many_callers_are_answered_each_with_their_own():
    async def scenario(checker):
        wanted = [Constraint("choice", json.dumps([f"text {number}"])) for number in range(20)]
        found = await asyncio.gather(*(checker.check(each) for each in wanted))
        assert all(f"text {number}" in grammar.text for number, grammar in enumerate(found))

    run(scenario)


def test_a_process_that_ends_is_started_again(monkeypatch):
    monkeypatch.setattr(check_starter, "_RESTART_SECONDS", 0.01)

    async def scenario(checker):
        await checker.check(GOOD)
        first = checker._starter.process
        first.kill()
        await first.wait()
        # Between its end and the news of it there is one moment in which a request can only be told to come again.
        for number in range(1000):
            try:
                assert await checker.check(Constraint("choice", json.dumps([str(number)])))
                break
            except UnavailableError as error:
                assert error.retry_seconds  # noqa: PT017 - one of two outcomes
        assert checker._starter.process.pid != first.pid

    run(scenario)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([b'{"status":1,"cpu":0.01}\n'], InternalError),
        ([b'{"status":0,"cpu":0.01}\n'], InternalError),
        ([b'{"status":-9,"cpu":0.01}\n'], ResourceExhaustedError),
        ([], UnavailableError),
    ],
)
def test_what_is_no_fault_of_the_constraint_is_not_said_to_be_one(lines, error):
    checker = ConstraintChecker()
    with pytest.raises(error):
        checker._judge(GOOD, 0.2, lines)
    assert not checker._remembered


def test_a_panic_of_the_library_is_the_constraints_fault(monkeypatch):
    class PanicError(BaseException):
        """As Rust's panics come to Python."""

    def panic(*_args, **_options):
        raise PanicError("index out of bounds")

    monkeypatch.setattr(check_process, "check", panic)
    found = check_process._answer(Check("regex", "a", memory=1, cpu=1, seconds=1))
    assert found == {"error": "regex: the constraint is refused: index out of bounds"}


def test_a_word_to_stop_that_goes_to_all_processes_leaves_the_checks_of_the_last_requests():
    async def scenario(checker):
        await checker.check(GOOD)
        os.killpg(checker._starter.process.pid, signal.SIGTERM)
        assert await checker.check(Constraint("regex", "[a-b]+"))

    run(scenario)


def test_nothing_is_left_when_the_daemon_ends_or_is_killed():
    async def scenario(checker):
        await checker.check(GOOD)
        process = checker._starter.process
        await until(lambda: not processes_of(process.pid))
        (check,), stopped = await stopped_checks(checker, process.pid, 1)
        left = [process.pid, *stopped]
        # What the daemon held of it is closed by the system when the daemon is killed.
        (await checker._starter.control()).shutdown(2)
        await until(lambda: not any(alive(each) for each in left))
        check.cancel()

    run(scenario)


def test_closing_ends_checks_that_are_under_way():
    async def scenario(checker):
        await checker.check(GOOD)
        process = checker._starter.process.pid
        await until(lambda: not processes_of(process))
        (check,), stopped = await stopped_checks(checker, process, 1)
        left = [process, *stopped]
        await checker.close()
        with pytest.raises(asyncio.CancelledError):
            await check
        await until(lambda: not any(alive(each) for each in left))

    run(scenario)


def alive(process):
    """Whether a process runs; one that only waits for its parent does not."""
    return stat_of(process)[:1] not in ([], ["Z"])


def test_memory_is_inside_what_the_ledger_counts():
    limits = LimitsConfig(constraint_size=2**14)
    config = Config((ModelConfig(name="m", path=Path("m")),), limits=limits)
    assert limits.check_memory(2**20) == limits.check_memory(2**14) == CHECK_BYTES + 2**20

    async def scenario(checker):
        await checker.check(GOOD)
        process, peak = checker._starter.process.pid, 0
        tasks = [asyncio.ensure_future(checker.check(endless(number))) for number in range(4)]
        while not all(task.done() for task in tasks):
            peak = max(peak, sum(map(proportional, [process, *processes_of(process)])))
            await asyncio.sleep(0)
        assert 0 < peak <= config.checks
        assert {type(task.exception()) for task in tasks} == {InvalidArgumentError}

    run(scenario, limits)


def proportional(process):
    """Memory of a process in bytes, with its part of what it shares."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
