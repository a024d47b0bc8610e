"""An engine from a process of its own, which may refuse, die or be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small_models import model_folder
from tensorrt_case import tensorrt_rtx

from edged.config import ModelConfig
from edged.engine import apart
from edged.engine.store import DEFAULT_LIMIT, EngineStore
from edged.errors import CancelledError, CheckpointError, FailedPreconditionError, InternalError

if TYPE_CHECKING:
    from edged.engine.entries import StoredEngine


def model(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(
        name="small",
        path=model_folder(folder / "model", **changes),
        executor="tensorrt",
        device="cuda",
        dtype="float16",
    )


def provided(folder: Path, config: ModelConfig | None = None, **options: Any) -> tuple[StoredEngine, bool]:
    options.setdefault("targets", ("sm89",))
    return apart.provide_apart(config or model(folder), folder / "cache", DEFAULT_LIMIT, **options)


def test_an_engine_is_built_there_and_found_here(tmp_path: Path) -> None:
    tensorrt_rtx()
    seen: list[tuple[str, int, int]] = []
    descriptors = set(Path("/proc/self/fd").iterdir())
    engine, built = provided(tmp_path, progress=lambda *each: seen.append(each))
    assert built
    assert seen[-1] == ("building", 1000, 1000)
    assert EngineStore(tmp_path / "cache").entries()[0].folder == engine.folder
    again, built = provided(tmp_path)
    assert not built
    assert again.plan == engine.plan
    assert set(Path("/proc/self/fd").iterdir()) <= descriptors


def test_this_process_loads_neither_onnx_nor_tensorrt() -> None:
    code = (
        "import sys\n"
        "import edged.engine.apart\n"
        "loaded = {'onnx', 'tensorrt', 'tensorrt_rtx', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_it_refuses_is_refused_here_with_the_same_code_and_field(tmp_path: Path) -> None:
    tensorrt_rtx()
    with pytest.raises(FailedPreconditionError, match="not for sm87") as error:
        provided(tmp_path, targets=("sm87",))
    assert error.value.field == "target"
    with pytest.raises(FailedPreconditionError, match="no kernel takes this model's heads") as error:
        provided(tmp_path, model(tmp_path, head_dim=80))
    assert error.value.code == CheckpointError.code


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_a_builder_that_dies_is_an_error_with_its_end_and_the_next_one_works(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    tensorrt_rtx()

    def kill(_: str, done: int, __: int) -> None:
        if done > 100:
            os.kill(children[0].pid, signal.SIGABRT)

    with pytest.raises(
        InternalError, match="the process that builds its engine was ended by SIGABRT; see the log"
    ):
        provided(tmp_path, progress=kill)
    assert provided(tmp_path)[1]


def test_a_cancelled_build_ends_at_once(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    tensorrt_rtx()
    stop = threading.Event()
    with pytest.raises(CancelledError):
        provided(tmp_path, progress=lambda *_: stop.set(), cancelled=stop)
    assert children[0].returncode == -signal.SIGKILL
    assert EngineStore(tmp_path / "cache").entries() == []


def test_what_the_progress_function_raises_comes_back(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    tensorrt_rtx()

    def fail(*_: object) -> None:
        raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody listens"):
        provided(tmp_path, progress=fail)
    assert children[0].returncode is not None


def test_nonsense_from_the_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        code = f"import os; os.write({arguments[3]}, b'hello\\n')"
        return real([arguments[0], "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(InternalError, match="said what nobody understands"):
        provided(tmp_path)
