"""A supervisor of a fake engine, for the length of one coroutine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from fixtures.forked import child_starter, server

from edged.config import Config, LogConfig, ModelConfig, QueueConfig
from edged.worker.messages import Sampling, Stops, Submit
from edged.worker.state import State
from edged.worker.supervisor import Supervisor


def fake_engine(**settings):
    """The command of a fake engine; `fake_engine.py` says what can be set."""
    return (sys.executable, str(Path(__file__).with_name("fake_engine.py")), json.dumps(settings))


def make_config(*, queue=8, stream_buffer=256, **model):
    """Two models of the fake engine."""
    options = {"context_length": 1024, "max_sequences": 4, "prefill_chunk": 16, **model}
    return Config(
        models=tuple(ModelConfig(name=name, path=Path("/none"), **options) for name in ("first", "second")),
        queue=QueueConfig(capacity=queue, stream_buffer=stream_buffer),
        log=LogConfig(level="debug", format="json"),
    )


def make_submit(name, prompt=(1, 2, 3), max_tokens=4, *, model="first", stops=(), **options):
    sampling = options.pop("sampling", Sampling())
    return Submit(name, model, tuple(prompt), sampling, Stops(max_tokens, tuple(stops)), **options)


async def until(condition, timeout=60.0):
    """Wait for what the engine reports, which it does every quarter of a second."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


def run_supervised(body, config, *, wait=True, **settings):
    """Run a coroutine function with the supervisor; whatever happens, the engine ends with it."""

    async def main():
        supervisor = Supervisor(config, command=fake_engine(**settings))
        await supervisor.start()
        try:
            if wait:
                await asyncio.wait_for(supervisor.wait_for(State.SERVING), 60)
            return await asyncio.wait_for(body(supervisor), 120)
        finally:
            pid = supervisor.engine_pid
            await supervisor.stop(0)
            if pid:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

    with patch.object(asyncio, "create_subprocess_exec", child_starter(server().address)):
        return asyncio.run(main())
