"""The choice of TensorRT and the repair of TensorRT-RTX's missing library name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tensorrt_case import fake_module

from plugins_trt.tensorrt import adapter, short_name

FOUND = """
import sys
from plugins_trt.tensorrt import adapter
try:
    print(adapter.load({name!r}).{what})
except adapter.TensorRTError as error:
    print("refused:", error)
"""


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_tensorrt_is_taken_before_tensorrt_rtx(tmp_path: Path) -> None:
    path = fake_module(tmp_path, "10.3.0")
    assert python(FOUND.format(name=None, what="name"), PYTHONPATH=path) == "tensorrt"


@pytest.mark.parametrize("version", ["10.2.9", "8.6.1", "9.0"])
def test_a_tensorrt_below_the_floor_is_refused_with_the_floor(tmp_path: Path, version: str) -> None:
    path = fake_module(tmp_path, version)
    said = python(FOUND.format(name=None, what="name"), PYTHONPATH=path)
    assert said.startswith(f"refused: tensorrt {version} is too old: edged needs 10.3 or later")


@pytest.mark.parametrize(
    ("name", "version"),
    [("tensorrt", "10.3.0"), ("tensorrt", "11.0"), ("tensorrt", "10.16.1.11"), ("tensorrt_rtx", "1.7.1.116")],
)
def test_versions_from_the_floor_on_are_taken(name: str, version: str) -> None:
    adapter.check_version(name, version)


def test_a_tensorrt_rtx_that_takes_no_plugins_is_refused() -> None:
    with pytest.raises(
        adapter.TensorRTError, match=r"tensorrt_rtx 1\.6\.0 is too old: edged needs 1\.7 or later"
    ):
        adapter.check_version("tensorrt_rtx", "1.6.0")


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(adapter.TensorRTError, match=r"'unknown', which cannot be compared with 10\.3"):
        adapter.check_version("tensorrt", "unknown")


def test_without_any_tensorrt_the_error_says_what_to_install(tmp_path: Path) -> None:
    for name in adapter.FLAVOURS:
        (tmp_path / f"{name}.py").write_text("raise ImportError('libnvinfer.so.10: not found')\n")
    said = python(FOUND.format(name=None, what="name"), PYTHONPATH=str(tmp_path))
    assert said.startswith(
        "refused: no TensorRT can be imported (tensorrt: libnvinfer.so.10: not found; tensorrt_rtx:"
    )
    assert "pip install tensorrt-rtx-cu13" in said
    assert "python3-libnvinfer" in said


def test_cuda_majors_are_read_from_package_names() -> None:
    installed = ["tensorrt_rtx_cu13", "tensorrt-rtx-cu12-libs", "tensorrt", "tensorrt_cu12_bindings", "numpy"]
    assert adapter.cuda_majors("tensorrt_rtx", installed) == {
        "tensorrt_rtx_cu13": 13,
        "tensorrt-rtx-cu12-libs": 12,
    }
    assert adapter.cuda_majors("tensorrt", installed) == {"tensorrt_cu12_bindings": 12}


def test_packages_of_two_cuda_majors_are_refused_by_name(tmp_path: Path) -> None:
    path = fake_module(tmp_path, "10.9.0")
    for package in ("tensorrt_cu12_libs", "tensorrt_cu13_bindings"):
        info = tmp_path / f"{package}-10.9.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 10.9.0\n")
    said = python(FOUND.format(name=None, what="name"), PYTHONPATH=path)
    assert "several CUDA majors" in said
    assert "tensorrt_cu12_libs (CUDA 12), tensorrt_cu13_bindings (CUDA 13)" in said


def test_parts_for_different_cuda_majors_are_refused_together() -> None:
    adapter.check_cuda({"TensorRT": 13, "PyCUDA": 13, "driver": None})
    with pytest.raises(adapter.TensorRTError, match="TensorRT for CUDA 13, PyCUDA for CUDA 12"):
        adapter.check_cuda({"TensorRT": 13, "PyCUDA": 12, "driver": None})


def repaired() -> Path:
    folder = short_name.ensure_short_name()
    assert folder is not None
    return folder


class TestShortName:
    @pytest.fixture
    def wheel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "wheel" / short_name.LIBRARIES
        folder.mkdir(parents=True)
        for name in (short_name.CORE, short_name.PARSER):
            (folder / name).write_bytes(b"no library")
        monkeypatch.setattr(short_name, "_wheel_folder", lambda: folder)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        self.loaded: list[Path] = []
        monkeypatch.setattr("ctypes.CDLL", lambda path, mode: self.loaded.append(Path(path)))
        monkeypatch.setattr(short_name, "_opened", lambda library: False)
        return folder

    def test_links_lie_in_a_private_folder_and_the_parser_is_opened_through_it(self, wheel: Path) -> None:
        before = sorted(wheel.iterdir())
        folder = repaired()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / short_name.SHORT).readlink() == wheel / short_name.CORE
        assert self.loaded == [folder / short_name.CORE, folder / short_name.PARSER]
        assert sorted(wheel.iterdir()) == before

    def test_a_second_process_takes_the_same_folder(self, wheel: Path) -> None:
        assert repaired() == repaired()

    def test_a_link_to_elsewhere_is_put_right(self, wheel: Path) -> None:
        folder = repaired()
        (folder / short_name.SHORT).unlink()
        (folder / short_name.SHORT).symlink_to("/nowhere")
        short_name.ensure_short_name()
        assert (folder / short_name.SHORT).readlink() == wheel / short_name.CORE

    def test_a_folder_that_others_can_write_is_not_trusted(self, wheel: Path) -> None:
        folder = repaired()
        folder.chmod(0o777)
        other = repaired()
        assert other != folder
        assert other.stat().st_mode & 0o777 == 0o700

    def test_a_wheel_that_brings_the_name_is_left_alone(self, wheel: Path) -> None:
        (wheel / short_name.SHORT).write_bytes(b"")
        assert short_name.ensure_short_name() is None
        assert self.loaded == []

    def test_a_parser_that_is_open_already_is_refused(
        self, wheel: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(short_name, "_opened", lambda library: True)
        with pytest.raises(short_name.ShortNameError, match="import tensorrt_rtx through"):
            short_name.ensure_short_name()


def test_tensorrt_rtx_imports_and_finds_its_short_name() -> None:
    # Found, not imported: imported here, it could not be repaired for the tests after this one.
    if importlib.util.find_spec("tensorrt_rtx_libs") is None:
        pytest.skip("TensorRT-RTX is not installed: it has no wheel for this machine")
    code = FOUND.format(name="tensorrt_rtx", what="version") + (
        "import ctypes\n"
        "from pathlib import Path\n"
        "maps = Path('/proc/self/maps').read_text()\n"
        "print(maps.count('libtensorrt_rtx.so') > 0, len({l.split()[-1] for l in maps.splitlines() if 'libtensorrt_rtx.so' in l}))\n"
    )
    version, mapped = python(code).splitlines()
    assert version.startswith("1.7.")
    assert mapped == "True 1"


def test_threads_that_load_at_once_and_a_second_try_get_the_same_bindings() -> None:
    if importlib.util.find_spec("tensorrt_rtx_libs") is None:
        pytest.skip("TensorRT-RTX is not installed: it has no wheel for this machine")
    code = """
from concurrent.futures import ThreadPoolExecutor
from plugins_trt.tensorrt import adapter
check = adapter.check_version
def too_old(*_):
    raise adapter.TensorRTError("too old")
adapter.check_version = too_old
try:
    adapter.load("tensorrt_rtx")
except adapter.TensorRTError as error:
    assert str(error) == "too old", error
adapter.check_version = check
with ThreadPoolExecutor(4) as pool:
    loaded = list(pool.map(lambda _: adapter.load("tensorrt_rtx"), range(8)))
print(len({id(each.logger) for each in loaded}))
"""
    assert python(code) == "1"
