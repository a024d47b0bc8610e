"""Builds the Debian package out of the virtual environment that the tests ran with.

``python deploy/deb/build.py [--output dist] [--without torch]`` copies the very packages that are installed, so what is
shipped is what was tested, and needs no network. The package's interpreter is the distribution's: the environment has to
be of the same minor version as ``--python`` (compiled modules and JetPack's ``tensorrt`` are bound to it).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PREFIX = Path("opt/edged")
SYSTEMD = ROOT / "deploy" / "systemd"


def closure(name: str, leave_out: set[str]) -> dict[str, importlib.metadata.Distribution]:
    """Every distribution that ``name`` needs to run, itself not among them, by normalized name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        distribution = importlib.metadata.distribution(item[0])
        if item[0] != name:
            found[item[0]] = distribution
        for line in distribution.requires or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in (*item[1], "")]
            if requirement.marker is not None and not any(map(requirement.marker.evaluate, environments)):
                continue
            needed = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if needed not in leave_out:
                waiting.append((needed, frozenset(requirement.extras)))
    return found


def copy_distribution(distribution: importlib.metadata.Distribution, target: Path) -> None:
    """Copy a distribution's files from one site-packages to another; its scripts stay behind.

    Compiled modules come along: the service may not write any, and would compile everything at each start.
    """
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or not source.is_file():
            continue
        place = target / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)  # with the time: a .pyc is believed only beside a source of its time
        place.chmod(0o644)


def copy_edged(target: Path) -> None:
    """Copy edged from the source tree, with its metadata."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for package in ("edged", "plugins_trt"):
        shutil.copytree(ROOT / package, target / package, ignore=ignore)
    distribution = importlib.metadata.distribution("edged")
    folder = target / f"edged-{distribution.version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(distribution.read_text("METADATA") or "", "utf-8")
    (folder / "entry_points.txt").write_text(distribution.read_text("entry_points.txt") or "", "utf-8")
    (folder / "INSTALLER").write_text("dpkg\n", "utf-8")


def make_environment(stage: Path, python: Path, version: str) -> Path:
    """Lay out a virtual environment of the distribution's interpreter; return its site-packages."""
    home = stage / PREFIX
    (home / "bin").mkdir(parents=True)
    for link, target in (("python3", python), ("python", Path("python3"))):
        (home / "bin" / link).symlink_to(target)
    # The board's own packages (tensorrt of JetPack) are seen behind ours.
    (home / "pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = true\nversion = {version}\n", "utf-8"
    )
    for script, module in (("edged", "edged.daemon"), ("edgectl", "edged.cli.main")):
        program = home / "bin" / script
        program.write_text(
            f"#!/{PREFIX}/bin/python3\nimport sys\nfrom {module} import main\nsys.exit(main())\n", "utf-8"
        )
        program.chmod(0o755)
        command = stage / "usr/bin" / script
        command.parent.mkdir(parents=True, exist_ok=True)
        command.symlink_to(f"/{PREFIX}/bin/{script}")
    packages = home / "lib" / f"python{version}" / "site-packages"
    packages.mkdir(parents=True)
    return packages


def put(stage: Path, place: str, source: Path, mode: int = 0o644) -> None:
    """Copy one file into the package."""
    target = stage / place
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def checksums(stage: Path) -> Iterator[str]:
    """Lines for ``dpkg --verify``: a digest of every file but the configuration, which dpkg keeps itself."""
    for path in stage.rglob("*"):
        place = path.relative_to(stage)
        if path.is_file() and not path.is_symlink() and place.parts[0] not in ("DEBIAN", "etc"):
            with path.open("rb") as file:
                digest = hashlib.md5(usedforsecurity=False)
                while piece := file.read(2**20):
                    digest.update(piece)
            yield f"{digest.hexdigest()}  {place}\n"


