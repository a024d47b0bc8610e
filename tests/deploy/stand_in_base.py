"""Makes a stand-in for a base image out of a small root of its release (build_containers.sh).

``stand_in_base.py FILE ROOT WORK``: FILE is the container file, ROOT the root that becomes its base, WORK keeps what is downloaded and
takes the build context ``apt``. CUDA's headers are the real ones, of PyPI's packages; nothing of it can run a kernel.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

CUDA = {
    "12": ["nvidia-cuda-runtime-cu12==12.6.*", "nvidia-curand-cu12==10.3.7.*", "nvidia-cuda-nvcc-cu12==12.6.*",
           "nvidia-cuda-profiler-api-cu12==12.6.*"],
    "13": ["nvidia-cuda-runtime==13.0.*", "nvidia-curand==10.4.*", "nvidia-cuda-crt==13.0.*", "nvidia-cuda-nvcc==13.0.*",
           "nvidia-cuda-profiler-api==13.0.*"],
}  # fmt: skip
BOARD = "opt/board"
"""Where a stand-in has what comes from NVIDIA's servers."""
LIST = f"deb [trusted=yes] file:/{BOARD} ./\n"


def download(requirement: str, root: Path, wheels: Path) -> Path:
    """The wheel of a requirement for a root's processor, from the package index or from what an earlier run has left."""
    machine = {62: "x86_64", 183: "aarch64"}[(root / "bin/ls").read_bytes()[18]]  # of its ELF header
    folder = wheels / machine / requirement.replace("*", "x")
    if not any(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        if machine != platform.machine():
            command += ["--platform", f"manylinux2014_{machine}"]
        subprocess.run([*command, "-d", folder, requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def put_cuda(root: Path, release: str, wheels: Path) -> None:
    """Headers, nvcc and libraries to link with, where a toolkit of that release has them."""
    home = root / f"usr/local/cuda-{release}"
    for requirement in CUDA[release.partition(".")[0]]:
        with zipfile.ZipFile(download(requirement, root, wheels)) as wheel:
            for name in wheel.namelist():
                parts = Path(name).parts
                place = next(
                    (parts[index:] for index, part in enumerate(parts) if part in ("include", "lib", "bin")),
                    (),
                )
                if parts[0] == "nvidia" and len(place) > 1 and not name.endswith("/"):
                    target = home.joinpath("lib64" if place[0] == "lib" else place[0], *place[1:])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(wheel.read(name))
                    target.chmod(0o755 if place[0] == "bin" else 0o644)
    for library in (home / "lib64").glob("lib*.so.*"):
        plain = library.with_name(library.name.partition(".so")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    # What a toolkit has to link with where no driver is: any library does, it is never loaded.
    (home / "lib64/stubs").mkdir()
    (home / "lib64/stubs/libcuda.so").symlink_to("../libcurand.so")
    # PyCUDA finds the toolkit by the folder of its compiler.
    (home / "bin/nvcc").write_text("#!/bin/sh\necho 'a stand-in of nvcc' >&2\nexit 1\n")
    (home / "bin/nvcc").chmod(0o755)
    (root / "usr/local/cuda").symlink_to(home.name)
    # Drivers of another release, as in NVIDIA's images; the container file for JetPack 7 takes them away.
    (home / "compat").mkdir()
    (home / "compat/libcuda.so.1").write_text("no library\n")


def put_tensorrt(root: Path) -> None:
    """A source of packages with python3-libnvinfer, which is a module that says so and no more."""
    tree = root / "tmp/python3-libnvinfer"
    module = tree / "usr/lib/python3/dist-packages/tensorrt/__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text('__version__ = "10.3.0"\n')
    control = "Package: python3-libnvinfer\nVersion: 10.3.0-1\nArchitecture: all\nMaintainer: edged\nDescription: a stand-in\n"
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(control)
    board = root / BOARD
    board.mkdir(parents=True, exist_ok=True)
    package = board / "python3-libnvinfer.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "--build", tree, package], check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(tree)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    size = package.stat().st_size
    (board / "Packages").write_text(f"{control}Filename: ./{package.name}\nSize: {size}\nSHA256: {digest}\n")


def put_wheels(root: Path, wheels: Path) -> str:
    """Torch as the tests have it and a wheel that says it is tensorrt; return the settings of pip that prefer them."""
    board = root / BOARD
    board.mkdir(parents=True, exist_ok=True)
    torch = f"torch=={version('torch')}"
    shutil.copy2(download(torch, root, wheels), board)
    info = "tensorrt-10.3+standin.dist-info"
    files = {
        "tensorrt/__init__.py": '__version__ = "10.3"\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tensorrt\nVersion: 10.3+standin\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: edged\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(board / "tensorrt-10.3+standin-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    (board / "constraints.txt").write_text(f"{torch}\ntensorrt==10.3+standin\n")
    return f"find-links = /{BOARD}\nconstraint = /{BOARD}/constraints.txt\n"


def main() -> None:
    """Run the program."""
    file, root, work = map(Path, sys.argv[1:])
    base = file.read_text().partition("\nFROM ")[2].split()[0]
    # This machine's own authorities, too.
    shutil.copyfile("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
    settings = "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n"
    lists = root / "etc/apt/sources.list.d"
    wheels = work / "wheels"
    if "l4t-jetpack" in base:
        put_cuda(root, "12.6", wheels)
        put_tensorrt(root)
        (lists / "nvidia-l4t-apt-source.list").write_text(LIST)
    elif "nvidia-l4t-apt-source" in file.read_text():
        put_cuda(root, "13.2", wheels)
        put_tensorrt(root)
        # The image's own source, of servers' packages; the container file takes it away.
        (lists / "cuda-ubuntu2404-sbsa.list").write_text("deb http://127.0.0.1:9/cuda ./\n")
        context = work / "apt"
        for name, text in (
            ("sources.list.d/nvidia-l4t-apt-source.list", LIST),
            ("trusted.gpg.d/jetson-ota-public.asc", ""),
        ):
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            (context / name).write_text(text)
    else:
        put_cuda(root, "13.0", wheels)
        settings += put_wheels(root, wheels)
    (root / "etc/pip.conf").write_text(settings)


if __name__ == "__main__":
    main()
