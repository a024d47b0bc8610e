"""The engine of a model, found or built by a process of its own, with the progress told in the thread that waits for it."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from edged.engine.apart import provide_apart
from edged.engine.store import DEFAULT_LIMIT, default_folder

if TYPE_CHECKING:
    from edged.config import ModelConfig
    from edged.engine.entries import StoredEngine
    from edged.executor.base import Progress

_POLL_SECONDS = 0.1


def provide_engine(config: ModelConfig, progress: Progress) -> StoredEngine:
    """Find the engine in the cache, or build it there for this machine's GPU.

    Args:
        config: The model's part of the configuration.
        progress: Is told of the build, in the caller's thread: who hears of it (the daemon, systemd) does not expect
            another. What it raises ends the build.

    Raises:
        EdgedError: As :func:`edged.engine.apart.provide_apart`.
    """
    steps: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    cancelled = threading.Event()
    found: list[StoredEngine] = []
    faults: list[BaseException] = []

    def provide() -> None:
        try:
            engine, _ = provide_apart(
                config,
                default_folder(),
                DEFAULT_LIMIT,
                progress=lambda *step: steps.put(step),
                cancelled=cancelled,
            )
            found.append(engine)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            faults.append(error)

    thread = threading.Thread(target=provide, name="engine-provider")
    thread.start()
    try:
        while thread.is_alive() or not steps.empty():
            try:
                step = steps.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            progress(*step)
    finally:
        cancelled.set()
        thread.join()
    if faults:
        raise faults[0]
    return found[0]