def write_control(
    stage: Path, version: str, python_version: str, architecture: str, *, with_torch: bool
) -> None:
    """The package's description and its scripts."""
    size = sum(path.lstat().st_size for path in stage.rglob("*") if path.is_file() and not path.is_symlink())
    major, minor = map(int, python_version.split("."))
    engine = "the torch executor on the CPU and the GPU" if with_torch else "no torch: the TensorRT executor"
    control = f"""Package: edged
Version: {version}
Architecture: {architecture}
Maintainer: edged maintainers <edged@localhost>
Installed-Size: {size // 1024}
Depends: python3 (>= {major}.{minor}), python3 (<< {major}.{minor + 1}), systemd (>= 249), libgomp1
Recommends: python3-libnvinfer
Section: net
Priority: optional
Description: daemon that serves language models over gRPC inside a static memory budget
 The service edged, its client edgectl and everything they need in /opt/edged; this build has
 {engine}.
"""
    debian = stage / "DEBIAN"
    debian.mkdir()
    (debian / "control").write_text(control, "utf-8")
    (debian / "conffiles").write_text("/etc/edged/edged.yaml\n", "utf-8")
    (debian / "md5sums").write_text("".join(sorted(checksums(stage))), "utf-8")
    for name in ("postinst", "prerm", "postrm"):
        put(stage, f"DEBIAN/{name}", ROOT / "deploy" / "deb" / name, 0o755)


def build(output: Path, python: Path, leave_out: set[str], compression: str) -> Path:
    """Build the package; return its file."""
    version = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    ours = "{}.{}".format(*sys.version_info[:2])
    if version != ours:
        raise SystemExit(
            f"{python} is CPython {version} and the environment is of {ours}: make the environment with the "
            f"distribution's interpreter (make clean install PYTHON={python}) or name one of {ours} with --python"
        )
    release = importlib.metadata.version("edged")
    stage = output / "deb-root"
    shutil.rmtree(stage, ignore_errors=True)
    packages = make_environment(stage, python, version)
    for distribution in closure("edged", leave_out).values():
        copy_distribution(distribution, packages)
    copy_edged(packages)
    subprocess.run(
        [python, "-m", "compileall", "-q", "-j", "0", "-s", stage, "-p", "/", packages / "edged"], check=True
    )
    put(stage, "usr/lib/systemd/system/edged.service", SYSTEMD / "edged.service")
    put(stage, "usr/lib/sysusers.d/edged.conf", SYSTEMD / "edged.sysusers")
    put(stage, "etc/edged/edged.yaml", SYSTEMD / "edged.yaml")
    for name in ("edged.service", "edged.sysusers", "edged.yaml"):
        put(stage, f"{PREFIX}/share/edged/systemd/{name}", SYSTEMD / name)
    for drop_in in sorted((SYSTEMD / "drop-ins").glob("*.conf")):
        put(stage, f"{PREFIX}/share/edged/systemd/drop-ins/{drop_in.name}", drop_in)
    put(stage, "usr/share/doc/edged/operations.md", ROOT / "docs" / "operations.md")
    put(stage, "usr/share/doc/edged/copyright", ROOT / "LICENSE")
    changelog = stage / "usr/share/doc/edged/changelog.gz"
    changelog.write_bytes(gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), mtime=0))
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True
    ).stdout.strip()
    write_control(stage, release, version, architecture, with_torch="torch" not in leave_out)
    for folder, _, _ in os.walk(stage):
        Path(folder).chmod(0o755)
    package = output / f"edged_{release}_py{version}_{architecture}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", f"-Z{compression}", "--build", stage, package],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    shutil.rmtree(stage)
    return package


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", type=Path, default=Path("/usr/bin/python3"))
    parser.add_argument("--without", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--compression", default="zstd", choices=("zstd", "xz", "gzip", "none"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    package = build(options.output, options.python, set(options.without), options.compression)
    sys.stdout.write(f"{package} ({package.stat().st_size / 2**20:.0f} MiB)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
