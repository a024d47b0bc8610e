"""An engine process around the fake executor: `fake_engine.py SETTINGS --fd N --parent PID`.

A token's text is the letter `a` to `z` of its id. SETTINGS is JSON and decides over the executor (see `main`).
"""

from __future__ import annotations

import faulthandler
import json
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fake_executor import FakeExecutor

from edged import errors
from edged.executor.base import ExecutorLimits
from edged.parent_death import die_with_parent
from edged.worker.engine import serve
from edged.worker.runner import ModelRunner

VOCABULARY = 97


class Letters:
    eos_token_ids = ()
    special_token_ids = frozenset()
    has_byte_fallback = True
    strips_leading_space = False

    def token_text(self, token_id):
        return chr(ord("a") + token_id % 26)


def corrupting(turn, number):
    """A runner's turn, of which that number leaves a page with an owner too many."""

    def corrupt(runner):
        nonlocal number
        number -= 1
        ended = turn(runner)
        if number == 0:
            runner._holdings.pool._owners[0] += 1  # what a fault of the page tables would do
        return ended

    return corrupt


def main():
    settings = json.loads(sys.argv[1])
    fd, parent = int(sys.argv[3]), int(sys.argv[5])
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    if settings.get("exit_at_start"):
        sys.exit(settings["exit_at_start"])
    time.sleep(settings.get("load_seconds", 0))

    loaded = set()

    def executor_of(config):
        limits = ExecutorLimits(
            max_step_tokens=config.prefill_chunk + config.max_sequences,
            max_sequences=config.max_sequences,
            context_length=config.context_length,
            pages=config.max_sequences * -(-config.context_length // 64),
            vocabulary=settings.get("vocabulary", VOCABULARY),
        )
        slow_load = settings.get("slow_load", 0)
        error = settings.get("load_error")
        executor = FakeExecutor(
            limits,
            step_seconds=settings.get("step_seconds", 0),
            fail_at=settings.get("fail_at"),
            hang_at=settings.get("hang_at"),
            slow_load=settings.get("slow_again", slow_load) if config.name in loaded else slow_load,
            slow_pieces=1 if "slow_again" in settings else 3,
            long_at=settings.get("long_at"),
            long_seconds=settings.get("long_seconds", 0),
            load_error=None if error is None else getattr(errors, error)(f"{config.name} does not load"),
        )
        loaded.add(config.name)
        return "fake", executor

    if "corrupt_at" in settings:
        ModelRunner.turn = corrupting(ModelRunner.turn, settings["corrupt_at"])
    sys.exit(serve(socket.socket(fileno=fd), executor_of=executor_of, texts_of=lambda _: Letters()))


if __name__ == "__main__":
    main()
