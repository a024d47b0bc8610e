"""What boards say, what they leave out, and what is no board."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest
from fixtures.boards import orin, write
from hypothesis import given, settings
from hypothesis import strategies as st

from edged import jetson
from edged.jetson import Board, read_board

EVERYTHING = orin()


@pytest.mark.parametrize(("memory", "third"), [(64, "MODE_50W"), (32, "MODE_40W")])
@pytest.mark.parametrize(("jetpack", "l4t"), [("6.2", "36.4.3"), ("7.2", "39.2.0")])
def test_an_orin_says_what_it_is(tmp_path, memory, third, jetpack, l4t):
    board = read_board(write(tmp_path, orin(memory=memory, jetpack=jetpack, mode=3)))
    assert board.model == "NVIDIA Jetson AGX Orin Developer Kit"
    assert board.module == f"AGX Orin {memory}GB"
    assert (board.l4t, board.jetpack) == (l4t, jetpack)
    assert board.power_mode == third
    assert board.temperatures == {"cpu": 44, "gpu": 41, "soc0": 39, "tj": 45, "hot-surface-alert": 42}
    assert board.thermal_margin == pytest.approx(54)
    assert board.clocks == {
        "gpu": 1_300_500_000,
        "gpu_min": 306_000_000,
        "gpu_max": 1_300_500_000,
        "emc_cap": 0,
        "cpu0": 729_600_000,
    }
    assert board.gpu_load == pytest.approx(0.32)
    assert board.rails == {
        "VDD_GPU_SOC": 4.385,
        "VDD_CPU_CV": 1.193,
        "VIN_SYS_5V0": 5.551,
        "VDDQ_VDD2_1V8AO": 0.9,
    }
    assert board.throttle_events == {
        "under_voltage": 0,
        "average_over_current": 0,
        "peak_over_current": 0,
    }
    assert board.memory_available == board.memory_total // 2
    assert board.faults == ()


def test_a_throttled_board_has_no_margin_left(tmp_path):
    board = read_board(write(tmp_path, orin(celsius=99.5, events=(0, 2, 41), gpu_hertz=408_000_000)))
    assert board.thermal_margin == pytest.approx(-0.5)
    assert board.throttle_events["peak_over_current"] == 41
    assert board.clocks["gpu"] == 408_000_000


def test_the_module_is_known_by_its_memory_where_its_part_is_not(tmp_path):
    for memory in (64, 32):
        files = orin(memory=memory)
        files["proc/device-tree/compatible"] = "vendor,carrier\0nvidia,tegra234\0"
        root = tmp_path / str(memory)
        assert read_board(write(root, files)).module == f"AGX Orin {memory}GB"
        files["etc/nv_boot_control.conf"] = (
            "TNSPEC 3767-300-0001-M.1-1-1-p3767-0000-super\nCOMPATIBLE_SPEC p3767-0000"
        )
        assert read_board(write(root, files)).module == "Orin NX 16GB"


@pytest.mark.parametrize(
    ("jetpack", "changes", "words"),
    [
        ("6.2.1", {}, "NvMap refuses large allocations"),
        ("7.2", {"var/lib/nvpmodel/status": "pmode:0001"}, "a reboot may crash"),
        ("7.2", {"dev/nvgpu/igpu0/power": ""}, "firmware did not start"),
    ],
)
def test_known_faults_have_a_remedy(tmp_path, jetpack, changes, words):
    files = orin(jetpack=jetpack)
    if "dev/nvgpu/igpu0/power" in changes:
        files = {name: text for name, text in files.items() if "devfreq" not in name}
    (fault,) = read_board(write(tmp_path, files | changes)).faults
    assert words in fault.found
    assert fault.remedy


def test_what_is_no_jetson_is_none(tmp_path):
    assert read_board(tmp_path) is None
    assert read_board(tmp_path / "missing") is None
    write(
        tmp_path,
        {"proc/device-tree/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0", "proc/meminfo": "x"},
    )
    assert read_board(tmp_path) is None


@pytest.mark.parametrize("missing", sorted({name.rsplit("/", 1)[-1] for name in EVERYTHING} - {"compatible"}))
def test_every_file_may_be_missing(tmp_path, missing):
    files = {name: text for name, text in EVERYTHING.items() if not name.endswith(f"/{missing}")}
    assert isinstance(read_board(write(tmp_path, files)), Board)


def test_nothing_but_the_name_is_enough(tmp_path):
    board = read_board(write(tmp_path, {"proc/device-tree/compatible": "nvidia,tegra234\0"}))
    empty = dataclasses.replace(board, memory_total=None, memory_available=None)
    assert empty == Board()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_closed_to_this_user_are_left_out(tmp_path):
    write(tmp_path, EVERYTHING)
    for path in tmp_path.rglob("*_input"):
        path.chmod(0)
    assert read_board(tmp_path).rails == {}


garbage = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            b"",
            b"\0",
            b"-256000\n",
            b"99999999999999999999",
            b"nan",
            b"1e9",
            b"0x10",
            b"\xff\xfe",
            b"-" * 50,
            b"< >",
            b"R",
        ]
    ),
    st.text(max_size=50).map(lambda text: text.encode("utf-8", "replace")),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(EVERYTHING)), garbage, max_size=12))
def test_garbage_is_left_out_and_never_raises(changes):
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), EVERYTHING | changes)
        board = read_board(root)
        if board is not None:
            assert all(-60 < value < 200 for value in board.temperatures.values())
            assert all(isinstance(value, float) for value in board.rails.values())
            assert board.gpu_load is None or 0 <= board.gpu_load <= 1
            assert jetson.read_memory(root)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(EVERYTHING)), st.sampled_from(["folder", "link", "loop"])),
        max_size=8,
    )
)
def test_a_file_may_be_a_folder_or_a_link_to_nowhere(changes):
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), EVERYTHING)
        for name, kind in changes:
            path = root / name
            if path.is_dir() and not path.is_symlink():
                continue
            path.unlink(missing_ok=True)
            if kind == "folder":
                path.mkdir()
            else:
                path.symlink_to(path.name if kind == "loop" else "nowhere")
        read_board(root)


def test_this_machine_is_read_too():
    read_board()
