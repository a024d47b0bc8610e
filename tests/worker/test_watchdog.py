"""What counts as a sign of life, and what an engine that gives none gets."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from supervised import make_config, make_submit, run_supervised, until

from edged.config import WatchdogConfig
from edged.errors import UnavailableError
from edged.worker.killed import describe_kill
from edged.worker.life_signs import LifeSigns
from edged.worker.messages import Heartbeat, Loading, ModelReport, Report, Tokens
from edged.worker.process import EngineProcess
from edged.worker.state import State
from edged.worker.stillness import Stillness
from edged.worker.watchdog import CHECK_SECONDS, IDLE_SECONDS, Watchdog

CONFIG = WatchdogConfig(load_timeout=20.0)


def report(steps):
    model = ModelReport("m", "ready", "fake", "cpu", "float32", 64, 1, 1, 1, 0, 0, steps=steps)
    return Report((model,), 1.0)


def looks_until_hung(watchdog, *, busy, message=None, stillness=lambda: None):
    """Seconds of looks until the watchdog calls it hung, `message` coming before each."""
    for count in range(1, 10_000):
        if message is not None:
            watchdog.note(message, busy=busy)
        if watchdog.look(CHECK_SECONDS, busy=busy, stillness=stillness):
            return count * CHECK_SECONDS
    return None


def serving(step_timeout=30.0, **options):
    watchdog = Watchdog(CONFIG, step_timeout, **options)
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


def test_an_engine_that_evidently_stands_still_has_the_stall_timeout_whatever_a_step_may_take():
    for how in (Stillness.STOPPED, Stillness.ASLEEP):
        for busy in (True, False):
            watchdog = serving(300.0)
            assert looks_until_hung(watchdog, busy=busy, stillness=lambda how=how: how) == 10 + CHECK_SECONDS
            why = watchdog.look(CHECK_SECONDS, busy=busy, stillness=lambda how=how: how)
            assert how.value in why
            assert "watchdog.stall_timeout" in why
    assert looks_until_hung(serving(3.0), busy=True, stillness=lambda: Stillness.STOPPED) == 3 + CHECK_SECONDS


def test_an_engine_that_sleeps_while_a_gpu_works_or_a_model_loads_is_left_alone():
    gpu = serving(30.0, works_asleep=True)
    assert looks_until_hung(gpu, busy=True, stillness=lambda: Stillness.ASLEEP) == 30 + CHECK_SECONDS
    gpu = serving(30.0, works_asleep=True)
    assert looks_until_hung(gpu, busy=False, stillness=lambda: Stillness.ASLEEP) == 10 + CHECK_SECONDS
    loading = Watchdog(CONFIG, 300.0)
    assert looks_until_hung(loading, busy=False, stillness=lambda: Stillness.ASLEEP) == 20 + CHECK_SECONDS
    loading = Watchdog(CONFIG, 300.0)
    assert looks_until_hung(loading, busy=False, stillness=lambda: Stillness.STOPPED) == 10 + CHECK_SECONDS


def test_half_of_the_stall_must_be_seen_without_any_work_between():
    watchdog, looks = serving(300.0), iter(range(10_000))
    seen = looks_until_hung(
        watchdog, busy=True, stillness=lambda: None if next(looks) == 9 else Stillness.ASLEEP
    )
    assert seen == 15, "something ran after 10 s"


@pytest.mark.parametrize("in_loop", [True, False])
def test_an_engine_that_loads_another_model_has_the_time_of_loading(in_loop):
    watchdog = Watchdog(WatchdogConfig(load_timeout=100.0), 30.0)
    watchdog.serve()
    watchdog.begin_change(in_loop=in_loop)
    patience = 100 if in_loop else 30
    assert watchdog.patience == patience
    assert looks_until_hung(watchdog, busy=False) == patience + CHECK_SECONDS
    watchdog.end_change(in_loop=in_loop)
    assert looks_until_hung(watchdog, busy=False) == IDLE_SECONDS + CHECK_SECONDS
    watchdog = Watchdog(WatchdogConfig(load_timeout=100.0), 30.0)
    watchdog.serve()
    watchdog.begin_change(in_loop=in_loop)
    assert looks_until_hung(watchdog, busy=False, message=Heartbeat()) == 100 + CHECK_SECONDS, (
        "the loop beats on"
    )
    assert "loading made no progress" in watchdog.look(CHECK_SECONDS, busy=False)


@pytest.mark.parametrize(("busy", "message"), [(False, Heartbeat()), (True, report(3))])
def test_a_sign_of_life_is_expected_soon_unless_there_was_none_for_a_while(busy, message):
    watchdog = Watchdog(WatchdogConfig(load_timeout=100.0), 30.0)
    assert watchdog.patience == 100
    watchdog.serve()
    assert watchdog.patience == 5
    for _ in range(11):
        watchdog.look(CHECK_SECONDS, busy=busy, stillness=lambda: Stillness.ASLEEP)
    assert watchdog.patience == 30, "whoever waits for this one must not be faster than who looks at it"
    assert not watchdog.works
    watchdog.note(message, busy=busy)
    assert watchdog.patience == 5


def test_a_long_step_that_is_seen_at_work_is_alive_for_as_long_as_it_may_last():
    watchdog, seen = serving(60.0), []
    while not watchdog.look(CHECK_SECONDS, busy=True, stillness=lambda: Stillness.NONE):
        seen.append((watchdog.works, watchdog.patience))
    assert len(seen) == 60 / CHECK_SECONDS
    assert seen[:10] == [(False, 5)] * 10, "nobody looks closer so soon"
    assert set(seen[10:]) == {(True, 5)}
    assert not watchdog.works, "a step that spins for ever is none"
    watchdog = serving(60.0)
    for how in (Stillness.NONE, None):
        for _ in range(20):
            watchdog.look(CHECK_SECONDS, busy=True, stillness=lambda how=how: how)
        assert (watchdog.works, watchdog.patience) == ((True, 5) if how else (False, 60))
    loading = Watchdog(CONFIG, 60.0)
    loading.look(CHECK_SECONDS, busy=False, stillness=lambda: Stillness.NONE)
    for _ in range(20):
        loading.look(CHECK_SECONDS, busy=False, stillness=lambda: Stillness.NONE)
    assert not loading.works, "only progress counts there"


def test_patience_grows_at_once_and_shrinks_when_somebody_looks():
    life, told = LifeSigns(), []
    life.when_patience_changes(lambda: told.append(life.patience))
    for patience, looked in ((5.0, True), (30.0, False), (5.0, False), (5.0, True), (5.0, True)):
        life.tell(SimpleNamespace(patience=patience, works=False), looked=looked)
    assert told == [5, 30, 5]


def test_an_engine_that_is_seen_at_work_gives_a_sign_of_life_with_each_look():
    life, signs = LifeSigns(), []
    life.when_alive(lambda: signs.append("alive"))
    for works, looked in ((False, True), (True, False), (True, True)):
        before = len(signs)
        life.tell(SimpleNamespace(patience=5.0, works=works), looked=looked)
        assert len(signs) - before == (works and looked)
    life.tell(SimpleNamespace(patience=5.0, works=False), alive=True)
    assert len(signs) == 2


def test_a_machine_that_slept_is_no_reason_to_end_the_engine():
    watchdog = serving(5.0)
    assert watchdog.look(3600.0, busy=True) == ""


@pytest.mark.one_python
@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_engine_is_ended_and_comes_back(busy, capfd):
    config = replace(make_config(), watchdog=WatchdogConfig(step_timeout=1.0))

    async def body(supervisor):
        signs = []
        supervisor.life.when_alive(lambda: signs.append(time.monotonic()))
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


@pytest.mark.one_python
@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_engine_is_not_given_the_time_of_a_long_step(busy):
    config = replace(make_config(), watchdog=WatchdogConfig(stall_timeout=1.0))
    assert config.step_timeout == 300

    async def body(supervisor):
        stopped = supervisor.engine_pid
        stream = supervisor.submit(make_submit("a", (1,), 900)) if busy else None
        if stream is not None:
            await anext(stream)
        os.kill(stopped, signal.SIGSTOP)
        await supervisor.wait_for(State.RESTARTING)
        await supervisor.wait_for(State.SERVING)
        assert supervisor.engine_pid not in {0, stopped}
        assert "its process is stopped (SIGSTOP) (watchdog.stall_timeout)" in supervisor.last_error
        if stream is not None:
            with pytest.raises(UnavailableError, match="the engine hung"):
                [event async for event in stream]

    run_supervised(body, config, step_seconds=0.01)


def test_a_step_that_waits_for_ever_says_where_it_hangs_long_before_its_time(capfd):
    config = replace(make_config(), watchdog=WatchdogConfig(stall_timeout=1.0))

    async def body(supervisor):
        stream = supervisor.submit(make_submit("a", (1,), 900))
        with pytest.raises(UnavailableError, match="the engine hung"):
            [event async for event in stream]
        await supervisor.wait_for(State.SERVING)
        assert "all threads of its process sleep (watchdog.stall_timeout)" in supervisor.last_error
        assert "watchdog ended it (signal SIGABRT)" in supervisor.last_error

    run_supervised(body, config, hang_at=10)
    assert "in step" in capfd.readouterr().err


@pytest.mark.one_python
def test_a_long_step_that_works_is_left_alone():
    config = replace(make_config(), watchdog=WatchdogConfig(stall_timeout=1.0))

    async def body(supervisor):
        signs, patience, count, last = [], [], 0, None
        supervisor.life.when_alive(lambda: signs.append(count))
        supervisor.life.when_patience_changes(lambda: patience.append(supervisor.life.patience))
        async for event in supervisor.submit(make_submit("a", (1,), 20)):
            count, last = count + 1, event
        assert last.generated_tokens == 20
        assert (supervisor.restarts, supervisor.state) == (0, State.SERVING)
        assert signs.count(max(signs, key=signs.count)) > 5, "what is seen at work is told of"
        assert config.step_timeout not in patience, "a daemon that freezes now has no more time than another"

    run_supervised(body, config, long_at=10, long_seconds=5)


@pytest.mark.one_python
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_load_beside_serving_models_is_no_silence(device):
    """In a thread on the CPU, in the loop on a GPU: pieces that take longer than an idle engine may be silent."""
    config = replace(make_config(device=device), watchdog=WatchdogConfig(step_timeout=4.0))

    async def body(supervisor):
        patience = []
        supervisor.life.when_patience_changes(lambda: patience.append(supervisor.life.patience))
        await supervisor.control.unload("second", cancel=False)
        await supervisor.control.load("second")
        assert (supervisor.restarts, supervisor.state) == (0, State.SERVING)
        assert config.watchdog.load_timeout in patience
        events = [event async for event in supervisor.submit(make_submit("a", model="second"))]
        assert len(events) == 6

    run_supervised(body, config, slow_again=6.0)


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
