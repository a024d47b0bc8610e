"""Lets the ONNX parser of TensorRT-RTX find its library by the short name that its wheel leaves out.

The parser opens ``libtensorrt_rtx.so`` the first time it meets a plugin; the wheel ships ``libtensorrt_rtx.so.1`` alone,
and the process aborts without a word. The parser looks in the folder it was itself opened from, so it is opened through
a folder of our own that holds links to the wheel's two libraries and to the missing name. Site-packages is not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import stat
import tempfile
from pathlib import Path

LIBRARIES = "tensorrt_rtx_libs"
SHORT = "libtensorrt_rtx.so"
CORE = "libtensorrt_rtx.so.1"
PARSER = "libtensorrt_onnxparser_rtx.so.1"


class ShortNameError(RuntimeError):
    """The short name is missing and can no longer be given."""


def ensure_short_name() -> Path | None:
    """Open the two libraries so that the short name is found; call it before ``tensorrt_rtx`` is imported.

    Returns:
        The folder of links, or None where none is needed: the libraries come from elsewhere, or bring the name.

    Raises:
        ShortNameError: The parser is already open without the name beside it.
        OSError: The folder cannot be written, or a library cannot be opened.
    """
    wheel = _wheel_folder()
    if wheel is None or (wheel / SHORT).exists():
        return None
    # Libraries are told apart by file, not by path: were the parser open already, opening it again would not help.
    if _opened(PARSER):
        raise ShortNameError(
            "tensorrt_rtx was imported before plugins_trt could repair it, and a parser opened that way aborts the "
            "process at the first plugin: import tensorrt_rtx through plugins_trt.tensorrt.adapter.load() alone"
        )
    folder = _folder(wheel)
    _link(folder, wheel)
    ctypes.CDLL(str(folder / CORE), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / PARSER), mode=ctypes.RTLD_GLOBAL)
    return folder


def _wheel_folder() -> Path | None:
    """Where the wheel has its libraries, found without running its ``__init__``, which would open them."""
    spec = importlib.util.find_spec(LIBRARIES)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place).resolve()
        if (folder / CORE).is_file() and (folder / PARSER).is_file():
            return folder
    return None


def _opened(library: str) -> bool:
    """Whether this process has mapped a library of that name (Linux)."""
    try:
        return library in Path("/proc/self/maps").read_text("utf-8", "replace")
    except OSError:
        return False


def _folder(wheel: Path) -> Path:
    """A folder that only this user can write, the same for every process that uses this wheel."""
    inode = (wheel / CORE).stat()
    name = f"edged-tensorrt-rtx-{os.getuid()}-{inode.st_dev:x}-{inode.st_ino:x}"
    folder = Path(tempfile.gettempdir()) / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    # Another user took the name: what lies there must not be opened as a library.
    return Path(tempfile.mkdtemp(prefix=name + "-"))


def _link(folder: Path, wheel: Path) -> None:
    """Make the three links, each at once: another process may be reading them."""
    for name, target in ((SHORT, wheel / CORE), (CORE, wheel / CORE), (PARSER, wheel / PARSER)):
        link = folder / name
        with contextlib.suppress(OSError):
            if link.readlink() == target:
                continue
        fresh = folder / f".{name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(link)
