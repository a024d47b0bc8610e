"""The daemon process stays inside its own share of the budget, whatever is sent to it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from edged.config_reader import read_config
from edged.errors import EdgedError, InvalidArgumentError


@contextmanager
def peak_of(pid: int):
    """Samples the proportional set size of a process; yields a function that returns the peak so far, in bytes."""
    peak = 0
    end = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not end.wait(0.02):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            peak = max(peak, 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: peak
    finally:
        end.set()
        thread.join()


@pytest.fixture(scope="module")
def large_context(demo_model):
    """A daemon whose limits.prompt_size is what bounds a text, not its context."""
    from fixtures.daemon import DaemonProcess, demo_configuration

    settings = {"context_length": 8192, "max_sequences": 1}
    process = DaemonProcess(demo_configuration(demo_model, model=settings)).wait_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def config(large_context):
    return read_config(large_context.config_file)


@pytest.mark.parametrize("piece", ["1", "hello ", "\u00e9", "\U0001f600"])
def test_the_largest_texts_at_once(large_context, config, piece):
    text = piece * (config.prompt_size // len(piece.encode()))

    def tokenize() -> None:
        with large_context.client() as client:
            client.tokenize(text, timeout=120)

    with peak_of(large_context.process.pid) as peak:
        threads = [threading.Thread(target=tokenize) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert peak() <= config.host


def test_what_is_too_large_is_refused_and_costs_nothing(large_context, config):
    def many(client, role):
        return client.generate([{"role": role, "content": ""}] * 100_000).answer()

    cases = [
        (lambda client: client.tokenize("1" * 900_000), "900000 bytes"),
        (lambda client: client.generate("1" * 900_000).answer(), "900000 bytes"),
        (lambda client: client.detokenize([5] * 500_000), "500000 ids"),
        (lambda client: client.generate([5] * 500_000).answer(), "500000 tokens"),
        (lambda client: many(client, "user"), "100000 messages"),
        (lambda client: many(client, "x"), "100000 messages"),
    ]
    with large_context.client() as client, peak_of(large_context.process.pid) as peak:
        for call, said in cases:
            with pytest.raises(InvalidArgumentError, match=said):
                call(client)
        assert peak() <= config.host


def test_a_call_that_gave_up_holds_up_nobody(large_context, config):
    text = "1" * config.prompt_size

    def give_up() -> None:
        with large_context.client() as client, pytest.raises(EdgedError):
            client.tokenize(text, timeout=0.01)

    threads = [threading.Thread(target=give_up) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Sixteen texts, one after the other, would take this call past its deadline if it waited for them.
    begun = time.monotonic()
    with large_context.client() as client:
        assert client.generate("Hi", max_tokens=1, timeout=60).answer().token_ids
        client.tokenize(text, timeout=60 - (time.monotonic() - begun))
