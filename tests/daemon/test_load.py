"""The real daemon under many clients that come and go: nothing is left behind, nobody is forgotten."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from edged import errors
from edged.client import AsyncClient
from edged.v1 import inference_pb2, inference_pb2_grpc

ALLOWED = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}


def memory_of(*pids):
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


async def visit(address, numbers, texts, until):
    """One client: requests of all kinds, some of them given up, until the time is over; how they ended."""
    ends = Counter()
    async with AsyncClient(address) as client:
        while time.monotonic() < until:
            prompt = [*numbers.choice(texts)[: numbers.randrange(1, 200)], numbers.randrange(100, 3000)]
            generation = client.generate(
                prompt,
                max_tokens=numbers.randrange(1, 16),
                temperature=numbers.choice([0.0, 1.0]),
                priority=numbers.randrange(-3, 4),
                session=numbers.choice(["", "", "a", "b", "c"]),
                timeout=numbers.choice([None, None, None, numbers.uniform(0.05, 20)]),
                ignore_eos=True,
            )
            task = asyncio.ensure_future(generation.answer())
            if numbers.random() < 0.3:
                with suppress(asyncio.TimeoutError, errors.EdgedError):
                    await asyncio.wait_for(asyncio.shield(task), numbers.uniform(0, 5))
                generation.cancel()
            try:
                await task
            except errors.EdgedError as error:
                ends[error.code.name] += 1
                if error.retry_seconds is not None:
                    await asyncio.sleep(min(error.retry_seconds, 2.0))
            except asyncio.CancelledError:
                ends["CANCELLED"] += 1
            else:
                ends["OK"] += 1
    return ends


async def crowd(address, clients, seconds, seed, on_second):
    texts = [[100 + (which * 977 + 31 * i * i) % 3000 for i in range(200)] for which in range(4)]
    until = time.monotonic() + seconds
    tasks = [
        asyncio.ensure_future(visit(address, random.Random(seed + index), texts, until))
        for index in range(clients)
    ]
    begun = time.monotonic()
    while time.monotonic() < until:
        await asyncio.sleep(1.0)
        on_second(time.monotonic() - begun)
    left = set(tasks)
    while left:  # those that wait come to their turn, one after the other, however slow the machine is
        done, left = await asyncio.wait(left, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert done, f"{len(left)} clients wait for requests that do not end"
    return sum((task.result() for task in tasks), Counter())


def drive(daemon, *, clients, seconds, warm_up):
    """Run a crowd; how requests ended, and the memory of both processes over time after the warm-up."""
    with daemon.client() as client:
        engine = client.status().engine_pid
        samples = []

        def sample(passed):
            if passed >= warm_up:
                samples.append((memory_of(daemon.process.pid), memory_of(engine)))

        ends = asyncio.run(crowd(daemon.address, clients, seconds, 4711, sample))
        assert set(ends) <= ALLOWED, ends
        assert ends["OK"] > 0
        end = time.monotonic() + 60
        while True:
            status = client.status()
            (model,) = status.models
            if model.running == model.waiting == 0 and model.pages_free + model.pages_pinned == model.pages:
                break
            assert time.monotonic() < end, model
            time.sleep(0.05)
        assert model.host_pages_free == model.host_pages
        for session in client.sessions():
            client.drop_session(session.name)
        assert client.status().models[0].pages_pinned == 0
        assert status.engine_restarts == 0
    assert "Traceback" not in daemon.log()
    return ends, samples


def serve(start_daemon, threads):
    return start_daemon(
        model={"max_sequences": 4, "context_length": 512, "host_kv": "64MiB", "threads": threads},
        queue={"capacity": 48},
        log={"level": "warning", "format": "json"},
    )


def test_a_small_crowd_for_a_moment(start_daemon):
    daemon = serve(start_daemon, threads=1)
    ends, _ = drive(daemon, clients=8, seconds=2, warm_up=2)
    assert ends["OK"] > 3
    assert daemon.stop() == 0


@pytest.mark.soak
def test_sixty_four_clients_for_five_minutes(start_daemon):
    daemon = serve(start_daemon, threads=2)
    ends, samples = drive(daemon, clients=64, seconds=300, warm_up=60)
    assert ends["OK"] > 30
    assert all(ends[code] for code in ALLOWED), ends
    first, last = samples[: len(samples) // 6], samples[-len(samples) // 6 :]

    def mean(part, which):
        return sum(sample[which] for sample in part) / len(part)

    print(  # noqa: T201 - what a long test has seen
        "memory of daemon and engine (MiB), first and last sixth:",
        [round(mean(part, w) / 2**20, 1) for w in (0, 1) for part in (first, last)],
        dict(ends),
    )
    for which in (0, 1):
        assert mean(last, which) <= 1.02 * mean(first, which), "daemon, engine"
    assert daemon.stop() == 0


def open_and_drop(daemon, count):
    """Connections of all kinds: a bare one, one that begins to speak, one that is in the middle of a call."""
    numbers = random.Random(11)
    for index in range(count):
        if index % 10:
            with socket.socket(socket.AF_UNIX) as bare:
                bare.connect(str(daemon.socket))
                if numbers.random() < 0.5:
                    bare.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: numbers.randrange(1, 25)])
        else:
            # A channel of its own each time: channels to one address share a connection otherwise.
            with grpc.insecure_channel(daemon.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                request = inference_pb2.GenerateRequest(
                    token_ids={"ids": [5, 6, 7]}, stops={"max_tokens": 60}
                )
                call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
                next(call)


def check_connections(start_daemon, count):
    daemon = start_daemon(fake={"step_seconds": 0.001}, queue={"capacity": 256})
    open_and_drop(daemon, 50)

    def descriptors():
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))  # noqa: PTH208 - only their number is wanted

    def settle(least, seconds):
        """The fewest descriptors within so many seconds, or until they are as few as ``least``."""
        found, end = descriptors(), time.monotonic() + seconds
        while found > least and time.monotonic() < end:
            time.sleep(0.1)
            found = min(found, descriptors())
        return found

    before = settle(0, 2)
    open_and_drop(daemon, count)
    assert settle(before, 60) <= before
    with daemon.client() as client:
        assert client.generate([5, 6], max_tokens=2, ignore_eos=True, temperature=0.0).answer().token_ids
        end = time.monotonic() + 60
        while client.status().models[0].running:
            assert time.monotonic() < end
    assert daemon.stop() == 0


def test_connections_that_are_dropped_leave_no_descriptor(start_daemon):
    check_connections(start_daemon, 200)


@pytest.mark.soak
def test_ten_thousand_dropped_connections_leave_no_descriptor(start_daemon):
    check_connections(start_daemon, 10_000)
