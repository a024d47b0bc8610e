"""Whole builds in processes of their own, which are raced, interrupted and killed."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small_models import model_folder
from tensorrt_case import small_spec, tensorrt_rtx

from edged.config import ModelConfig
from edged.engine import planned, provision
from edged.engine.builder import Plan
from edged.engine.gpu import Gpu
from edged.engine.key import slot_of
from edged.engine.provision import provide
from edged.engine.shapes import EngineShapes
from edged.engine.store import EngineStore
from edged.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edged.engine.entries import StoredEngine

HERE = Path(__file__).resolve().parent
SHAPES = EngineShapes(prefill_tokens=256, max_sequences=2)
TARGETS = ("sm89",)

CHILD = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # (a shell's background jobs inherit that it is ignored)
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_provision import provided
def progress(what, done, total):
    print(what, done, flush=True)
engine, built = provided(Path(sys.argv[2]), progress=progress)
print("built" if built else "found", engine.folder.name, flush=True)
"""


def provided(folder: Path, **options: Any) -> tuple[StoredEngine, bool]:
    return provide(small_spec(), SHAPES, EngineStore(folder), label="small", targets=TARGETS, **options)


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(HERE), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(child: subprocess.Popen[str], thousandths: int) -> None:
    """Wait until the child's build is this far."""
    assert child.stdout is not None
    for line in child.stdout:
        what, _, done = line.strip().rpartition(" ")
        if what == "building" and int(done) >= thousandths:
            return
    pytest.fail(f"the build ended before it was stopped: {child.communicate()[1]}")


def test_an_engine_is_built_once_then_found(tmp_path: Path) -> None:
    tensorrt_rtx()
    engine, built = provided(tmp_path)
    assert built
    assert engine.manifest.label == "small"
    assert engine.manifest.key.tensorrt.startswith("tensorrt_rtx 1.")
    assert engine.manifest.context_bytes == engine.manifest.activation_bytes["prefill"] > 0
    again, built = provided(tmp_path)
    assert not built
    assert again.plan == engine.plan


def test_two_processes_at_once_build_one_engine(tmp_path: Path) -> None:
    tensorrt_rtx()
    first = start(tmp_path)
    wait_for(first, 0)
    # Until the other one has seen it: else the build may have ended by then.
    first.send_signal(signal.SIGSTOP)
    second = start(tmp_path)
    try:
        assert second.stdout is not None
        assert any("waiting for another build of it" in line for line in second.stdout)
    finally:
        first.send_signal(signal.SIGCONT)
    results = [child.communicate(timeout=120) for child in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], results
    ends = [out.splitlines()[-1].split() for out, _ in results]
    assert [end[0] for end in ends] == ["built", "found"]
    assert ends[0][1] == ends[1][1]


