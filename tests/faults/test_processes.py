"""Processes that are killed or stopped, disks that are full, clocks that jump: nothing is lost without a word."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attacked import IDS, SAMPLED

import edged
from edged import errors
from edged.client import Client, Finished

KILLS = 100
SLOW = {"step_seconds": 0.002}


def ask(address, stop, *, patient):
    """Send requests until told to stop; return how each ended. Whatever is no clean end raises."""
    ends = {"finished": 0, "told": 0}
    with Client(address, wait_for_ready=patient) as client:
        while not stop:
            last = None
            try:
                for event in client.generate(IDS, max_tokens=20, timeout=60, **SAMPLED):
                    last = event
            # Where a daemon serves for a tenth of a second at a time, a waiting client may never meet it, and is told that.
            except (errors.UnavailableError, errors.DeadlineError):
                if not isinstance(
                    last, Finished
                ):  # the daemon may be killed between its last word and the call's end
                    ends["told"] += 1
                    time.sleep(0.02)
                    continue
            assert last.usage.generated_tokens == 20
            ends["finished"] += 1
    return ends


def kill_the_engine(start_daemon, kills, seed):
    numbers = random.Random(seed)
    daemon = start_daemon(fake=SLOW, environment={"FAKE_DAEMON_PATIENT": "1"})
    stop = []
    with ThreadPoolExecutor(3) as pool, daemon.client() as client:
        askers = [pool.submit(ask, daemon.address, stop, patient=False) for _ in range(3)]
        try:
            for number in range(kills):
                time.sleep(numbers.uniform(0, 0.15))
                pid = client.wait_ready(60).engine_pid
                assert pid
                os.kill(pid, signal.SIGKILL)
                end = time.monotonic() + 60
                while client.status().engine_restarts <= number:
                    assert time.monotonic() < end, daemon.log()[-2000:]
                    time.sleep(0.01)
            status = client.wait_ready(60)
        finally:
            stop.append(True)
        ends = [asker.result(60) for asker in askers]
        assert sum(end["finished"] for end in ends) > 0
        assert sum(end["told"] for end in ends) > 0
        assert status.engine_restarts == kills
        end = time.monotonic() + 60
        while (model := client.status().models[0]).running or model.pages_free != model.pages:
            assert time.monotonic() < end, model
            time.sleep(0.05)
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()


def test_kill_9_of_the_engine_at_random_moments(start_daemon):
    kill_the_engine(start_daemon, 10, seed=1)


@pytest.mark.soak
def test_kill_9_of_the_engine_a_hundred_times(start_daemon):
    kill_the_engine(start_daemon, KILLS, seed=2)


def kill_the_daemon(start_daemon, kills, seed):
    """Whoever runs the daemon starts it again, as systemd would; the waiting clients bridge the gap."""
    numbers = random.Random(seed)
    daemon = start_daemon(fake=SLOW, forked=False)
    address, engines, stop = daemon.address, [], []
    with ThreadPoolExecutor(2) as pool:
        askers = [pool.submit(ask, address, stop, patient=True) for _ in range(2)]
        try:
            for _ in range(kills):
                with Client(address) as client:
                    engines.append(client.wait_ready(60).engine_pid)
                time.sleep(numbers.uniform(0, 0.2))
                daemon.process.kill()
                daemon.wait()
                daemon = start_daemon(
                    fake=SLOW, wait=False, forked=False, listen={"unix": address.removeprefix("unix:")}
                )
            with Client(address) as client:
                assert client.wait_ready(60).daemon_pid == daemon.process.pid
        finally:
            stop.append(True)
        ends = [asker.result(90) for asker in askers]
    assert sum(end["finished"] for end in ends) > 0
    assert daemon.stop() == 0
    end = time.monotonic() + 60  # an engine that was starting looks for its daemon when it has started
    for pid in engines:
        while os.path.exists(f"/proc/{pid}"):  # noqa: PTH110
            assert time.monotonic() < end, "an engine outlives its daemon"
            time.sleep(0.05)


def test_kill_9_of_the_daemon_at_random_moments(start_daemon):
    kill_the_daemon(start_daemon, 3, seed=3)


@pytest.mark.soak
def test_kill_9_of_the_daemon_a_hundred_times(start_daemon):
    kill_the_daemon(start_daemon, KILLS, seed=4)


def stop_the_engine(start_daemon, seconds):
    """SIGSTOP for less than the stall timeout: it goes on where it was, and nobody has lost anything."""
    daemon = start_daemon(fake={"step_seconds": 0.005}, watchdog={"stall_timeout": "60s"})
    with daemon.client() as client, ThreadPoolExecutor(3) as pool:
        engine = client.status().engine_pid
        answers = [
            pool.submit(lambda: client.generate(IDS, max_tokens=300, **SAMPLED).answer()) for _ in range(3)
        ]
        time.sleep(0.5)
        os.kill(engine, signal.SIGSTOP)
        time.sleep(seconds)
        assert client.status().state, "the daemon answers meanwhile"
        os.kill(engine, signal.SIGCONT)
        for answer in answers:
            assert answer.result(60).finished.usage.generated_tokens == 300
        assert client.status().engine_pid == engine
        assert client.status().engine_restarts == 0
    assert daemon.stop() == 0


def test_an_engine_that_is_stopped_for_a_while_goes_on(start_daemon):
    stop_the_engine(start_daemon, 3)


@pytest.mark.soak
def test_an_engine_that_is_stopped_for_thirty_seconds_goes_on(start_daemon):
    stop_the_engine(start_daemon, 30)


def test_an_engine_that_stays_stopped_is_replaced(start_daemon):
    daemon = start_daemon(fake=SLOW, watchdog={"step_timeout": "1s"})
    with daemon.client() as client:
        engine = client.status().engine_pid
        stream = iter(client.generate(IDS, max_tokens=900, **SAMPLED))
        next(stream)
        os.kill(engine, signal.SIGSTOP)
        with pytest.raises(errors.UnavailableError, match="the engine hung") as caught:
            list(stream)
        assert caught.value.retry_seconds is not None
        status = client.wait_ready(60)
        assert status.engine_pid != engine
        assert "no step was finished" in status.last_error
        assert client.generate(IDS, max_tokens=3, **SAMPLED).answer().finished
    assert daemon.stop() == 0


def test_a_full_disk_stops_nothing(start_daemon):
    """No file can grow and standard error takes nothing more: lines are lost, requests are not."""
    daemon = start_daemon(fake={}, wait=False, full_disk=True)
    with daemon.client() as client:
        client.wait_ready(60)
        assert client.generate(IDS, max_tokens=3, **SAMPLED).answer().finished
        os.kill(client.status().engine_pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while client.status().engine_restarts == 0:
            assert time.monotonic() < end
            time.sleep(0.02)
        client.wait_ready(60)
        assert client.generate(IDS, max_tokens=3, **SAMPLED).answer().finished
    assert daemon.stop() == 0
    assert daemon.log() == ""


@pytest.fixture
def time_of_day(tmp_path):
    """Environment of a process whose time of day is off, and what sets by how many seconds."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, file = tmp_path / "clock_jump.so", tmp_path / "offset"
    source = Path(__file__).with_name("clock_jump.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    file.write_bytes(bytes(8))

    def jump(seconds):
        with file.open("r+b") as place:
            place.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    return {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(file)}, jump


def test_a_clock_that_jumps_changes_no_stream_and_no_deadline(start_daemon, time_of_day):
    """A year ahead, two years back: what was promised in seconds is kept in seconds."""
    environment, jump = time_of_day
    daemon = start_daemon(fake={"step_seconds": 0.002}, environment=environment)
    year = 365 * 86400
    jumps = {20: year, 60: -year, 100: 0}
    with daemon.client() as client:
        events = []
        for event in client.generate(IDS, max_tokens=150, timeout=60, **SAMPLED):
            events.append(event)
            if len(events) in jumps:
                jump(jumps[len(events)])
        assert events[-1].usage.generated_tokens == 150
        assert len(events) > max(jumps)
        # A deadline that passes while the clock stands before its beginning, and one that does not pass.
        engine = client.status().engine_pid
        stream = iter(client.generate(IDS, max_tokens=20, timeout=1, **SAMPLED))
        next(stream)
        os.kill(engine, signal.SIGSTOP)
        jump(-year)
        with pytest.raises(errors.DeadlineError):
            list(stream)
        os.kill(engine, signal.SIGCONT)
        answer = client.generate(IDS, max_tokens=10, timeout=20, **SAMPLED).answer()
        assert answer.finished.usage.generated_tokens == 10
        status = client.status()
        assert (status.engine_pid, status.engine_restarts, status.models[0].running) == (engine, 0, 0)
    assert daemon.stop() == 0
    years = {line["timestamp"][:4] for line in daemon.log_lines() if "timestamp" in line}
    assert len(years) > 1, "the daemon saw the clock jump"


def test_the_time_of_day_is_for_logs_and_certificates_alone():
    """Everything that waits counts with the monotonic clock."""
    allowed = {
        "edged/systemd.py",  # the age of a record on disk, also after a reboot
        "edged/server/certificates.py",  # when a certificate ends
    }
    root = Path(edged.__file__).parent.parent
    rooms = ["edged/worker", "edged/scheduler", "edged/server", "edged/client", "edged/metrics"]
    files = [*root.glob("edged/*.py"), *(path for room in rooms for path in (root / room).rglob("*.py"))]
    found = {str(path.relative_to(root)) for path in files if "time.time()" in path.read_text()}
    assert found == allowed
