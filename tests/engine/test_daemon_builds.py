"""The daemon with `executor: tensorrt`: it builds on its first start and tells systemd, beside others and after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fixtures.daemon import DaemonProcess
from fixtures.small_models import model_files
from small_models import write_model
from tensorrt_case import tensorrt_rtx

from edged.engine.file_lock import try_lock
from edged.engine.store import EngineStore

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
PROGRAM = (str(HERE / "rtx_daemon.py"),)
PROMPT = "The engine is "

pytestmark = pytest.mark.one_python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and the reference logits that `edgectl import` stores."""
    from edged.cli.reference_run import compute

    folder = tmp_path_factory.mktemp("models") / "small"
    write_model(folder, "qwen3", head_dim=64, vocab_size=257)
    for name, content in model_files().items():
        if "token" in name:
            (folder / name).write_bytes(content)
    compute(folder, "float32", lambda *_: None)
    return folder


class Manager:
    """As much of systemd as listens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(1)

    def hear(self, wanted: str, daemon: DaemonProcess) -> None:
        """Listen until a message holds this; fail with the daemon's log if it ends before."""
        while not self.messages or wanted not in self.messages[-1]:
            with suppress(TimeoutError):
                self.messages.append(self._socket.recv(4096).decode())
            assert daemon.process.poll() is None, daemon.log()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts daemons on one cache, each with a manager of its own."""
    tensorrt_rtx()
    with ExitStack() as stack:

        def begin(name: str) -> tuple[DaemonProcess, Manager]:
            manager = Manager(tmp_path / f"{name}.notify")
            stack.callback(manager.close)
            settings = {
                "name": "small",
                "path": str(model),
                "executor": "tensorrt",
                "device": "cuda",
                "dtype": "float16",
                "context_length": 128,
                "prefill_chunk": 64,
            }
            process = DaemonProcess(
                {
                    "models": [settings],
                    "memory": {"budget": "4GiB"},
                    "log": {"level": "debug", "format": "json"},
                },
                {
                    "PYTHONPATH": str(HERE / "gpu_machine"),
                    "EDGED_CACHE": str(tmp_path / "cache"),
                    "EDGED_BUILD_GATE": str(tmp_path / "gate"),
                    "NOTIFY_SOCKET": str(manager.path),
                },
                PROGRAM,
            )
            stack.callback(process.close)
            return process, manager

        yield begin


def answer(daemon: DaemonProcess) -> str:
    with daemon.client() as client:
        text: str = client.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).answer().text
    return text


def libraries_of(daemon: DaemonProcess) -> str:
    with daemon.client() as client:
        return Path(f"/proc/{client.status().engine_pid}/maps").read_text()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Builds go on once this file is there."""
    return tmp_path / "gate"


def test_the_first_start_builds_and_systemd_hears_how_far_it_is(
    start: Any, gate: Path, tmp_path: Path
) -> None:
    daemon, manager = start("first")
    manager.hear("STATUS=loading small: building 0%", daemon)
    # With each word of progress comes more time, so that a long build does not run into TimeoutStartSec.
    manager.hear("EXTEND_TIMEOUT_USEC=", daemon)
    gate.touch()
    manager.hear("READY=1", daemon)
    assert not any("READY" in each for each in manager.messages[:-1])
    (entry,) = EngineStore(tmp_path / "cache" / "engines").entries()
    assert (entry.state, entry.manifest and entry.manifest.key.targets) == ("passed", "sm89")
    libraries = libraries_of(daemon)
    assert "libtorch" not in libraries
    assert "libtensorrt" not in libraries  # the build was another process's
    assert answer(daemon)
    assert daemon.stop() == 0


def test_of_two_daemons_that_start_at_once_one_builds_and_the_other_waits(
    start: Any, gate: Path, tmp_path: Path
) -> None:
    one, its_manager = start("one")
    its_manager.hear("building", one)
    two, manager = start("two")
    manager.hear("waiting for another build of it", two)
    manager.hear("EXTEND_TIMEOUT_USEC=", two)
    gate.touch()
    its_manager.hear("READY=1", one)
    manager.hear("READY=1", two)
    assert not any("building" in each for each in manager.messages)
    assert len(EngineStore(tmp_path / "cache" / "engines").entries()) == 1
    assert answer(one) == answer(two)


def test_a_daemon_that_is_killed_while_it_builds_leaves_no_builder_and_the_next_start_works(
    start: Any, gate: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "engines"
    daemon, manager = start("killed")
    manager.hear("building", daemon)
    (lock,) = (each for each in (cache / "locks").iterdir() if each.name != "store.lock")
    assert try_lock(lock) is None
    os.kill(daemon.process.pid, signal.SIGKILL)
    while (descriptor := try_lock(lock)) is None:  # the builder stands still, and ends all the same
        time.sleep(0.02)
    os.close(descriptor)
    assert EngineStore(cache).entries() == []
    gate.touch()
    daemon, manager = start("next")
    manager.hear("READY=1", daemon)
    assert not list(cache.glob(".building-*"))
    (entry,) = EngineStore(cache).entries()
    assert json.loads((entry.folder / "check.json").read_text())["passed"] is True
