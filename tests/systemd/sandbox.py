"""Runs a command under what a process can put on itself of the unit's sandbox, where no systemd is: a machine with a GPU.

``sandbox.py --list`` prints the system calls that the unit allows, as systemd and this machine's headers name them;
``sandbox.py CALLS COMMAND...`` reads that list and runs the command, for x86-64, with

- the filter of system calls (SystemCallFilter, SystemCallErrorNumber, SystemCallArchitectures), RestrictAddressFamilies,
  RestrictNamespaces, RestrictRealtime, LockPersonality and RestrictSUIDSGID as one BPF program;
- no capabilities, no new privileges, no core file, UMask, and a user of its own (65534) without groups, where it runs as root;
- a file system that is read-only but for /dev, /proc, /tmp and $OUT (ProtectSystem=strict), where it may mount; it says so where not.

DevicePolicy, the control group and the network's filter are the manager's and are not tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path

UNIT = Path(__file__).resolve().parents[2] / "deploy/systemd/edged.service"
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
X86_64 = 0xC000003E
LOAD, EQUAL, ANY_BIT, RETURN, AND = 0x20, 0x15, 0x45, 0x06, 0x54
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE = 0, 4
NAMESPACES = 0x7E020080
"""CLONE_NEW* of clone, unshare and setns: time, cgroup, uts, ipc, user, pid, net and mounts."""
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
_libc = ctypes.CDLL(None, use_errno=True)


def values(key: str) -> list[str]:
    """The unit's lines of one key."""
    return re.findall(rf"(?m)^{key}=(.*)$", UNIT.read_text())


def expand(name: str) -> set[str]:
    """The system calls of a set of systemd's, or the one of that name."""
    if not name.startswith("@"):
        return {name}
    said = subprocess.run(
        ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True
    )
    words = [line.strip() for line in said.stdout.splitlines() if line.startswith("    ") and "#" not in line]
    return set().union(*map(expand, words))


def allowed() -> dict[str, int]:
    """Name → number of what the unit allows: its lines one after another, as systemd reads them."""
    names: set[str] = set()
    for line in values("SystemCallFilter"):
        listed = set().union(*map(expand, line.removeprefix("~").split()))
        names = names - listed if line.startswith("~") else names | listed
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text()))
    return {name: int(numbers[name]) for name in sorted(names) if name in numbers}


def program(calls: dict[str, int]) -> bytes:
    """The filters as one BPF program (seccomp(2))."""
    steps: list[tuple[int, int, int, int]] = []

    def load(offset: int) -> None:
        steps.append((LOAD, 0, 0, offset))

    def refuse_where(code: int, value: int, *, otherwise: bool = False, error: int = errno.EPERM) -> None:
        steps.append((code, *((1, 0) if otherwise else (0, 1)), value))
        steps.append((RETURN, 0, 0, REFUSE | error))

    def argument(call: str, index: int, *checks: tuple[int, int, int]) -> None:
        """Refuse the call where one of ``checks`` (code, value, error) holds of its argument."""
        load(NUMBER)
        steps.append((EQUAL, 0, 1 + 2 * len(checks), calls[call]))
        load(16 + 8 * index)
        for code, value, error in checks:
            refuse_where(code, value, error=error)

    load(ARCHITECTURE)
    refuse_where(EQUAL, X86_64, otherwise=True)
    for call, index in (("clone", 0), ("unshare", 0), ("setns", 1)):
        if call in calls:
            argument(call, index, (ANY_BIT, NAMESPACES, errno.EPERM))
    load(NUMBER)
    refuse_where(EQUAL, calls["clone3"], error=errno.ENOSYS)  # its flags lie in memory, which no filter reads
    wanted = [FAMILIES[name] for name in values("RestrictAddressFamilies")[0].split()]
    argument(
        "socket", 0, *((EQUAL, family, errno.EAFNOSUPPORT) for family in range(46) if family not in wanted)
    )
    argument("sched_setscheduler", 1, *((EQUAL, policy, errno.EPERM) for policy in (1, 2, 6)))
    argument("personality", 0, *((ANY_BIT, 1 << bit, errno.EPERM) for bit in range(31)))
    for call, index in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2)):
        argument(call, index, (ANY_BIT, 0o6000, errno.EPERM))
    load(NUMBER)
    for number in calls.values():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    steps.append((RETURN, 0, 0, REFUSE | errno.EPERM))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def call(name: str, *arguments: object) -> None:
    """A function of the C library that returns 0."""
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def make_read_only(keep: list[str]) -> None:
    """A private copy of the mounts in which nothing but ``keep`` can be written."""
    call("unshare", 0x20000)
    call("mount", None, b"/", None, 0x4000 | 0x40000, None)  # private, all of them
    for place in keep:
        call("mount", place.encode(), place.encode(), None, 0x1000 | 0x4000, None)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = line.split()[4]
        if not any(place == each or place.startswith(f"{each}/") for each in keep):
            with contextlib.suppress(OSError):  # what is mounted in a way that nobody may change
                call("mount", None, place.encode(), None, 0x20 | 0x1000 | 0x1, None)


def enter(calls: dict[str, int]) -> None:
    """Put on this process what it cannot take off again."""
    root = os.geteuid() == 0
    if root:
        try:
            make_read_only(["/dev", "/proc", "/tmp", *filter(None, [os.environ.get("OUT")])])
        except OSError as error:
            sys.stderr.write(f"sandbox: the file system stays writable ({error})\n")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(int(values("UMask")[0], 8))
    for number in range(64):
        _libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP
    if root:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    code = program(calls)
    buffer = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    call("prctl", 22, 2, ctypes.create_string_buffer(filters, len(filters)), 0, 0)  # PR_SET_SECCOMP


def main() -> None:
    """Run the program."""
    if sys.argv[1:] == ["--list"]:
        sys.stdout.write(json.dumps(allowed()) + "\n")
        return
    enter(json.loads(Path(sys.argv[1]).read_text()))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
