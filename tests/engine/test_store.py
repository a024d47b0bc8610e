"""The engine cache: whole entries or none, one builder a key, and nothing lost that passed its check."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_plans import KEY, other_key, plan_of, stored

from edged.engine.entries import CHECK, MANIFEST, PLAN
from edged.engine.key import NO_DRIVER
from edged.engine.manifest import DamagedError, Manifest
from edged.engine.store import EngineStore, default_folder
from edged.engine.timings import TimingCaches
from edged.errors import FailedPreconditionError


def test_what_is_stored_is_found_byte_for_byte(tmp_path: Path) -> None:
    store = EngineStore(tmp_path / "deep" / "engines")
    assert store.find(KEY) is None
    plan = plan_of()
    published = stored(store, plan=plan)
    found = EngineStore(store.folder).find(KEY)
    assert found is not None
    assert found.plan == published.plan == bytes(plan.data)
    assert found.manifest == published.manifest
    assert found.manifest.context_bytes == 70
    assert not list(store.folder.glob(".building-*"))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("graph", "c" * 64),
        ("shapes", "other"),
        ("dtype", "float16"),
        ("tensorrt", "tensorrt_rtx 1.8.0"),
        ("targets", "sm120"),
        ("driver", "12.6"),
        ("plugins", "d" * 64),
        ("edged", "0.2.0"),
    ],
)
def test_an_engine_that_differs_in_any_part_is_not_used_and_says_in_which(
    part: str, value: str, tmp_path: Path
) -> None:
    store = EngineStore(tmp_path)
    engine = stored(store)
    wanted = other_key(**{part: value})
    assert wanted.digest != KEY.digest
    assert store.find(wanted) is None
    with pytest.raises(
        FailedPreconditionError, match=r"^the engine x does not fit here: .*; build it again with `edgectl"
    ) as no:
        engine.manifest.key.check_serves(wanted, "the engine x")
    assert len(engine.manifest.key.differences(wanted)) == 1
    assert value[:12] in no.value.message


def test_a_plan_for_several_gpus_serves_each_of_them(tmp_path: Path) -> None:
    store = EngineStore(tmp_path)
    stored(store)
    assert store.find(other_key(targets="sm89")) is not None
    assert store.find(other_key(targets="sm89 sm120")) is None


def test_a_plan_of_tensorrt_rtx_built_without_a_driver_serves_every_driver_and_no_other_plan_does(
    tmp_path: Path,
) -> None:
    store = EngineStore(tmp_path)
    stored(store, other_key(driver=NO_DRIVER))
    assert store.find(KEY) is not None
    assert not other_key(driver=NO_DRIVER, tensorrt="tensorrt 10.3.0").serves(
        other_key(tensorrt="tensorrt 10.3.0")
    )


class TestDamage:
    @given(
        name=st.sampled_from([PLAN, MANIFEST]),
        where=st.floats(0, 1, exclude_max=True),
        how=st.sampled_from(["cut", "flip", "grow", "empty", "gone"]),
    )
    @settings(max_examples=30, deadline=None)
    def test_a_damaged_engine_is_never_loaded_and_is_built_again(
        self, name: str, where: float, how: str
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = EngineStore(Path(folder))
            engine = stored(store)
            path = engine.folder / name
            data = path.read_bytes()
            at = int(where * len(data))
            damaged = {
                "cut": data[:at],
                "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
                "grow": data + b"x",
                "empty": b"",
                "gone": None,
            }[how]
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            assert store.find(KEY) is None
            assert [bool(fault) for _, fault in store.verify()] == [True]
            again = stored(store, plan=plan_of(seed=1))
            found = store.find(KEY)
            assert found is not None
            assert found.plan == again.plan
            assert store.verify()[0][1] == ""
            assert len(store.entries()) == 1

    def test_a_plan_of_the_right_size_with_wrong_bytes_is_found_by_verify(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        engine = stored(store)
        (engine.folder / PLAN).write_bytes(bytes(3000))
        assert store.entries()[0].state == "unchecked"
        assert "not those that were built" in store.verify()[0][1]

    def test_an_engine_under_another_keys_name_is_not_used(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        engine = stored(store)
        wanted = other_key(graph="e" * 64)
        engine.folder.rename(tmp_path / f"{wanted.digest}.00000000")
        assert store.find(wanted) is None
        assert store.find(KEY) is None
        assert store.entries()[0].state == "damaged"

    def test_folders_of_others_are_left_alone(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        mine = tmp_path / "my notes"
        mine.mkdir()
        (tmp_path / "file").write_text("x")
        stored(store)
        store.prune(0, everything=True)
        assert mine.is_dir()
        assert store.entries() == []

    def test_an_unreadable_check_counts_as_none(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        engine = stored(store)
        (engine.folder / CHECK).write_text("{half")
        found = store.find(KEY)
        assert found is not None
        assert found.check is None

    def test_a_manifest_of_another_format_is_refused(self) -> None:
        manifest = Manifest(KEY, "s", "m", 1, "0")
        data = manifest.to_bytes()
        assert Manifest.from_bytes(data) == manifest
        import hashlib

        text = data.rsplit(b"\n", 2)[0].replace(b'"format": 1', b'"format": 2') + b"\n"
        with pytest.raises(DamagedError, match="format 2, this edged writes 1"):
            Manifest.from_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")

    @given(st.binary(max_size=400))
    def test_any_bytes_as_a_manifest_are_refused_cleanly(self, data: bytes) -> None:
        with pytest.raises(DamagedError):
            Manifest.from_bytes(data)


class TestChecks:
    def test_the_engine_that_passed_is_taken_before_a_newer_one_that_was_not_checked(
        self, tmp_path: Path
    ) -> None:
        store = EngineStore(tmp_path)
        first = stored(store)
        store.record_check(first, {"worst": 0.01}, passed=True)
        second = stored(store, plan=plan_of(seed=1))
        found = store.find(KEY)
        assert found is not None
        assert found.folder == first.folder
        assert found.check == {"worst": 0.01, "passed": True}
        store.record_check(second, {}, passed=True)
        found = store.find(KEY)
        assert found is not None
        assert found.folder == second.folder
        assert not first.folder.exists()

    def test_a_new_engine_that_fails_leaves_the_old_one_in_use(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        first = stored(store)
        store.record_check(first, {}, passed=True)
        second = stored(store, plan=plan_of(seed=1))
        store.record_check(second, {"worst": 3.0}, passed=False)
        found = store.find(KEY)
        assert found is not None
        assert found.folder == first.folder
        assert sorted(entry.state for entry in store.entries()) == ["failed", "passed"]

    def test_the_last_that_passed_stays_until_a_newer_one_of_its_slot_has_passed(
        self, tmp_path: Path
    ) -> None:
        store = EngineStore(tmp_path)
        old = stored(store)
        store.record_check(old, {}, passed=True)
        new = stored(store, other_key(edged="0.2.0"))
        assert store.prune(0) != []
        assert old.folder.exists()
        assert not new.folder.exists()
        new = stored(store, other_key(edged="0.2.0"))
        store.record_check(new, {}, passed=True)
        store.prune(0)
        assert new.folder.exists()
        assert not old.folder.exists()

    def test_building_again_and_again_without_a_check_keeps_one(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        passed = stored(store)
        store.record_check(passed, {}, passed=True)
        failed = stored(store, plan=plan_of(seed=1))
        store.record_check(failed, {}, passed=False)
        last = [stored(store, plan=plan_of(seed=seed)) for seed in range(2, 5)][-1]
        assert {entry.folder for entry in store.entries()} == {passed.folder, last.folder}

    def test_a_clock_that_jumps_back_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = EngineStore(tmp_path)
        first = stored(store)

        class Past(dt.datetime):
            @classmethod
            def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
                return dt.datetime(1970, 1, 1, tzinfo=tz)

        monkeypatch.setattr("edged.engine.store.dt.datetime", Past)
        second = stored(store, other_key(edged="0.2.0"))
        assert second.manifest.created.startswith("1970")
        assert second.manifest.serial > first.manifest.serial
        for engine in (first, second):
            store.record_check(engine, {}, passed=True)
        store.prune(0)
        assert [entry.folder for entry in store.entries()] == [second.folder]

    def test_a_check_of_an_engine_that_was_removed_is_no_error(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        engine = stored(store)
        store.prune(0, everything=True)
        store.record_check(engine, {}, passed=True)
        assert store.entries() == []


class TestPruning:
    def test_the_least_recently_used_go_first_and_only_as_many_as_needed(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        engines = [stored(store, other_key(graph=str(index)), slot=str(index)) for index in range(5)]
        for age, engine in enumerate(engines):
            os.utime(engine.folder / MANIFEST, (1000 - age, 1000 - age))
        assert store.find(other_key(graph="4")) is not None  # the oldest is used: it is now the youngest
        size = store.entries()[0].nbytes
        removed = store.prune(int(2.5 * size))
        left = {entry.folder for entry in store.entries()}
        assert left == {engines[0].folder, engines[4].folder}
        assert {entry.folder for entry in removed} == {engine.folder for engine in engines[1:4]}
        assert not (tmp_path / "locks" / f"{other_key(graph='2').digest}.lock").exists()

    def test_the_engine_about_to_be_used_stays(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        kept, gone = stored(store), stored(store, other_key(graph="x"))
        store.prune(0, keep=kept.folder)
        assert kept.folder.exists()
        assert not gone.folder.exists()

    def test_damaged_engines_and_leftovers_go_whatever_the_limit_but_not_those_being_built(
        self, tmp_path: Path
    ) -> None:
        store = EngineStore(tmp_path)
        damaged = stored(store)
        (damaged.folder / PLAN).unlink()
        leftover = tmp_path / f".building-{other_key(graph='x').digest}.00000000"
        leftover.mkdir()
        busy_key = other_key(graph="y")
        busy = tmp_path / f".building-{busy_key.digest}.00000000"
        with store.building(busy_key):
            busy.mkdir()
            store.prune()
            assert busy.is_dir()
        assert not leftover.exists()
        assert not damaged.folder.exists()

    def test_locks_of_builds_that_were_given_up_go_and_those_in_use_stay(self, tmp_path: Path) -> None:
        store = EngineStore(tmp_path)
        stored(store)
        given_up, busy = other_key(graph="x"), other_key(graph="y")
        with contextlib.suppress(KeyboardInterrupt), store.building(given_up):
            raise KeyboardInterrupt
        with store.building(busy):
            store.prune()
            left = {each.name for each in (tmp_path / "locks").iterdir()}
        assert left == {"store.lock", f"{KEY.digest}.lock", f"{busy.digest}.lock"}

    def test_an_empty_or_missing_cache_is_pruned_without_a_word(self, tmp_path: Path) -> None:
        assert EngineStore(tmp_path / "none").prune() == []
        assert EngineStore(tmp_path).prune() == []


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EDGED_CACHE", "CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "edged" / "engines"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_folder() == Path("/x/edged/engines")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/edged:/other")
    assert default_folder() == Path("/var/cache/edged/engines")
    monkeypatch.setenv("EDGED_CACHE", "/mine")
    assert default_folder() == Path("/mine/engines")


def test_timings_are_kept_for_one_tensorrt_driver_and_gpu(tmp_path: Path) -> None:
    timings = TimingCaches(tmp_path)
    assert timings.read(KEY) is None
    timings.keep(KEY, b"one")
    timings.keep(KEY, b"two")
    assert timings.read(other_key(graph="x")) == b"two"
    for change in ({"driver": "12.6"}, {"targets": "sm87"}, {"tensorrt": "tensorrt 10.3.0"}):
        assert timings.read(other_key(**change)) is None
    assert len(list((tmp_path / "timings").iterdir())) == 1
    TimingCaches(Path("/sys/edged")).keep(KEY, b"nowhere")
