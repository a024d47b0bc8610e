"""Constraints at the daemon's door: the process that checks them, its end and its new start."""

from __future__ import annotations

import asyncio
import json

import pytest

from edged.config import LimitsConfig
from edged.decoding.constraints.base import Constraint
from edged.errors import InvalidArgumentError
from edged.server import constraints
from edged.server.constraints import ConstraintChecker, read_constraint
from edged.v1 import inference_pb2, types_pb2

# Long enough to run llguidance's own recursion into the end of its stack.
CRASH = Constraint("lark", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(7000)) + '\na7000: "x"')
GOOD = Constraint("regex", "[a-z]+")


def run(scenario):
    async def main():
        checker = ConstraintChecker()
        try:
            return await scenario(checker)
        finally:
            await checker.close()

    return asyncio.run(main())


def test_what_ends_the_process_is_refused_and_the_next_one_is_checked():
    async def scenario(checker):
        await checker.check(GOOD)
        first = checker._process.pid
        with pytest.raises(
            InvalidArgumentError, match="too deeply nested or needs too much memory"
        ) as caught:
            await checker.check(CRASH)
        assert caught.value.field == "lark"
        assert await checker.check(Constraint("regex", "[a-b]+"))
        assert checker._process.pid != first

    run(scenario)


def test_what_takes_too_long_is_refused(monkeypatch):
    async def scenario(checker):
        await checker.check(GOOD)
        monkeypatch.setattr(constraints, "_CHECK_SECONDS", 0.001)
        large = Constraint("json_schema", json.dumps({"enum": [f"value {number}" for number in range(5000)]}))
        with pytest.raises(InvalidArgumentError, match="simplify it"):
            await checker.check(large)
        monkeypatch.setattr(constraints, "_CHECK_SECONDS", 10)
        with pytest.raises(InvalidArgumentError, match="simplify it"):
            await checker.check(large)  # remembered
        assert await checker.check(Constraint("choice", '["a", "b"]'))

    run(scenario)


def test_what_was_checked_is_remembered_within_bounds(monkeypatch):
    async def scenario(checker):
        grammar = await checker.check(GOOD)
        checker._process.kill()
        await checker._process.wait()
        assert await checker.check(GOOD) is grammar
        monkeypatch.setattr(constraints, "_REMEMBERED", 3)
        for number in range(5):
            await checker.check(Constraint("choice", json.dumps([str(number)])))
        assert len(checker._remembered) == 3
        sizes = sum(len(key.text) + len(value.text) for key, value in checker._remembered.items())
        assert sizes == checker._remembered_bytes

    run(scenario)


def test_a_caller_that_goes_away_leaves_no_answer_for_the_next_one():
    async def scenario(checker):
        await checker.check(GOOD)
        task = asyncio.ensure_future(checker.check(Constraint("choice", '["first"]')))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "second" in (await checker.check(Constraint("choice", '["second"]'))).text

    run(scenario)


def test_many_callers_are_answered_each_with_their_own():
    async def scenario(checker):
        wanted = [Constraint("choice", json.dumps([f"text {number}"])) for number in range(20)]
        found = await asyncio.gather(*(checker.check(each) for each in wanted))
        assert all(f"text {number}" in grammar.text for number, grammar in enumerate(found))

    run(scenario)


def test_the_process_ends_when_it_is_not_needed(monkeypatch):
    monkeypatch.setattr(constraints, "_IDLE_SECONDS", 0.05)

    async def scenario(checker):
        await checker.check(GOOD)
        process = checker._process
        await asyncio.wait_for(process.wait(), 10)
        assert await checker.check(Constraint("regex", "x"))

    run(scenario)


def request(**fields):
    return inference_pb2.GenerateRequest(text="x", **fields)


def test_requests_are_read():
    limits = LimitsConfig()
    assert read_constraint(request(), limits) is None
    assert read_constraint(request(regex="a"), limits) == Constraint("regex", "a")
    choice = inference_pb2.Choice(texts=["a", "é", "a"])
    assert read_constraint(request(choice=choice), limits) == Constraint("choice", '["a", "é"]')


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"choice": inference_pb2.Choice()}, "choice.texts"),
        ({"choice": inference_pb2.Choice(texts=["a", ""])}, "choice.texts"),
        ({"choice": inference_pb2.Choice(texts=map(str, range(10_001)))}, "choice.texts"),
        ({"json_schema": '{"enum": ["' + "x" * 2**20 + '"]}'}, "json_schema"),
        ({"regex": "a", "stops": types_pb2.Stops(ignore_eos=True)}, "stops.ignore_eos"),
        ({"regex": "a", "stops": types_pb2.Stops(min_tokens=3)}, "stops.min_tokens"),
    ],
)
def test_what_contradicts_itself_or_is_too_large_is_refused(fields, field):
    with pytest.raises(InvalidArgumentError) as caught:
        read_constraint(request(**fields), LimitsConfig())
    assert caught.value.field == field
