"""Several models in one daemon, inside one budget: loaded, unloaded and evicted while others answer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edged import errors
from edged.v1 import control_pb2

ON = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4}


def models(folder, **changes):
    """A reserved model and two evictable ones, of which one fits beside it."""
    common = {
        "path": str(folder),
        "context_length": 256,
        "max_sequences": 1,
        "prefill_chunk": 64,
        "threads": 1,
    }
    names = {"keeps": "reserved", "first": "evictable", "second": "evictable"}
    return {
        "models": [{"name": name, "residency": kind, **common} for name, kind in names.items()],
        "memory": {"budget": "1.9GiB"},
        **changes,
    }


def states(client):
    return {model.name: model.state for model in client.models()}


def memory_of(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@pytest.fixture(scope="module")
def fake(demo_model):
    import json

    from fixtures.daemon import FAKE_MODEL_DAEMON, DaemonProcess

    process = DaemonProcess(
        {**models(demo_model), "log": {"level": "debug", "format": "json"}},
        {"FAKE_ENGINE": json.dumps({"step_seconds": 0.01, "slow_load": 0.2})},
        (str(FAKE_MODEL_DAEMON),),
        forked=True,
    )
    try:
        yield process.wait_ready()
        assert process.stop() == 0
    finally:
        process.close()


@pytest.fixture
def client(fake):
    with fake.client() as client:
        yield client
        if states(client)["first"] == control_pb2.STATE_UNLOADED:
            client.load_model("first")  # and the second one goes


def test_at_start_what_fits_is_there_and_the_ledger_does_not_change(client):
    assert states(client) == {
        "keeps": control_pb2.STATE_SERVING,
        "first": control_pb2.STATE_SERVING,
        "second": control_pb2.STATE_UNLOADED,
    }
    listed = {model.name: model for model in client.models()}
    assert [listed[name].evictable for name in listed] == [False, True, True]
    assert listed["keeps"].default
    ledger = client.status().ledger
    room = next(row.bytes for row in ledger.rows if row.name == "evictable models")
    assert listed["first"].bytes <= room < 2 * listed["first"].bytes
    assert ledger.total_bytes <= ledger.budget_bytes
    result = client.load_model("second")
    assert list(result.unloaded) == ["first"]
    assert result.seconds > 0.2
    assert client.status().ledger == ledger
    assert states(client)["first"] == control_pb2.STATE_UNLOADED
    assert client.generate([5, 6], model="second", **ON).answer().started.model == "second"
    with pytest.raises(errors.FailedPreconditionError, match="model first is not loaded; edgectl load first"):
        client.generate([5, 6], model="first", **ON).answer()


def test_streams_go_on_while_a_model_loads(client):
    gaps, last = [], [time.monotonic()]
    stop = threading.Event()

    def stream():
        for _ in client.generate([5, 6], model="keeps", **{**ON, "max_tokens": 200}):
            gaps.append(time.monotonic() - last[0])
            last[0] = time.monotonic()
        stop.set()

    thread = threading.Thread(target=stream)
    thread.start()
    client.load_model("second")
    assert not stop.is_set(), "it was loaded while the stream ran"
    thread.join()
    assert len(gaps) > 200


def test_a_model_that_answers_is_not_evicted_and_unloading_waits_for_it(client):
    running = iter(client.generate([5, 6], model="first", **{**ON, "max_tokens": 200}))
    next(running)
    with pytest.raises(errors.ResourceExhaustedError, match="first answers requests and stays"):
        client.load_model("second")
    late = r"0.1 s: model first had requests still and serves on.*--cancel"
    with pytest.raises(errors.DeadlineError, match=late):
        client.unload_model("first", timeout=0.1)
    end = time.monotonic() + 60
    while states(client)["first"] != control_pb2.STATE_SERVING:  # it serves on
        assert time.monotonic() < end
    client.unload_model("first")
    assert [event.usage.generated_tokens for event in running if hasattr(event, "usage")] == [200]
    assert states(client)["first"] == control_pb2.STATE_UNLOADED
    client.load_model("first")


def test_a_load_whose_caller_left_is_brought_to_its_end(client):
    with pytest.raises(
        errors.DeadlineError, match=r"0.1 s: model second does not serve yet; a load that has"
    ):
        client.load_model("second", timeout=0.1)
    end = time.monotonic() + 60
    while states(client)["second"] != control_pb2.STATE_SERVING:
        assert time.monotonic() < end, "one of the two is served whatever the caller does"
        time.sleep(0.02)
    assert states(client)["first"] == control_pb2.STATE_UNLOADED
    assert client.generate([5, 6], model="second", **ON).answer().finished.usage.generated_tokens == 4
    assert list(client.load_model("first").unloaded) == ["second"], "and its memory is counted"


def test_requests_can_be_cut_off(client):
    running = iter(client.generate([5, 6], model="first", **{**ON, "max_tokens": 200}))
    next(running)
    client.unload_model("first", cancel_requests=True)
    with pytest.raises(errors.FailedPreconditionError, match=r"unloaded before.*edgectl load first"):
        list(running)
    client.load_model("first")
    assert client.generate([5], model="first", **ON).answer().token_ids


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda client: client.load_model("keeps"), errors.FailedPreconditionError, "loaded already"),
        (lambda client: client.unload_model("second"), errors.FailedPreconditionError, "is not loaded"),
        (lambda client: client.load_model("nobody"), errors.NotFoundError, "there are keeps, first, second"),
        (lambda client: client.load_model(""), errors.InvalidArgumentError, "name is empty"),
    ],
)
def test_what_cannot_be_done_is_said(client, call, kind, said):
    with pytest.raises(kind, match=said):
        call(client)


def test_the_engine_that_comes_after_a_crash_has_the_same_models(fake, client):
    import os
    import signal

    client.load_model("second")
    os.kill(client.status().engine_pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while client.wait_ready(30).engine_restarts == 0:
        assert time.monotonic() < end
    assert states(client) == {
        "keeps": control_pb2.STATE_SERVING,
        "first": control_pb2.STATE_UNLOADED,
        "second": control_pb2.STATE_SERVING,
    }


def test_edgectl_loads_and_unloads(fake, client):
    def edgectl(*arguments):
        command = [sys.executable, "-m", "edged.cli", *arguments, "--address", fake.address]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    unloaded = edgectl("unload", "first")
    assert (unloaded.returncode, unloaded.stdout) == (0, "first is unloaded\n"), unloaded.stderr
    loaded = edgectl("load", "first")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.startswith("first serves after ")
    assert "not loaded" in edgectl("generate", "x", "-m", "second").stderr


@pytest.mark.soak
def test_memory_is_what_the_ledger_says_whatever_comes_and_goes(start_daemon, demo_model):
    """The real engine: each model's bytes come and go with it, and a load that fails leaves nothing."""
    daemon = start_daemon(**models(demo_model))
    with daemon.client() as client:
        expected = client.generate("The sea is", model="keeps", **ON).answer().token_ids
        sizes = {model.name: model.bytes for model in client.models()}
        pid = client.status().engine_pid
        client.generate("The sea is", model="first", **ON).answer()
        both = memory_of(pid)
        for _ in range(3):
            client.unload_model("first")
            one = memory_of(pid)
            assert both - one == pytest.approx(sizes["first"], rel=0.1)
            client.load_model("second")
            assert client.generate("The sea is", model="second", **ON).answer().token_ids == expected
            assert memory_of(pid) == pytest.approx(both, rel=0.03)
            client.load_model("first")
            assert client.generate("The sea is", model="first", **ON).answer().token_ids == expected
            assert memory_of(pid) == pytest.approx(both, rel=0.03)
        assert client.status().engine_restarts == 0
    assert daemon.stop() == 0
