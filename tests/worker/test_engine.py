"""The real engine process with the demo model, as the daemon runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from edged.checkpoint.tokenizer import Tokenizer
from edged.config import Config, LogConfig, ModelConfig
from edged.errors import CancelledError, CheckpointError, Code, DeadlineError, UnavailableError
from edged.worker.messages import Finished, Sampling, Started, Stops, Submit, Tokens
from edged.worker.state import State
from edged.worker.supervisor import Supervisor

LONG = "The quick brown fox jumps over the lazy dog. " * 40


def config_of(folder, **model):
    options = {"context_length": 576, "max_sequences": 2, "prefill_chunk": 16, "threads": 1, **model}
    return Config(models=(ModelConfig(name="demo", path=folder, **options),), log=LogConfig(format="json"))


class Served:
    """A supervisor on an event loop of its own, and the tokenizer."""

    def __init__(self, folder):
        self.loop = asyncio.new_event_loop()
        self.tokenizer = Tokenizer.load(folder)
        self.supervisor = Supervisor(config_of(folder))
        self.names = 0

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    def submit(self, prompt, max_tokens, *, sampling=None, stops=(), **options):
        self.names += 1
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self.supervisor.submit(
            Submit(
                f"r{self.names}",
                "demo",
                tuple(ids),
                sampling or Sampling(),
                Stops(max_tokens, tuple(stops)),
                **options,
            )
        )

    async def all_free(self):
        """Wait until the engine reports every page free."""
        while True:
            report = self.supervisor.models["demo"]
            if report.pages and report.pages_free == report.pages and report.running == 0:
                return
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def served(demo_model):
    served = Served(demo_model)
    served.run(served.supervisor.start())
    try:
        assert served.run(served.supervisor.wait_for(State.SERVING, State.FAILED)) is State.SERVING
        yield served
    finally:
        served.run(served.supervisor.stop(0))
        served.loop.close()


async def collect(stream):
    return [event async for event in stream]


def token_ids(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def text(events):
    return "".join(event.text for event in events if not isinstance(event, Started))


def test_a_stream_is_exact_and_says_what_it_cost(served):
    events = served.run(collect(served.submit("The capital of France is", 12)))
    assert isinstance(events[0], Started)
    ids = token_ids(events)
    assert len(ids) == 12
    assert text(events) == served.tokenizer.decode(ids)
    assert "Paris" in text(events)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.prompt_tokens, finished.generated_tokens) == (
        "length",
        events[0].prompt_tokens,
        12,
    )
    assert finished.timings.prefill > 0
    assert finished.timings.decode > 0
    assert all(event.step_seconds > 0 for event in events if isinstance(event, Tokens))
    report = served.supervisor.models["demo"]
    assert (report.state, report.executor, report.pages_free) == ("ready", "torch", report.pages)


def test_a_stop_string_inside_the_answer_does_not_show(served):
    whole = text(served.run(collect(served.submit("Count: one, two, three,", 12))))
    stop = whole[5:9]
    events = served.run(collect(served.submit("Count: one, two, three,", 12, stops=[stop])))
    assert text(events) == whole[: whole.index(stop)]
    assert (events[-1].reason, events[-1].matched_stop) == ("stop_string", stop)


def test_requests_that_share_steps_get_what_each_gets_alone(served):
    asks = [
        ("Once upon a time", 10, Sampling()),
        (LONG[:300], 6, Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=7)),
        ("def fibonacci(n):", 8, Sampling(temperature=1.2, seed=2**64 - 1)),
    ]
    alone = [token_ids(served.run(collect(served.submit(p, n, sampling=s)))) for p, n, s in asks]

    async def together():
        return await asyncio.gather(*(collect(served.submit(p, n, sampling=s)) for p, n, s in asks))

    assert [token_ids(events) for events in served.run(together())] == alone
    assert [len(ids) for ids in alone] == [10, 6, 8]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_cancelled_request_stops_within_a_step_and_frees_its_pages(served, phase):
    async def body():
        before = served.supervisor.models["demo"].steps
        stream = served.submit(LONG if phase == "prefill" else "Hello", 100)
        assert isinstance(await anext(stream), Started)
        if phase == "decode":
            await anext(stream)
        stream.cancel("gone")
        with pytest.raises(CancelledError, match="gone"):
            await collect(stream)
        await served.all_free()
        # The step that ran when the cancel came, and at most the one that began before it arrived.
        return served.supervisor.models["demo"].steps - before

    steps = served.run(body())
    assert steps <= 5, "a prompt of 400 tokens takes 25 steps, and an answer 100"


def test_an_expired_deadline_ends_a_long_prefill(served):
    async def body():
        stream = served.submit(LONG, 100, deadline=time.monotonic() + 0.3)
        with pytest.raises(DeadlineError):
            await collect(stream)
        await served.all_free()

    served.run(body())


def test_an_engine_killed_in_mid_stream_comes_back_and_serves(served):
    async def body():
        supervisor = served.supervisor
        states = []
        unsubscribe = supervisor.subscribe(states.append)
        restarts = supervisor.restarts
        stream = served.submit("Once upon a time", 400)
        waiting = served.submit(LONG, 10)
        await anext(stream)
        await anext(stream)
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        for lost in (stream, waiting):
            with pytest.raises(UnavailableError) as info:
                await collect(lost)
            assert info.value.retry_seconds > 0
        await supervisor.wait_for(State.SERVING)
        unsubscribe()
        assert states == [State.RESTARTING, State.SERVING]
        assert supervisor.restarts == restarts + 1
        assert "Paris" in text(await collect(served.submit("The capital of France is", 4)))

    served.run(body())


def failure_of(folder, **model):
    """How the state turns FAILED for a folder that does not load."""

    async def main():
        supervisor = Supervisor(config_of(folder, **model))
        await supervisor.start()
        try:
            state = await asyncio.wait_for(supervisor.wait_for(State.FAILED, State.SERVING), 60)
            assert state is State.FAILED
            assert supervisor.restarts == 0
            return supervisor.failure
        finally:
            await supervisor.stop(0)

    return asyncio.run(main())


def test_a_damaged_model_folder_fails_once_and_by_name(demo_model, tmp_path):
    for file in demo_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    with (demo_model / "model.safetensors").open("rb") as whole:
        (tmp_path / "model.safetensors").write_bytes(whole.read(1_000_000))
    error = failure_of(tmp_path)
    assert error.code is CheckpointError.code
    assert "model.safetensors" in error.message


def test_a_folder_without_a_tokenizer_fails_once_and_by_name(demo_model, tmp_path):
    (tmp_path / "config.json").symlink_to(demo_model / "config.json")
    assert "tokenizer.json" in failure_of(tmp_path).message


def test_an_executor_that_is_not_there_is_named(demo_model):
    error = failure_of(demo_model, executor="tensorrt")
    assert error.code is Code.INVALID_ARGUMENT
    assert "executor tensorrt" in error.message


def test_an_engine_that_nobody_supervises_says_so():
    command = [sys.executable, "-m", "edged.worker.engine"]
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    assert alone.returncode == 2
    assert "--fd" in alone.stderr
    no_socket = subprocess.run(
        [*command, "--fd", "0", "--parent", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert no_socket.returncode == 2
    assert "descriptor 0 is no socket" in no_socket.stderr
