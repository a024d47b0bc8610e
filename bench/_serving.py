"""What a client sees of a running daemon: the overhead a token, the health check's time, the memory beside the ledger.

Nothing here imports torch: the bench's own copy of its libraries would halve the engine's proportional share of them.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edged.client import Chunk, Client
from edged.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT = 2048
SEQUENCES = 2
_TEMPLATE = """
listen: {{unix: {folder}/edged.sock}}
memory: {{budget: 4GiB}}
models:
  - {{name: demo, path: {model}, executor: torch, device: cpu, dtype: {dtype}, context_length: {context},
     max_sequences: {sequences}{keys}}}
"""


def proportional_set_size(pid: int) -> int:
    """Bytes of a process's memory, a page that n processes share counted as 1/n.

    Raises:
        OSError: The process is gone.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} has no smaps_rollup")


class PeakMemory:
    """Samples the sum over a process and its children until it is stopped."""

    def __init__(self, pid: int, every: float = 0.1) -> None:
        self.peak = 0
        self._pid = pid
        self._every = every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return the peak in bytes."""
        self._end.set()
        self._thread.join()
        return self.peak

    def _sample(self) -> None:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children")
        while not self._end.wait(self._every):
            try:
                pids = [self._pid, *map(int, children.read_text().split())]
                self.peak = max(self.peak, sum(proportional_set_size(pid) for pid in pids))
            except OSError:
                continue  # a process came or went between two reads


@contextmanager
def serving(
    model: Path,
    dtype: str = "float32",
    *,
    context: int = CONTEXT,
    sequences: int = SEQUENCES,
    keys: str = "",
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A daemon with the demo model, and more keys of its own; yields its process and its address, ends it by SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as name:
        folder = Path(name)
        config = folder / "edged.yaml"
        config.write_text(
            _TEMPLATE.format(
                folder=folder,
                model=model.resolve(),
                dtype=dtype,
                context=context,
                sequences=sequences,
                keys=f", {keys}" if keys else "",
            )
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "edged", "--config", str(config)], stdout=log, stderr=log
            )
        try:
            yield process, f"unix:{folder}/edged.sock"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def token_overhead_ms(client: Client, tokens: int = 200) -> tuple[float, float]:
    """Medians over one stream, in ms: client-seen time between tokens less the executor's step, and that step."""
    overheads = []
    steps = []
    last = 0.0
    for event in client.generate("Once upon a time", max_tokens=tokens, ignore_eos=True, temperature=0.0):
        now = time.perf_counter()
        if isinstance(event, Chunk):
            if last and len(event.token_ids) == 1:
                overheads.append((now - last - event.step_seconds) * 1e3)
                steps.append(event.step_seconds * 1e3)
            last = now
    return statistics.median(overheads[4:]), statistics.median(steps[4:])


def status_seconds(address: str, times: int = 7) -> float:
    """Median wall time of a whole `edgectl status` process."""
    edgectl = Path(sys.executable).with_name("edgectl")
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        subprocess.run(
            [edgectl, "status"],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "EDGED_ADDRESS": address},
        )
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def restart_seconds(client: Client) -> float:
    """From the engine's death amid an answer until the model answers again; the client is told of the answer that was lost.

    Raises:
        RuntimeError: The answer went on.
    """
    stream = iter(client.generate("Once upon a time", max_tokens=900, ignore_eos=True, temperature=0.0))
    next(event for event in stream if isinstance(event, Chunk))
    killed = client.status().engine_pid
    begin = time.perf_counter()
    os.kill(killed, signal.SIGKILL)
    try:
        for _ in stream:
            pass
    except UnavailableError:
        pass
    else:
        raise RuntimeError(f"the answer went on without the engine, process {killed}")
    while client.wait_ready(timeout=120).engine_pid == killed:
        time.sleep(0.005)
    client.generate("Once upon a time", max_tokens=1).answer()
    return time.perf_counter() - begin


def fill_every_page(client: Client, vocabulary: int) -> None:
    """Run as many requests at once as the model takes, each to the end of its context."""

    def run(seed: int) -> None:
        prompt = [(seed * 7919 + 31 * i) % (vocabulary // 2) + 100 for i in range(CONTEXT - 64)]
        client.generate(prompt, max_tokens=64, ignore_eos=True).answer()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(SEQUENCES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(model: Path) -> dict[str, float]:
    """Start a daemon, measure, stop it."""
    with serving(model) as (process, address):
        memory = PeakMemory(process.pid)
        with Client(address) as client:
            status = client.wait_ready(timeout=120)
            overhead, step = min(token_overhead_ms(client) for _ in range(3))
            seconds = status_seconds(address)
            fill_every_page(client, vocabulary=40_000)
            peak = memory.stop()
            restart = restart_seconds(client)
    return {
        "token_overhead_ms": overhead,
        "token_step_ms": step,
        "status_seconds": seconds,
        "restart_seconds": restart,
        "memory_vs_ledger": peak / status.ledger.total_bytes,
        "memory_peak_mib": peak / 2**20,
        "ledger_mib": status.ledger.total_bytes / 2**20,
    }
