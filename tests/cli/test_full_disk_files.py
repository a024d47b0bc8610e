"""What edgectl writes is there as a whole or not at all: a full disk leaves no empty file, and what was there before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from edgectl_process import COMMAND, clean_environment
from fixtures.daemon import NO_FILE_GROWS

from edged.cli.exit_codes import ExitCode
from edged.whole_file import whole_file, write_whole


@pytest.fixture
def on_full_disk(tmp_path):
    def run(*arguments):
        return subprocess.run(
            [*NO_FILE_GROWS, *COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env=clean_environment(XDG_RUNTIME_DIR=str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def commands(tmp_path, daemon, demo_model):
    """Command lines that write a file, by its name."""
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a robot.\n" * 40)
    load = ("--requests", 1, "--prompt-tokens", 4, "--output-tokens", 2, "--address", daemon.address)
    return {
        "token": ("token", "robot", "-o", tmp_path / "token"),
        "bundle.tar.gz": ("support-bundle", "-o", tmp_path / "bundle.tar.gz", "--address", daemon.address),
        "figures.json": ("bench", *load, "--json", tmp_path / "figures.json"),
        "map.json": ("draft", "rank", demo_model, tmp_path / "map.json", "--text", text, "--size", 16),
    }


@pytest.mark.parametrize("name", ["token", "bundle.tar.gz", "figures.json", "map.json"])
@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(on_full_disk, commands, tmp_path, name, before):
    if before is not None:
        (tmp_path / name).write_text(before)
    present = sorted(tmp_path.iterdir())
    done = on_full_disk(*commands[name])
    assert done.returncode == ExitCode.FILE, done.stderr
    assert str(tmp_path / name) in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == present
    if before is not None:
        assert (tmp_path / name).read_text() == before
    if name == "token":
        assert done.stdout == "", "no line lets in a token that nobody has"


def test_a_plot_too(tmp_path):
    pytest.importorskip("matplotlib")
    script = (
        "import resource, pathlib\n"
        "from edged.cli.bench_plot import draw, load_pyplot\n"
        "load_pyplot()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "draw([], 'title', pathlib.Path('plot.svg'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "OSError: [Errno 27] File too large: 'plot.svg'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_the_service_too(on_full_disk, tmp_path):
    root = tmp_path / "root"
    unit = root / "etc/systemd/system/edged.service"
    done = on_full_disk("service", "install", "--root", root, "--hardware", "cpu")
    assert done.returncode == ExitCode.FILE, done.stderr
    assert [path for path in root.rglob("*") if path.is_file()] == []
    assert not unit.exists()


def test_a_whole_file_has_its_rights_from_its_first_byte_on_and_keeps_those_that_were_there(tmp_path):
    path = tmp_path / "secret"
    with whole_file(path, 0o600) as file:
        (part,) = tmp_path.iterdir()
        assert part.stat().st_mode & 0o777 == 0o600
        assert not path.exists()
        file.write(b"1")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    write_whole(path, "2")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("2", 0o640)
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", "3")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_a_block_that_fails_or_is_interrupted_leaves_nothing(tmp_path):
    path = tmp_path / "file"

    def write(fault):
        with whole_file(path) as file:
            file.write(b"half")
            raise fault

    for fault in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(fault)):
            write(fault)
        assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_written_itself_and_a_link_stays(tmp_path):
    write_whole(tmp_path / ".." / tmp_path.name / "plain", "1")
    link = tmp_path / "link"
    link.symlink_to("plain")
    write_whole(link, "2")
    assert link.is_symlink()
    assert (tmp_path / "plain").read_text() == "2"
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "3")
    reader.join(30)
    assert got == ["3"]
    write_whole(tmp_path.__class__("/dev/null"), "4")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_whole(tmp_path.__class__("/dev/full"), "5" * 100_000)
    assert caught.value.filename == "/dev/full"
    with pytest.raises(OSError, match="No such file or directory") as caught:
        write_whole(tmp_path / "nowhere" / "file", "6")
    assert caught.value.filename == str(tmp_path / "nowhere" / "file")


def test_a_name_may_be_as_long_as_the_file_system_has_it(tmp_path):
    path = tmp_path / ("ü" * 127)
    write_whole(path, "1")
    assert path.read_text() == "1"
