"""The cache of engines among several processes, on disks that are full or not ours."""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fixtures.children import exit_of, in_child, run_where_nothing_can_be_written
from stored_plans import KEY, other_key, plan_of, stored

from edged.engine.store import EngineStore
from edged.errors import CancelledError, EdgedError, FailedPreconditionError, ResourceExhaustedError


class TestProcesses:
    def test_of_two_processes_one_builds_and_the_other_waits_for_it(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        log = tmp_path / "log"

        def build_or_find() -> None:
            with store.building(KEY):
                if store.find(KEY) is None:
                    time.sleep(0.2)
                    store.publish(KEY, plan_of(), slot="s", label="m")
                    with log.open("a") as file:
                        file.write("built\n")

        children = [in_child(build_or_find) for _ in range(5)]
        assert [exit_of(child) for child in children] == [0] * 5
        assert log.read_text() == "built\n"
        assert len(store.entries()) == 1

    def test_a_crowd_that_comes_to_build_one_key_fails_nowhere(self, tmp_path: Path) -> None:
        def come() -> None:
            for _ in range(100):
                with EngineStore(tmp_path).building(KEY):
                    pass

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(come) for _ in range(4)]:
                done.result(timeout=60)

    def test_different_keys_are_built_at_the_same_time(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        with store.building(KEY):
            assert exit_of(in_child(lambda: stored(store, other_key(graph="x")))) == 0

    def test_waiting_is_told_of_and_can_be_cancelled(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        stop, told = threading.Event(), []

        def waiting() -> None:
            told.append(1)
            if len(told) == 3:
                stop.set()

        other = EngineStore(tmp_path).building(KEY, waiting=waiting, cancelled=stop)
        with store.building(KEY), pytest.raises(CancelledError), other:
            pytest.fail("two build the same key")
        assert len(told) == 3

    @pytest.mark.one_python
    def test_kill_9_at_any_moment_leaves_a_whole_engine_or_none_and_the_next_start_works(
        self, tmp_path: Path
    ) -> None:
        store = EngineStore(tmp_path)
        dice = random.Random(1)
        plans = {bytes(plan_of(400_000, seed).data) for seed in range(3)}

        def build_for_ever() -> None:
            while True:
                for seed in range(3):
                    engine = stored(store, plan=plan_of(400_000, seed))
                    store.record_check(engine, {}, passed=seed == 0)
                    store.prune(500_000)

        for _ in range(25):
            child = in_child(build_for_ever)
            time.sleep(dice.uniform(0.0, 0.08))
            os.kill(child, signal.SIGKILL)
            assert exit_of(child) == -signal.SIGKILL
            # Nobody is told to clean up first: what is found is whole.
            found = store.find(KEY)
            assert found is None or found.plan in plans
            assert all(fault == "" for _, fault in store.verify())
        stored(store, plan=plan_of(400_000, 0))
        store.prune(500_000)
        assert store.find(KEY) is not None
        assert not list(tmp_path.glob(".building-*"))

    def test_the_lock_of_a_killed_builder_is_free(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)

        def hang() -> None:
            with store.building(KEY):
                (tmp_path / f".building-{KEY.digest}.00000000").mkdir()
                (tmp_path / "ready").touch()
                time.sleep(60)

        child = in_child(hang)
        while not (tmp_path / "ready").exists():
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        exit_of(child)
        stored(store)
        assert not list(tmp_path.glob(".building-*"))


class TestDisk:
    def test_a_disk_that_fills_is_refused_with_the_size_and_leaves_nothing(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        stored(store, other_key(graph="x"))
        names = {each.name for each in tmp_path.iterdir()}

        def fill() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            with pytest.raises(
                ResourceExhaustedError, match=r"no space left in .* for the engine's 195.31 KiB"
            ):
                stored(store, plan=plan_of(200_000))

        assert exit_of(in_child(fill)) == 0
        assert {each.name for each in tmp_path.iterdir()} == names
        assert len(store.entries()) == 1

    def test_a_folder_that_cannot_be_written_is_refused_before_the_build(self) -> None:
        # No one, root included, makes folders there.
        begin = EngineStore(Path("/sys/edged")).building(KEY)
        with (
            pytest.raises(FailedPreconditionError, match=r"/sys/edged cannot be written .*--cache or"),
            begin,
        ):
            pytest.fail("must not begin to build")

    def test_a_file_in_the_place_of_the_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("")
        store = EngineStore(tmp_path / "cache" / "engines")
        assert store.find(KEY) is None
        with pytest.raises(FailedPreconditionError, match="is no folder"), store.building(KEY):
            pytest.fail("must not begin to build")

    def test_a_read_only_cache_serves_what_it_has_and_builds_nothing(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)
            store = EngineStore(folder / "engines")
            engine = stored(store)

            def serve() -> None:
                found = store.find(KEY)
                assert found is not None
                assert found.plan == engine.plan
                for change in (
                    lambda: stored(store, other_key(graph="x")),
                    lambda: store.record_check(found, {}, passed=True),
                    lambda: store.prune(0),
                ):
                    with pytest.raises(FailedPreconditionError, match="cannot be written"):
                        change()

            assert run_where_nothing_can_be_written(folder, serve) == 0

    def test_an_error_inside_the_build_is_not_taken_for_one_of_the_cache(self, tmp_path: Path) -> None:
        build = EngineStore(tmp_path).building(KEY)
        with pytest.raises(OSError, match="of the build's own") as error, build:
            raise OSError(28, "of the build's own")
        assert not isinstance(error.value, EdgedError)
