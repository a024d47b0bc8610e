"""Quantizes in forked processes that are killed, and reports what each left.

    python killed_runs.py SRC DEST TEXT METHOD SEED SHARE KILLS

A run has points: moments before it opens, makes, renames or removes something beside its destination. A share of them is drawn,
and at each a run kills itself, after which the next one comes to its end. Then runs are killed at random times, and each goes on
with what the last one left.
Torch is loaded once; a run is a process of its own all the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from edged.errors import EdgedError
from edged.quantize.calibration import read_documents
from edged.quantize.recipe import Recipe
from edged.quantize.run import prepare_calibration, quantize
from edged.quantize.state import state_folder
from edged.quantize.ternary_pack import pack_ternary

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
REFUSED = 3


class Runs:
    def __init__(self, source: Path, destination: Path, text: Path, method: str) -> None:
        if method == "ternary-pack":
            self._quantize = partial(pack_ternary, source, destination)
        else:
            used = prepare_calibration(source, read_documents(text), count=4, length=48)
            self._quantize = partial(quantize, source, destination, Recipe(method, group=32), used)
        self._folder = destination.parent
        self._destination = destination

    def start(self, point: int = 0, report: int = -1) -> int:
        """A process that quantizes; it kills itself at a point, and writes how many it met to a descriptor."""
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            met = 0

            def watch(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal met
                if event in EVENTS and str(self._folder) in str(arguments[0]):
                    met += 1
                    if met == point:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(watch)
            self._quantize()
            if report >= 0:
                os.write(report, str(met).encode())
            status = 0
        except EdgedError as error:
            sys.stderr.write(f"{error}\n")
            status = REFUSED
        finally:
            os._exit(status)

    def end(self, child: int) -> int:
        """Exit status, or less than zero where a signal ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def points(self) -> int:
        read, write = os.pipe()
        assert self.end(self.start(report=write)) == 0
        return int(os.read(read, 20))

    def digest(self) -> str:
        """Of every file of the destination; empty where there is none."""
        if not self._destination.exists():
            return ""
        whole = hashlib.sha256()
        for path in sorted(self._destination.iterdir()):
            whole.update(path.name.encode() + path.read_bytes())
        return whole.hexdigest()

    def finish(self, whole: str) -> None:
        """The same command again makes the same bytes and leaves nothing else, whatever there was."""
        before = self.digest()
        assert before in ("", whole), "a part of a model was there"
        status = self.end(self.start())
        if status == REFUSED:
            # The model stands and the state is gone: killed before an empty folder was removed, or there was no state.
            assert before == whole
            assert not list(state_folder(self._destination).glob("*"))
        else:
            assert status == 0, status
        assert self.digest() == whole
        left = [path.name for path in self._folder.iterdir() if path.name.startswith(".")]
        assert left == [] or (status == REFUSED and left == [state_folder(self._destination).name]), left

    def forget(self) -> None:
        for path in self._folder.iterdir():
            shutil.rmtree(path)


def main() -> None:
    source, destination, text, method, seed, share, kills = sys.argv[1:]
    torch.set_num_threads(1)
    runs = Runs(Path(source), Path(destination), Path(text), method)
    chance = random.Random(int(seed))
    state = state_folder(Path(destination))
    Path(destination).parent.mkdir(exist_ok=True)
    count = runs.points()
    began = time.monotonic()
    runs.forget()
    assert runs.points() == count
    seconds = time.monotonic() - began
    whole = runs.digest()
    runs.forget()
    killed = resumed = 0

    def left_by_kill() -> None:
        nonlocal killed, resumed
        killed += 1
        resumed += any(state.glob("stage-*"))
        assert runs.digest() in ("", whole), "a part of a model is there"

    for point in sorted(chance.sample(range(1, count + 1), round(float(share) * count))):
        assert runs.end(runs.start(point)) == -signal.SIGKILL, point
        left_by_kill()
        runs.finish(whole)
        runs.forget()
    for _ in range(int(kills)):
        child = runs.start()
        time.sleep(chance.uniform(0, 0.5 * seconds))
        os.kill(child, signal.SIGKILL)
        status = runs.end(child)
        if status == -signal.SIGKILL:
            left_by_kill()
        else:
            assert runs.digest() == whole, status
            runs.forget()
    runs.finish(whole)
    sys.stdout.write(json.dumps({"points": count, "killed": killed, "resumed": resumed}) + "\n")


if __name__ == "__main__":
    main()
