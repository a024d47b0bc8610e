from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_executor import generate
from supervised import make_config, make_submit, run_supervised, until

from edged.config import LogConfig
from edged.errors import (
    CancelledError,
    Code,
    DeadlineError,
    EdgedError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edged.worker.messages import Finished, Started, Tokens
from edged.worker.state import State

VOCABULARY = 97


def letters(tokens):
    return "".join(chr(ord("a") + token % 26) for token in tokens)


async def collect(stream):
    return [event async for event in stream]


def test_a_request_streams_its_tokens_and_ends_with_finished():
    async def body(supervisor):
        events = await collect(supervisor.submit(make_submit("a", (1, 2, 3), 5)))
        expected = generate((1, 2, 3), 5, VOCABULARY)
        assert isinstance(events[0], Started)
        assert events[0].prompt_tokens == 3
        assert [event.token_ids for event in events[1:-1]] == [(token,) for token in expected]
        assert "".join(event.text for event in events[1:]) == letters(expected)
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.prompt_tokens, finished.generated_tokens) == ("length", 3, 5)
        assert finished.timings.steps == 5
        assert (supervisor.finished, supervisor.failed) == (1, 0)

    run_supervised(body, make_config())


def test_a_stop_string_ends_a_request_and_does_not_show():
    expected = letters(generate((5,), 12, VOCABULARY))

    async def body(supervisor):
        stop = expected[4:7]
        events = await collect(supervisor.submit(make_submit("a", (5,), 12, stops=[stop])))
        assert "".join(event.text for event in events[1:]) == expected[: expected.index(stop)]
        assert (events[-1].reason, events[-1].matched_stop) == ("stop_string", stop)

    run_supervised(body, make_config())


def test_requests_of_two_models_and_many_clients_get_what_each_gets_alone():
    async def body(supervisor):
        prompts = {f"{n}": ([n] * (1 + 7 * n), 3 + 5 * n, ("first", "second")[n % 2]) for n in range(12)}
        streams = [
            supervisor.submit(make_submit(name, prompt, count, model=model))
            for name, (prompt, count, model) in prompts.items()
        ]
        for stream, (prompt, count, _) in zip(
            await asyncio.gather(*map(collect, streams)), prompts.values(), strict=True
        ):
            got = [token for event in stream if isinstance(event, Tokens) for token in event.token_ids]
            assert got == generate(prompt, count, VOCABULARY)
        await until(
            lambda: all(m.pages_free == m.pages and m.running == 0 for m in supervisor.models.values())
        )

    run_supervised(body, make_config(queue=16))


@pytest.mark.parametrize(("prompt", "max_tokens"), [([1] * 800, 4), ([1], 900)])
def test_cancelling_frees_the_pages_in_prefill_and_in_decode(prompt, max_tokens):
    async def body(supervisor):
        stream = supervisor.submit(make_submit("a", prompt, max_tokens))
        assert isinstance(await anext(stream), Started)
        await until(lambda: supervisor.models["first"].running == 1)
        assert supervisor.models["first"].pages_free < supervisor.models["first"].pages
        stream.cancel("the client hung up")
        with pytest.raises(CancelledError, match="the client hung up"):
            await collect(stream)
        await until(lambda: supervisor.models["first"].pages_free == supervisor.models["first"].pages)
        assert supervisor.failed == 1

    run_supervised(body, make_config(), step_seconds=0.02)


def test_leaving_the_block_cancels():
    async def body(supervisor):
        async with supervisor.submit(make_submit("a", (1,), 900)) as stream:
            await anext(stream)
        await until(lambda: stream.ended)
        assert supervisor.failed == 1

    run_supervised(body, make_config(), step_seconds=0.01)


def test_a_deadline_ends_a_request_wherever_it_is():
    async def body(supervisor):
        soon = time.monotonic() + 0.3
        running = supervisor.submit(make_submit("runs", (1,), 900, deadline=soon))
        waiting = supervisor.submit(make_submit("waits", (1,), 4, deadline=soon))
        with pytest.raises(DeadlineError, match="tokens were generated: give it more time"):
            await collect(running)
        with pytest.raises(DeadlineError, match="while the request waited"):
            await collect(waiting)

    run_supervised(body, make_config(max_sequences=1), step_seconds=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"prompt": (1, 97)},
            "token id 97 is outside the vocabulary: ids go from 0 to 96",
        ),
        ({"prompt": (-1,)}, "token id -1 is outside"),
        ({"prompt": ()}, "the prompt has no tokens"),
        ({"max_tokens": 0}, "stops.max_tokens is 0: at least 1"),
        (
            {"max_tokens": 1022},
            "3 tokens and max_tokens is 1022: together at most 1024",
        ),
        ({"stops": [""]}, "empty string"),
    ],
)
def test_the_engine_refuses_what_cannot_run_and_serves_on(options, words):
    async def body(supervisor):
        with pytest.raises(InvalidArgumentError, match=words):
            await collect(supervisor.submit(make_submit("bad", **options)))
        assert len(await collect(supervisor.submit(make_submit("good")))) == 6

    run_supervised(body, make_config())


