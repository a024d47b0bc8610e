from __future__ import annotations

import asyncio

import pytest

from edged.config import Config
from edged.errors import (
    CancelledError,
    Code,
    DeadlineError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from edged.worker.messages import Failed, Finished, Started, Tokens
from edged.worker.open_requests import OpenRequests
from edged.worker.stream import RequestStream, error_of

STARTED = Started("a", 3)
FINISHED = Finished("a", "length", "", 3, 1)


def tokens(number):
    return Tokens("a", (number,), str(number))


@pytest.fixture
def cancelled():
    return []


@pytest.fixture
def stream(cancelled):
    return RequestStream("a", "m", 8, lambda stream, reason: cancelled.append((stream.request_id, reason)))


async def collect(stream):
    return [event async for event in stream]


def test_events_come_in_order_and_the_stream_ends_after_finished(stream):
    async def main():
        reading = asyncio.ensure_future(collect(stream))
        for event in (STARTED, tokens(1), FINISHED):
            await asyncio.sleep(0)
            stream.push(event)
        assert await reading == [STARTED, tokens(1), FINISHED]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_what_came_before_an_error_is_given_first(stream):
    async def main():
        stream.push(STARTED)
        stream.push(tokens(1))
        stream.fail(UnavailableError("gone", retry_seconds=2.0))
        assert [await anext(stream), await anext(stream)] == [STARTED, tokens(1)]
        for _ in range(2):
            with pytest.raises(UnavailableError, match="gone"):
                await anext(stream)

    asyncio.run(main())


def test_an_error_wakes_a_reader_that_waits(stream):
    async def main():
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.fail(UnavailableError("gone"))
        with pytest.raises(UnavailableError):
            await reading

    asyncio.run(main())


def test_a_reader_too_far_behind_loses_the_stream_and_learns_it_at_once(stream):
    failures = []
    stream.when_failed(failures.append)
    assert all(stream.push(tokens(number)) for number in range(8))
    assert not stream.push(tokens(8))
    assert failures[0].code is Code.RESOURCE_EXHAUSTED
    assert stream.ended
    late = []
    stream.when_failed(late.append)
    assert late == failures


def test_finished_has_room_in_a_full_stream(stream):
    for number in range(8):
        stream.push(tokens(number))
    assert stream.push(FINISHED)


def test_cancel_asks_once_it_can_have_an_effect(stream, cancelled):
    stream.cancel("why")
    assert cancelled == [("a", "why")]
    stream.push(FINISHED)
    stream.cancel()
    assert len(cancelled) == 1


def test_leaving_the_block_cancels_what_has_not_ended(stream, cancelled):
    async def main():
        async with stream:
            pass

    asyncio.run(main())
    assert cancelled == [("a", "the client went away")]


def test_only_the_first_end_counts(stream):
    stream.fail(DeadlineError("late"))
    stream.fail(UnavailableError("gone"))

    async def main():
        with pytest.raises(DeadlineError):
            await anext(stream)

    asyncio.run(main())


def test_an_error_crosses_with_its_kind_field_and_time():
    error = error_of(Failed("a", Code.RESOURCE_EXHAUSTED.value, "full", 2.5))
    assert (type(error), error.retry_seconds) == (ResourceExhaustedError, 2.5)
    error = error_of(Failed("a", Code.INVALID_ARGUMENT.value, "bad", field="stops.strings"))
    assert (type(error), error.field) == (InvalidArgumentError, "stops.strings")
    assert type(error_of(Failed("a", Code.CANCELLED.value, "gone"))) is CancelledError


def test_open_requests_end_once_each_and_are_counted():
    dropped = []
    table = OpenRequests(lambda stream, reason: dropped.append((stream.request_id, reason)), Config(()))

    def add(name):
        stream = RequestStream(name, "m", 8, lambda *_: None)
        table.add([stream])
        return stream

    streams = {name: add(name) for name in ("done", "bad", "slow", "lost", "waits")}
    assert table.pending("m") == 5
    for name in ("done", "bad", "slow", "lost"):
        table.give(Started(name, 1))
    assert table.pending("m") == 1
    table.give(Finished("done", "length", "", 1, 1))
    table.give(Failed("done", Code.INTERNAL.value, "too late"))
    table.give(Failed("bad", Code.INTERNAL.value, "broken"))
    for number in range(9):
        table.give(Tokens("slow", (number,), ""))
    assert dropped == [("slow", "the client reads too slowly")]
    table.fail_all(lambda: UnavailableError("gone"))
    assert (table.finished, table.failed, len(table), table.pending("m")) == (1, 4, 0, 0)
    assert all(stream.ended for stream in streams.values())
    table.give(Tokens("nobody", (1,), ""))
