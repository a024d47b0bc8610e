"""An executor's engine: progress comes in the thread that waits, and what that raises ends the build."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from edged.config import ModelConfig
from edged.errors import CancelledError, FailedPreconditionError
from edged.executor import tensorrt_provide
from edged.executor.tensorrt_provide import provide_engine

CONFIG = ModelConfig("m", Path("/nowhere"), executor="tensorrt", device="cuda", dtype="bfloat16")


def test_progress_is_told_in_the_callers_thread_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def provide(config: Any, *_: Any, progress: Any, cancelled: Any) -> Any:
        assert config is CONFIG
        assert threading.current_thread() is not threading.main_thread()
        for done in range(5):
            progress("building", done, 5)
        assert not cancelled.is_set()
        return "engine", True

    monkeypatch.setattr(tensorrt_provide, "provide_apart", provide)
    seen: list[Any] = []
    assert provide_engine(CONFIG, lambda *each: seen.append((*each, threading.current_thread()))) == "engine"
    assert seen == [("building", done, 5, threading.main_thread()) for done in range(5)]


def test_what_progress_raises_cancels_the_build_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def provide(*_: Any, progress: Any, cancelled: Any) -> Any:
        progress("building", 1, 5)
        ended.append(cancelled.wait(10))
        raise CancelledError("the build was cancelled")

    def closed(*_: Any) -> None:
        raise ConnectionError("the daemon is gone")

    monkeypatch.setattr(tensorrt_provide, "provide_apart", provide)
    with pytest.raises(ConnectionError, match="the daemon is gone"):
        provide_engine(CONFIG, closed)
    assert ended == [True]


def test_what_the_process_refuses_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGED_CACHE", str(tmp_path))

    def provide(_: Any, folder: Path, *__: Any, **___: Any) -> Any:
        raise FailedPreconditionError(f"{folder} cannot be written")

    monkeypatch.setattr(tensorrt_provide, "provide_apart", provide)
    with pytest.raises(FailedPreconditionError, match=f"{tmp_path}/engines cannot be written"):
        provide_engine(CONFIG, lambda *_: None)
