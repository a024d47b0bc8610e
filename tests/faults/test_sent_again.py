"""A client that waits loses no request of which nothing was answered, and none is answered twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from attacked import IDS, SAMPLED

from edged import errors
from edged.client import AsyncClient, Chunk, Finished, Started

PROMPT = [5] * 640
"""Ten chunks."""
SOON = {"stall_timeout": "1s"}


def kinds(events):
    """The classes of a stream's events, each run of one class once."""
    found = [type(event) for event in events]
    return [kind for index, kind in enumerate(found) if index == 0 or kind is not found[index - 1]]


async def drain(stream):
    async for _ in stream:
        pass


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_was_sent_into_a_frozen_engine_is_answered_by_the_next_one(start_daemon):
    daemon = start_daemon(fake={"step_seconds": 0.002, "vocabulary": 49152}, watchdog=SOON)  # for a chat's

    async def ask():
        async with AsyncClient(daemon.address, wait_for_ready=True) as client:
            return [event async for event in client.generate(IDS, max_tokens=5, timeout=60, **SAMPLED)]

    def ctl(*words, message=None):
        address = ["--address", daemon.address, "--wait", "60s"]
        words = [sys.executable, "-m", "edged.cli", *words, *address]
        return subprocess.run(words, input=message, capture_output=True, text=True, check=False)

    with daemon.client(wait_for_ready=True) as client, ThreadPoolExecutor(4) as pool:
        expected = client.generate(IDS, max_tokens=5, **SAMPLED).answer().token_ids
        os.kill(client.status().engine_pid, signal.SIGSTOP)
        blocking = pool.submit(lambda: list(client.generate(IDS, max_tokens=5, timeout=60, **SAMPLED)))
        with_asyncio = pool.submit(lambda: asyncio.run(ask()))
        commands = [
            pool.submit(ctl, "generate", "A", "-n", "2", "--ignore-eos"),
            pool.submit(ctl, "chat", "-n", "2", message="A\n"),
        ]
        for answer in (blocking, with_asyncio):
            events = answer.result(60)
            assert kinds(events) == [Started, Chunk, Finished]
            assert tuple(token for event in events[1:-1] for token in event.token_ids) == expected
        for command in commands:
            assert command.result(60).returncode == 0, command.result().stderr
        status = client.status()
        assert status.engine_restarts == 1
        assert "its process is stopped" in status.last_error
    assert daemon.stop() == 0


def test_a_prompt_that_was_being_read_is_read_again_and_begins_once(start_daemon):
    daemon = start_daemon(fake={"step_seconds": 0.2}, watchdog=SOON)
    with daemon.client(wait_for_ready=True) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: list(client.generate(PROMPT, max_tokens=3, timeout=60, **SAMPLED)))
        until(lambda: client.status().models[0].running)
        os.kill(client.status().engine_pid, signal.SIGSTOP)
        events = answer.result(60)
        assert kinds(events) == [Started, Chunk, Finished]
        assert events[-1].usage.generated_tokens == 3
        status = client.status()
        assert (status.engine_restarts, status.requests_finished) == (1, 1)
    assert daemon.stop() == 0


def test_a_request_of_which_something_was_answered_is_not_sent_again(start_daemon):
    daemon = start_daemon(fake={"step_seconds": 0.01}, watchdog=SOON)
    with daemon.client(wait_for_ready=True) as client:
        stream = iter(client.generate(IDS, max_tokens=900, **SAMPLED))
        assert [type(next(stream)), type(next(stream))] == [Started, Chunk]
        os.kill(client.status().engine_pid, signal.SIGSTOP)
        with pytest.raises(errors.UnavailableError, match="the engine hung") as caught:
            list(stream)
        assert caught.value.lost
        status = client.wait_ready(60)
        assert (status.requests_failed, status.requests_finished) == (1, 0)
        assert status.models[0].generated_tokens == 0, "the new engine has seen nothing of it"

    async def ask():
        async with AsyncClient(daemon.address, wait_for_ready=True) as client:
            stream = aiter(client.generate(IDS, max_tokens=900, **SAMPLED))
            assert [type(await anext(stream)) for _ in range(2)] == [Started, Chunk]
            os.kill((await client.status()).engine_pid, signal.SIGSTOP)
            with pytest.raises(errors.UnavailableError, match="the engine hung"):
                await drain(stream)
            assert (await client.wait_ready(60)).requests_failed == 2

    asyncio.run(ask())
    assert daemon.stop() == 0


def test_a_request_that_ends_every_engine_is_sent_twice_and_no_more(start_daemon):
    daemon = start_daemon(fake={"hang_at": 5}, watchdog=SOON)
    with daemon.client(wait_for_ready=True) as client:
        with pytest.raises(errors.UnavailableError, match="the engine hung") as caught:
            client.generate(PROMPT, max_tokens=3, timeout=60, **SAMPLED).answer()
        assert caught.value.lost
        assert client.wait_ready(60).engine_restarts == 2
    assert daemon.stop() == 0


def test_the_deadline_is_one_for_all_tries(start_daemon):
    daemon = start_daemon(fake={"load_seconds": 4}, watchdog=SOON)
    with daemon.client(wait_for_ready=True) as client:
        os.kill(client.status().engine_pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(errors.DeadlineError):
            client.generate(IDS, max_tokens=3, timeout=1, **SAMPLED).answer()
        assert time.monotonic() - began >= 1
        assert client.generate(IDS, max_tokens=3, timeout=60, **SAMPLED).answer().finished
    assert daemon.stop() == 0


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_whoever_waits_for_the_next_try_can_be_stopped(start_daemon, how):
    daemon = start_daemon(fake={"load_seconds": 30}, wait=False)
    until(daemon.socket.exists)
    client = daemon.client(wait_for_ready=True)
    generation = client.generate(IDS, max_tokens=3, **SAMPLED)
    threading.Timer(1.0, generation.cancel if how == "cancel" else client.close).start()
    with pytest.raises(errors.CancelledError if how == "cancel" else errors.EdgedError):
        generation.answer()
    client.close()

    async def ask():
        client = AsyncClient(daemon.address, wait_for_ready=True)
        generation = client.generate(IDS, max_tokens=3, **SAMPLED)
        stop = asyncio.ensure_future(asyncio.sleep(1.0))
        stop.add_done_callback(
            lambda _: generation.cancel() if how == "cancel" else asyncio.ensure_future(client.close())
        )
        with pytest.raises(errors.CancelledError if how == "cancel" else errors.EdgedError):
            await generation.answer()
        await client.close()

    asyncio.run(ask())
    daemon.process.kill()
    daemon.wait()


def test_questions_wait_for_a_daemon_that_loads(start_daemon):
    daemon = start_daemon(fake={"load_seconds": 3}, wait=False)

    async def ask():
        async with AsyncClient(daemon.address, wait_for_ready=True) as client:
            return await client.tokenize("Hello", timeout=60)

    with daemon.client(wait_for_ready=True) as client:
        tokens = client.tokenize("Hello", timeout=60)
        assert tokens == asyncio.run(ask())
        assert client.detokenize(tokens, timeout=60) == "Hello"
        client.wait_ready(60)
    assert daemon.stop() == 0
