"""Builds into a file system that really fills: a small tmpfs in a mount namespace of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from small_models import model_folder
from tensorrt_case import tensorrt_rtx

if TYPE_CHECKING:
    from pathlib import Path

CHILD = """
import os
import subprocess
import sys
from pathlib import Path
from edged.cli.main import main

cache, model = Path(sys.argv[1]), sys.argv[2]

def leave(free):
    used = (os.statvfs(cache).f_blocks - os.statvfs(cache).f_bfree) * os.statvfs(cache).f_frsize
    subprocess.run(["mount", "-o", f"remount,size={(used + free) // 1024}k", str(cache)], check=True)

def build(dtype):
    code = main(["build", model, "--target", "sm89", "--cache", str(cache), "--dtype", dtype])
    print("code", code, flush=True)
    return code

def names():
    return sorted(str(each.relative_to(cache)) for each in cache.rglob("*") if "locks" not in each.parts)

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(cache)], check=True)
assert build("bfloat16") == 0
whole = names()
for free in (0, 4096, 65536):
    leave(free)
    assert build("float16") == 1
    assert names() == whole, names()
assert build("bfloat16") == 0  # found
assert main(["engines", "verify", "--cache", str(cache)]) == 0
leave(8 << 20)
assert build("float16") == 0
assert len(names()) == 2 * len(whole)
"""


def test_a_disk_that_fills_is_refused_with_what_to_do_and_loses_nothing(tmp_path: Path) -> None:
    tensorrt_rtx()
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1)")
    own = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives nobody a mount namespace")
    cache = tmp_path / "cache"
    cache.mkdir()
    done = subprocess.run(
        [*own, sys.executable, "-c", CHILD, str(cache), str(model_folder(tmp_path / "model"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    refusals = [line for line in done.stderr.splitlines() if "no space left" in line]
    assert len(refusals) == 3
    assert all(str(cache) in line and "edgectl engines prune" in line for line in refusals)
    assert "for the engine's" in refusals[-1]
    assert list(cache.iterdir()) == []  # outside the namespace
