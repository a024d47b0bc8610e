"""What the kernel shows of a process: whether it works, sleeps or is stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from edged.worker.stillness import Stillness, StillnessWatch


@pytest.fixture
def process():
    started = []

    def start(code):
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        started[-1].stdout.read(1)
        return started[-1].pid

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def seen(watch, wanted, looks=300):
    """Look until it is `wanted`, the way a busy machine may show it later."""
    for _ in range(looks):
        if watch.look() is wanted:
            return True
        time.sleep(0.02)
    return False


def test_a_process_that_sleeps_or_is_stopped_stands_still(process):
    pid = process("import threading; print(1, flush=True); threading.Event().wait()")
    watch = StillnessWatch(pid)
    assert watch.look() in (None, Stillness.NONE), "there is nothing to compare with"
    assert seen(watch, Stillness.ASLEEP)
    os.kill(pid, signal.SIGSTOP)
    assert seen(watch, Stillness.STOPPED)
    watch.forget()
    assert watch.look() is None


def test_a_process_that_works_never_stands_still(process):
    spins = "import threading; print(1, flush=True)\nwhile True: pass"
    beside = "import threading, time\ndef spin():\n  while True: pass\nthreading.Thread(target=spin).start(); print(1, flush=True); time.sleep(1e6)"
    for code in (spins, beside):
        watch = StillnessWatch(process(code))
        found = set()
        for _ in range(20):
            found.add(watch.look())
            time.sleep(0.02)
        assert found <= {None, Stillness.NONE}
        assert seen(watch, Stillness.NONE)


@pytest.mark.parametrize(
    ("states", "used", "how"),
    [
        ("SS", 0, Stillness.ASLEEP),
        ("SI", 1, Stillness.ASLEEP),
        ("TT", 0, Stillness.STOPPED),
        ("TS", 0, Stillness.ASLEEP),
        ("SD", 0, Stillness.NONE),
        ("SR", 0, Stillness.NONE),
        ("SS", 50, Stillness.NONE),
        ("tt", 0, None),
        ("tR", 0, None),
        ("", 0, None),
    ],
)
def test_what_the_kernel_shows_of_a_process(tmp_path, states, used, how):
    """A thread that waits for a disk, one that is ready to run, a debugger, and work that was done between two looks."""

    def show(states, ticks):
        folder = tmp_path / "7"
        shutil.rmtree(folder, ignore_errors=True)
        rest = " ".join(["0"] * 10 + [str(ticks), "0"])
        for number, state in enumerate(states):
            (folder / "task" / str(7 + number)).mkdir(parents=True)
            (folder / "task" / str(7 + number) / "stat").write_text(f"7 (a) b (c) {state} {rest}\n")
        if states:
            (folder / "stat").write_text(f"7 (a) b (c) {states[0]} {rest}\n")

    watch = StillnessWatch(7, tmp_path)
    show("SS", 100)
    assert watch.look() is None
    show(states, 100 + used)
    assert watch.look() is how
    assert StillnessWatch(8, tmp_path).look() is None
