"""On a GPU: an engine that is killed or stands still in the middle of its steps, and the one that comes after it.

The demo model's folder may be named by EDGED_DEMO_MODEL, for machines that cannot import it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from supervised import make_submit

from edged.config import Config, LogConfig, ModelConfig, WatchdogConfig
from edged.engine.gpu import find_gpu
from edged.errors import UnavailableError
from edged.worker import restarts
from edged.worker.state import State
from edged.worker.supervisor import Supervisor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_gpu() is None, reason="needs a GPU"),
    pytest.mark.timeout(300),
]
KILLS = 4
PROMPT = tuple(range(100, 160))


@pytest.fixture(scope="module")
def folder(request):
    named = os.environ.get("EDGED_DEMO_MODEL")
    return Path(named) if named else request.getfixturevalue("demo_model")


def gpu_processes():
    """MiB of GPU memory by process, as the driver counts them; other programs may use the GPU, too."""
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    pairs = (line.split(", ") for line in lines)
    return {int(pid): int(used) if used.isdecimal() else 0 for pid, used in pairs}


def run(folder, body, **watchdog):
    settings = {"device": "cuda", "dtype": "bfloat16", "context_length": 1024, "max_sequences": 4}
    config = Config(
        models=(ModelConfig(name="first", path=folder, **settings),),
        log=LogConfig(level="debug", format="json"),
        watchdog=WatchdogConfig(**watchdog),
    )

    async def main():
        supervisor = Supervisor(
            config, command=(sys.executable, str(Path(__file__).with_name("gpu_engine.py")))
        )
        await supervisor.start()
        try:
            assert await supervisor.wait_for(State.SERVING, State.FAILED) is State.SERVING, (
                supervisor.last_error
            )
            return await body(supervisor)
        finally:
            await supervisor.stop(0)

    return asyncio.run(main())


async def answer(supervisor, tokens=64):
    stream = supervisor.submit(make_submit(f"r{time.monotonic_ns()}", PROMPT, tokens))
    return [token for event in [e async for e in stream] for token in getattr(event, "token_ids", ())]


async def lose(supervisor, do):
    """Do something to the engine while it answers; return its requests' ends and the seconds until the next one serves."""
    engine = supervisor.engine_pid
    streams = [supervisor.submit(make_submit(f"{engine}-{number}", PROMPT, 900)) for number in range(3)]
    await anext(streams[0])
    do(engine)
    began = time.monotonic()
    ends = await asyncio.gather(*(_collect(stream) for stream in streams), return_exceptions=True)
    await supervisor.wait_for(State.SERVING)
    assert supervisor.engine_pid not in (0, engine)
    return ends, time.monotonic() - began


async def _collect(stream):
    return [event async for event in stream]


def test_an_engine_that_is_killed_in_its_steps_leaves_a_gpu_that_the_next_one_has_whole(folder, monkeypatch):
    monkeypatch.setattr(restarts, "DELAYS", (0.0,) * 100)

    async def body(supervisor):
        numbers = random.Random(1)
        expected, taken = await answer(supervisor), []
        seen = gpu_processes()
        used = seen.get(
            supervisor.engine_pid
        )  # None in a container whose processes have other numbers outside
        for _ in range(KILLS):
            await asyncio.sleep(numbers.uniform(0, 0.2))
            killed = supervisor.engine_pid
            ends, seconds = await lose(supervisor, lambda pid: os.kill(pid, signal.SIGKILL))
            assert all(isinstance(end, UnavailableError) for end in ends)
            assert await answer(supervisor) == expected
            if used is not None:
                seen = gpu_processes()
                assert killed not in seen, "the driver has forgotten the one that was killed"
                assert abs(seen[supervisor.engine_pid] - used) < 64
            taken.append(seconds)
        assert supervisor.restarts == KILLS
        counted = f"{used} MiB each time" if used is not None else "memory not seen from here"
        print(f"killed {KILLS} times, serving again after {min(taken):.1f} to {max(taken):.1f} s, {counted}")  # noqa: T201

    run(folder, body)


def test_an_engine_that_stands_still_on_a_gpu_is_replaced(folder):
    async def body(supervisor):
        expected = await answer(supervisor)
        ends, seconds = await lose(supervisor, lambda pid: os.kill(pid, signal.SIGSTOP))
        assert all("the engine hung" in str(end) for end in ends)
        assert "no step was finished" in supervisor.last_error
        assert await answer(supervisor) == expected
        print(f"stopped, serving again after {seconds:.1f} s with a step timeout of 3 s")  # noqa: T201

    run(folder, body, step_timeout=3.0)
