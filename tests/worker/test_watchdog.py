"""What counts as a sign of life, and what an engine that gives none gets."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest
from supervised import make_config, make_submit, run_supervised, until

from edged.config import WatchdogConfig
from edged.errors import UnavailableError
from edged.worker.killed import describe_kill
from edged.worker.messages import Heartbeat, Loading, ModelReport, Report, Tokens
from edged.worker.process import EngineProcess
from edged.worker.state import State
from edged.worker.watchdog import CHECK_SECONDS, IDLE_SECONDS, Watchdog

CONFIG = WatchdogConfig(load_timeout=20.0)


def report(steps):
    model = ModelReport("m", "ready", "fake", "cpu", "float32", 64, 1, 1, 1, 0, 0, steps=steps)
    return Report((model,), 1.0)


def looks_until_hung(watchdog, *, busy, message=None):
    """Seconds of looks until the watchdog calls it hung, `message` coming before each."""
    for count in range(1, 10_000):
        if message is not None:
            watchdog.note(message, busy=busy)
        if watchdog.look(CHECK_SECONDS, busy=busy):
            return count * CHECK_SECONDS
    return None


def serving(step_timeout=30.0):
    watchdog = Watchdog(CONFIG, step_timeout)
    watchdog.serve()
    return watchdog


def test_a_busy_engine_has_the_step_timeout_and_an_idle_one_twenty():
    assert looks_until_hung(serving(), busy=True) == 30 + CHECK_SECONDS
    assert looks_until_hung(serving(), busy=False) == IDLE_SECONDS + CHECK_SECONDS
    assert looks_until_hung(serving(3.0), busy=False) == 3 + CHECK_SECONDS


def test_tokens_and_steps_are_signs_of_life_and_a_report_without_a_step_is_none():
    assert looks_until_hung(serving(), busy=True, message=Tokens("r", (1,), "a")) is None
    assert looks_until_hung(serving(), busy=True, message=report(7)) == 30 + CHECK_SECONDS
    assert looks_until_hung(serving(), busy=True, message=Heartbeat()) == 30 + CHECK_SECONDS
    assert looks_until_hung(serving(), busy=False, message=Heartbeat()) is None
    assert looks_until_hung(serving(), busy=False, message=report(7)) is None


def test_loading_has_its_own_time_and_only_progress_counts():
    same = Loading("m", "weights", 3, 10)
    watchdog = Watchdog(CONFIG, 1.0)
    assert looks_until_hung(watchdog, busy=False, message=same) == 20 + CHECK_SECONDS
    assert "m: weights" in watchdog.look(CHECK_SECONDS, busy=False)
    watchdog = Watchdog(CONFIG, 1.0)
    for done in range(200):
        assert watchdog.note(Loading("m", "weights", done, 200), busy=False)
        assert not watchdog.look(CHECK_SECONDS, busy=False)


def test_a_machine_that_slept_is_no_reason_to_end_the_engine():
    watchdog = serving(5.0)
    assert watchdog.look(3600.0, busy=True) == ""


@pytest.mark.one_python
@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_engine_is_ended_and_comes_back(busy, capfd):
    config = replace(make_config(), watchdog=WatchdogConfig(step_timeout=1.0))

    async def body(supervisor):
        signs = []
        supervisor.when_alive(lambda: signs.append(time.monotonic()))
        stopped = supervisor.engine_pid
        stream = supervisor.submit(make_submit("a", (1,), 900)) if busy else None
        if stream is not None:
            await anext(stream)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        if stream is not None:
            with pytest.raises(UnavailableError, match="the engine hung") as caught:
                [event async for event in stream]
            assert caught.value.retry_seconds > 0
        await supervisor.wait_for(State.RESTARTING)
        await supervisor.wait_for(State.SERVING)
        assert time.monotonic() - began < 15
        assert supervisor.engine_pid not in {0, stopped}
        why = "no step was finished" if busy else "gave no sign of life"
        assert why in supervisor.last_error
        assert "watchdog ended it (signal SIGKILL)" in supervisor.last_error
        events = [event async for event in supervisor.submit(make_submit("b"))]
        assert len(events) == 6
        assert signs

    run_supervised(body, config, step_seconds=0.01)


def test_a_step_that_never_returns_says_where_it_hangs(capfd):
    config = replace(make_config(), watchdog=WatchdogConfig(step_timeout=1.0))

    async def body(supervisor):
        stream = supervisor.submit(make_submit("a", (1,), 900))
        with pytest.raises(UnavailableError, match="the engine hung"):
            [event async for event in stream]
        await supervisor.wait_for(State.SERVING)
        assert "watchdog ended it (signal SIGABRT)" in supervisor.last_error

    run_supervised(body, config, hang_at=10)
    assert "in step" in capfd.readouterr().err


@pytest.mark.one_python
def test_an_idle_engine_is_left_alone():
    config = replace(make_config(), watchdog=WatchdogConfig(step_timeout=1.5))

    async def body(supervisor):
        await asyncio.sleep(4)
        assert (supervisor.restarts, supervisor.state) == (0, State.SERVING)

    run_supervised(body, config)


def test_loading_that_hangs_is_ended():
    config = replace(make_config(), watchdog=WatchdogConfig(load_timeout=1.0))

    async def body(supervisor):
        await supervisor.wait_for(State.RESTARTING)
        await until(lambda: supervisor.last_error)
        assert "loading made no progress for" in supervisor.last_error

    run_supervised(body, config, wait=False, load_seconds=60)


@pytest.mark.one_python
def test_an_engine_that_the_kernel_holds_is_the_end(monkeypatch):
    monkeypatch.setattr("edged.worker.process._ABORT_SECONDS", 0.1)
    monkeypatch.setattr("edged.worker.process._EXIT_SECONDS", 0.2)
    config = replace(make_config(), watchdog=WatchdogConfig(step_timeout=1.0))

    async def body(supervisor):
        pid = supervisor.engine_pid
        os.kill(pid, signal.SIGSTOP)
        kill = EngineProcess.kill
        monkeypatch.setattr(EngineProcess, "kill", lambda _: None)  # what a process in the driver makes of it
        await supervisor.wait_for(State.FAILED)
        assert "does not end after SIGKILL" in supervisor.last_error
        assert isinstance(supervisor.failure, UnavailableError)
        monkeypatch.setattr(EngineProcess, "kill", kill)
        os.kill(pid, signal.SIGKILL)

    run_supervised(body, config)


def test_a_kill_while_loading_names_the_row_of_the_ledger():
    async def body(supervisor):
        await until(lambda: supervisor.loading)
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        await supervisor.wait_for(State.RESTARTING)
        await until(lambda: supervisor.last_error)
        assert "signal SIGKILL while it loaded: model first, " in supervisor.last_error
        assert "ledger row" in supervisor.last_error

    run_supervised(body, make_config(), wait=False, slow_load=0.2)
    text = describe_kill({"m": Loading("m", "allocating KV pages", 3, 9)})
    assert "model m, allocating KV pages (3 of 9)" in text
    assert "the ledger row 'KV pages'" in text


@pytest.mark.parametrize(
    ("what", "needed"),
    [
        ("tokenizer", "the ledger row 'engine process' and"),
        ("executor", "the ledger row 'engine process' and"),
        ("reading weights", "the ledger row 'weights' and"),
        ("allocating", "the ledger's rows need together"),
        ("first token", "the ledger's rows need together"),
        ("capturing graphs", "the ledger's rows need together"),
    ],
)
def test_a_stage_of_loading_that_is_no_row_is_not_called_one(what, needed):
    assert f"this machine has less than {needed}" in describe_kill({"m": Loading("m", what, 0, 1)})
