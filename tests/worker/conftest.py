from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from edged.config import Config, LogConfig, ModelConfig, QueueConfig
from edged.worker.messages import Sampling, Stops, Submit
from edged.worker.supervisor import Supervisor

FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


@pytest.fixture
def config():
    """Two models of the fake engine."""

    def make(*, queue=8, stream_buffer=256, **model):
        options = {"context_length": 1024, "max_sequences": 4, "prefill_chunk": 16, **model}
        return Config(
            models=tuple(ModelConfig(name=name, path=Path("/none"), **options) for name in ("first", "second")),
            queue=QueueConfig(capacity=queue, stream_buffer=stream_buffer),
            log=LogConfig(level="debug", format="json"),
        )

    return make


@pytest.fixture
def run_supervised(monkeypatch):
    """Run a coroutine function with a supervisor of a fake engine; whatever happens, the engine ends."""

    def run(body, config, *, wait=True, **settings):
        monkeypatch.setenv("FAKE_ENGINE", json.dumps(settings))
        monkeypatch.setenv("PYTHONFAULTHANDLER", "1")

        async def main():
            supervisor = Supervisor(config, command=FAKE_ENGINE)
            await supervisor.start()
            try:
                if wait:
                    from edged.worker.state import State

                    await asyncio.wait_for(supervisor.wait_for(State.SERVING), 30)
                return await asyncio.wait_for(body(supervisor), 60)
            finally:
                pid = supervisor.engine_pid
                await supervisor.stop(0)
                if pid:
                    with pytest.raises(ProcessLookupError):
                        os.kill(pid, 0)

        return asyncio.run(main())

    return run


@pytest.fixture
def make_submit():
    def make(name, prompt=(1, 2, 3), max_tokens=4, *, model="first", stops=(), **options):
        sampling = options.pop("sampling", Sampling())
        return Submit(name, model, tuple(prompt), sampling, Stops(max_tokens, tuple(stops)), **options)

    return make