def test_an_unknown_model_and_a_name_in_use_are_refused_at_once():
    async def body(supervisor):
        with pytest.raises(NotFoundError, match="no model is called third: there are first, second"):
            supervisor.submit(make_submit("a", model="third"))
        stream = supervisor.submit(make_submit("a"))
        with pytest.raises(InvalidArgumentError, match="request id a is in use"):
            supervisor.submit(make_submit("a"))
        await collect(stream)
        await collect(supervisor.submit(make_submit("a")))

    run_supervised(body, make_config())


def test_a_full_queue_refuses_with_a_time_to_come_back():
    async def body(supervisor):
        async def ask(n):
            return await collect(supervisor.submit(make_submit(str(n), (n,), 20)))

        ends = await asyncio.gather(*map(ask, range(12)), return_exceptions=True)
        refused = [end for end in ends if isinstance(end, ResourceExhaustedError)]
        assert len(refused) == 12 - 3, "one runs and two wait"
        assert all(error.retry_seconds > 0 for error in refused)
        assert supervisor.finished == 3

    run_supervised(body, make_config(queue=2, max_sequences=1), step_seconds=0.01)


def test_a_reader_that_stops_loses_its_own_stream_only():
    async def body(supervisor):
        lost = asyncio.get_running_loop().create_future()
        slow = supervisor.submit(make_submit("slow", (1,), 400))
        slow.when_failed(lost.set_result)
        fast = await collect(supervisor.submit(make_submit("fast", (2,), 100)))
        assert isinstance(fast[-1], Finished)
        assert (await lost).code is Code.RESOURCE_EXHAUSTED
        got = [await anext(slow) for _ in range(16)]
        with pytest.raises(ResourceExhaustedError, match="16 messages behind"):
            await anext(slow)
        tokens = [event.token_ids[0] for event in got[1:]]
        assert tokens == generate((1,), 15, VOCABULARY), "what came before is whole"
        await until(lambda: supervisor.models["first"].running == 0)

    run_supervised(body, make_config(stream_buffer=16), step_seconds=0.001)


def test_sigkill_ends_every_stream_and_the_engine_comes_back():
    async def body(supervisor):
        states = []
        supervisor.subscribe(states.append)
        running = [supervisor.submit(make_submit(str(n), (n,), 900)) for n in range(6)]
        for stream in running[:4]:
            await anext(stream)
        killed = supervisor.engine_pid
        os.kill(killed, signal.SIGKILL)
        for end in await asyncio.gather(*map(collect, running), return_exceptions=True):
            assert isinstance(end, UnavailableError)
            assert end.retry_seconds > 0
        assert supervisor.failed == 6
        with pytest.raises(UnavailableError, match="the engine starts again") as info:
            supervisor.submit(make_submit("early"))
        assert info.value.retry_seconds > 0
        await supervisor.wait_for(State.SERVING)
        assert states == [State.RESTARTING, State.SERVING]
        assert supervisor.restarts == 1
        assert supervisor.engine_pid not in {0, killed}
        assert supervisor.last_error == "signal SIGKILL"
        assert len(await collect(supervisor.submit(make_submit("a")))) == 6

    run_supervised(body, make_config(), step_seconds=0.01)


def test_a_step_that_fails_is_internal_for_who_ran_and_unavailable_for_who_waited():
    async def body(supervisor):
        streams = [supervisor.submit(make_submit(str(n), (n,), 900)) for n in range(3)]
        other = supervisor.submit(make_submit("other", model="second", max_tokens=900))
        ends = await asyncio.gather(*map(collect, [*streams, other]), return_exceptions=True)
        kinds = sorted(type(end).__name__ for end in ends)
        assert kinds == ["InternalError", "UnavailableError", "UnavailableError", "UnavailableError"]
        assert "the device fell off the bus" in str(
            next(end for end in ends if isinstance(end, InternalError))
        )
        assert supervisor.state is State.RESTARTING
        await supervisor.wait_for(State.SERVING)
        assert "the device fell off the bus" in supervisor.last_error

    run_supervised(body, make_config(max_sequences=1), step_seconds=0.01, fail_at=20)


