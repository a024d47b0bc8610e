"""The stand-in for systemd's sandbox (sandbox.py) refuses what the unit refuses, and lets through what the engine needs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sandbox

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="its filter is for x86-64"),
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"),
    pytest.mark.skipif(not sandbox.HEADER.exists(), reason="needs the C library's headers"),
]
TRIES = """
import ctypes, json, os, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
def fails(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return os.strerror(error.errno)
def c(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
thread = threading.Thread(target=os.getpid); thread.start(); thread.join()
open("/tmp/sandboxed", "w").close()
print(json.dumps({
    "packet": fails(socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
    "netlink": fails(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW),
    "inet": fails(socket.socket), "unix": fails(socket.socket, socket.AF_UNIX),
    "memfd": fails(os.memfd_create, "a"), "chown": fails(os.chown, "/tmp/sandboxed", -1, -1),
    "suid": fails(os.chmod, "/tmp/sandboxed", 0o4700), "plain": fails(os.chmod, "/tmp/sandboxed", 0o700),
    "user namespace": fails(c, "unshare", 0x10000000), "mount": fails(c, "mount", b"a", b"/tmp", b"tmpfs", 0, None),
    "realtime": fails(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
    "affinity": fails(os.sched_setaffinity, 0, os.sched_getaffinity(0)),
    "swap": fails(c, "swapoff", b"/none"), "uid": os.getuid(), "usr": fails(open, "/usr/written", "w"),
    "status": open("/proc/self/status").read(),
}))
os.remove("/tmp/sandboxed")
"""


def test_what_the_unit_refuses_is_refused_and_the_rest_is_not(tmp_path):
    calls = tmp_path / "calls.json"
    program = Path(sandbox.__file__)
    calls.write_text(
        subprocess.run([sys.executable, program, "--list"], capture_output=True, check=True).stdout.decode()
    )
    listed = json.loads(calls.read_text())
    assert {"memfd_create", "chown", "sched_setaffinity", "ioctl"} <= set(listed)
    assert not {"mount", "setuid", "init_module", "bpf", "reboot", "ptrace"} & set(listed)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, program, calls, "/usr/bin/python3", "-c", TRIES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    status = dict(line.split(":\t", 1) for line in found.pop("status").splitlines() if ":\t" in line)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    denied, family = "Operation not permitted", "Address family not supported by protocol"
    assert found | {"uid": 0, "usr": ""} == {
        "packet": family, "netlink": family, "inet": None, "unix": None, "memfd": None, "chown": None, "suid": denied,
        "plain": None, "user namespace": denied, "mount": denied, "realtime": denied, "affinity": None, "swap": denied,
        "uid": 0, "usr": "",
    }  # fmt: skip
    if os.geteuid() == 0:
        assert (found["uid"], int(status["CapEff"], 16), int(status["CapBnd"], 16)) == (65534, 0, 0)
        assert found["usr"] == "Read-only file system" or "stays writable" in done.stderr