def test_a_wait_for_another_build_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message differs from the one before, or the watchdog would end the load after its timeout."""
    monkeypatch.setattr("edged.engine.provision._TELL_SECONDS", 0.001)
    told: list[tuple[str, int, int]] = []

    class Store:
        def find(self, _key: object) -> None:
            return None

        @contextlib.contextmanager
        def building(self, _key: object, *, waiting: Callable[[], None], **_: object) -> Iterator[None]:
            for _ in range(3):
                waiting()
                time.sleep(0.005)
            raise InterruptedError
            yield

    monkeypatch.setattr("edged.engine.provision._identify", lambda *_: (None, (), b"", None))
    with pytest.raises(InterruptedError):
        provide(None, None, Store(), label="small", progress=lambda *words: told.append(words))  # type: ignore[arg-type]
    assert len(told) == len(set(told)) == 3
    assert {what for what, _, _ in told} == {"waiting for another build of it"}


def test_a_build_that_is_killed_is_made_good_by_the_next_start(tmp_path: Path) -> None:
    tensorrt_rtx()
    child = start(tmp_path)
    wait_for(child, 300)
    child.kill()
    child.communicate()
    assert EngineStore(tmp_path).entries() == []
    _, built = provided(tmp_path)
    assert built
    assert not list(tmp_path.glob(".building-*"))


@pytest.mark.one_python
@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.soak)])
def test_builds_that_are_killed_at_random_moments_leave_a_whole_engine_or_none(
    kills: int, tmp_path: Path
) -> None:
    tensorrt_rtx()
    store, dice = EngineStore(tmp_path / "cache"), random.Random(kills)
    began = time.monotonic()
    assert start(tmp_path / "first").wait() == 0
    whole = time.monotonic() - began
    (expected,) = EngineStore(tmp_path / "first").entries()
    killed = 0
    for _ in range(kills):
        child = start(store.folder)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(dice.uniform(0, 1.1 * whole))
        child.kill()
        child.communicate()
        killed += child.returncode == -signal.SIGKILL
        assert all(fault == "" for _, fault in store.verify())
        for entry in store.entries():
            assert entry.manifest
            assert expected.manifest
            assert entry.manifest.key == expected.manifest.key
            shutil.rmtree(entry.folder)  # the next one builds, too
    assert killed > 0
    _, built = provided(store.folder)
    assert built
    assert {each.name for each in store.folder.iterdir()} == {"locks", store.entries()[0].folder.name}


def test_ctrl_c_stops_the_build_and_leaves_nothing_behind(tmp_path: Path) -> None:
    tensorrt_rtx()
    child = start(tmp_path)
    wait_for(child, 100)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert {each.name for each in tmp_path.iterdir()} == {"locks"}


def test_rebuilding_keeps_the_engine_that_passed_until_the_new_one_has(tmp_path: Path) -> None:
    tensorrt_rtx()
    store = EngineStore(tmp_path)
    old, _ = provided(tmp_path)
    store.record_check(old, {"worst": 0.0}, passed=True)
    new, built = provided(tmp_path, rebuild=True)
    assert built
    assert provided(tmp_path)[0].folder == old.folder
    store.record_check(new, {"worst": 0.0}, passed=True)
    assert provided(tmp_path)[0].folder == new.folder


def test_the_daemon_takes_a_stripped_engine_where_one_was_built_and_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorrt_rtx()
    for module in (provision, planned):
        monkeypatch.setattr(module, "find_gpu", lambda: Gpu((8, 9), 13000))
    model = ModelConfig(
        "m",
        model_folder(tmp_path / "model"),
        executor="tensorrt",
        device="cuda",
        dtype="float16",
        prefill_chunk=128,
    )
    store, shapes = EngineStore(tmp_path / "cache"), EngineShapes.of(model)
    whole, built = provision.provide_model(model, store)
    assert (built, whole.manifest.refitted) == (True, False)
    assert provision.provide_model(model, store)[0].folder == whole.folder
    needed = planned.planned_context_bytes(model, store.folder)

    spec = provision.specs_of(model)[1]
    key = provision._identify(spec, shapes, ())[-1]
    with store.building(key):
        plan = Plan(memoryview(b"stripped"), {"prefill": 1 << 30}, refitted=True)
        stripped = store.publish(key, plan, slot=slot_of(spec, ("sm89",)), label="m")
    assert provision.provide_model(model, store) == (replace(stripped, check=None), False)
    assert provision.provide_model(model, store, refitted=False)[0].folder == whole.folder
    # One of them is used, and the ledger has room for either.
    assert needed is not None
    assert needed < 1 << 30 == planned.planned_context_bytes(model, store.folder)
    store.record_check(stripped, {}, passed=False)
    assert provision.provide_model(model, store)[0].folder == whole.folder


def test_an_engine_that_failed_its_check_is_refused_with_the_figures(tmp_path: Path) -> None:
    tensorrt_rtx()
    engine, _ = provided(tmp_path)
    EngineStore(tmp_path).record_check(engine, {"largest difference": 3.5}, passed=False)
    with pytest.raises(
        FailedPreconditionError, match=r"failed its check .*largest difference 3.5.*--rebuild"
    ):
        provided(tmp_path)