@pytest.mark.parametrize("level", ["debug", "info"])
def test_an_engine_whose_pages_are_in_disorder_is_replaced(level):
    """Found when it is idle, and with log.level: debug in the very step."""

    async def body(supervisor):
        stream = supervisor.submit(make_submit("a", max_tokens=40))
        (end,) = await asyncio.gather(collect(stream), return_exceptions=True)
        if level == "debug":
            assert isinstance(end, InternalError)
            assert "AssertionError" in str(end)
        else:
            assert isinstance(end[-1], Finished)
        await supervisor.wait_for(State.RESTARTING)
        await supervisor.wait_for(State.SERVING)
        assert "AssertionError" in supervisor.last_error
        assert supervisor.restarts == 1

    config = dataclasses.replace(make_config(), log=LogConfig(level=level, format="json"))
    run_supervised(body, config, step_seconds=0.001, corrupt_at=10)


@pytest.mark.parametrize("error", ["CheckpointError", "LedgerError"])
def test_a_model_that_cannot_load_is_not_tried_again(error):
    async def body(supervisor):
        assert await supervisor.wait_for(State.FAILED, State.SERVING, State.RESTARTING) is State.FAILED
        assert supervisor.restarts == 0
        assert isinstance(supervisor.failure, EdgedError)
        assert "first does not load" in supervisor.failure.message
        with pytest.raises(UnavailableError, match="first does not load"):
            supervisor.submit(make_submit("a"))

    run_supervised(body, make_config(), wait=False, load_error=error)


def test_a_crash_loop_ends_as_failed_with_the_reason(monkeypatch):
    monkeypatch.setattr("edged.worker.restarts.DELAYS", (0.0, 0.01, 0.02))

    async def body(supervisor):
        await supervisor.wait_for(State.FAILED)
        assert supervisor.restarts == 3
        assert supervisor.last_error == "the engine ended 4 times in a row, last: exit status 7"

    run_supervised(body, make_config(), wait=False, exit_at_start=7)


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def body(supervisor):
        streams = [supervisor.submit(make_submit(str(n), (n,), 30)) for n in range(3)]
        await anext(streams[0])
        stopping = asyncio.ensure_future(supervisor.stop(30))
        await asyncio.sleep(0)
        assert supervisor.state is State.DRAINING
        with pytest.raises(UnavailableError, match="the daemon stops"):
            supervisor.submit(make_submit("late"))
        for events in await asyncio.gather(*map(collect, streams)):
            assert isinstance(events[-1], Finished)
        await stopping
        assert supervisor.engine_pid == 0
        assert supervisor.restarts == 0
        assert {report.state for report in supervisor.models.values()} == {"unloaded"}, (
            "nothing loads any more"
        )

    run_supervised(body, make_config(max_sequences=2), step_seconds=0.01)


def test_the_drain_timeout_cuts_off_what_still_runs():
    async def body(supervisor):
        stream = supervisor.submit(make_submit("a", (1,), 900))
        await anext(stream)
        await supervisor.stop(0.2)
        with pytest.raises(UnavailableError, match="the daemon stops"):
            await collect(stream)

    run_supervised(body, make_config(), step_seconds=0.02)


def test_kill_ends_at_once_and_nothing_restarts():
    async def body(supervisor):
        stream = supervisor.submit(make_submit("a", (1,), 900))
        await anext(stream)
        supervisor.kill()
        with pytest.raises(UnavailableError):
            await collect(stream)
        await until(lambda: supervisor.engine_pid == 0)
        assert supervisor.restarts == 0

    run_supervised(body, make_config(), step_seconds=0.02)


def test_stopping_while_the_engine_loads_does_not_wait_for_it():
    async def body(supervisor):
        await until(lambda: supervisor.engine_pid != 0)
        before = time.monotonic()
        await supervisor.stop(30)
        assert time.monotonic() - before < 10

    run_supervised(body, make_config(), wait=False, load_seconds=60)


def test_an_engine_that_ignores_sigterm_ends_with_its_daemon(tmp_path):
    """The daemon is killed, and so is its engine, even in the middle of loading."""
    script = tmp_path / "daemon.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]}\n"
        "from edged.log import configure\n"
        "from edged.worker.supervisor import Supervisor\n"
        "from supervised import fake_engine, make_config\n"
        "configure()\n"
        "async def main():\n"
        "    supervisor = Supervisor(make_config(), command=fake_engine(load_seconds=60))\n"
        "    await supervisor.start()\n"
        "    while not supervisor.engine_pid:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(supervisor.engine_pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    daemon = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    try:
        engine = int(daemon.stdout.readline())
        time.sleep(1.0)  # it has asked the kernel by then, or has seen that its parent is gone
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{engine}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError("the engine outlives its daemon")
