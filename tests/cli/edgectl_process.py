"""edgectl as a process: its environment, and a terminal to run it in."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

COMMAND = [sys.executable, "-m", "edged.cli"]


def clean_environment(**changes):
    """The environment without what would change edgectl's output, and with ``changes``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("EDGED_ADDRESS", "EDGED_DEBUG", "XDG_RUNTIME_DIR", "NO_COLOR", "FORCE_COLOR")
    }
    return {**kept, "PYTHONWARNINGS": "error", **changes}


class Terminal:
    """edgectl in a pseudo-terminal.

    Args:
        arguments: Its command line.
        environment: Changes of the environment.
    """

    def __init__(self, *arguments, **environment):
        self.master, slave = pty.openpty()
        self.text = ""
        self.matched = 0
        # setsid makes the terminal the controlling one, so that Ctrl-C reaches the process.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=clean_environment(**{"TERM": "xterm", **environment}),
        )
        os.close(slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self, text):
        """Press Ctrl-C at a prompt until ``text`` appears.

        Once is not enough: between printing the prompt and waiting for a key, CPython's readline takes note of a signal
        only when the next key comes.
        """
        for _ in range(30):
            self.type("\x03")
            try:
                return self.expect(text, timeout=2.0)
            except AssertionError:
                continue
        raise AssertionError(f"no {text!r} after Ctrl-C")

    def expect(self, text, timeout=120.0):
        """Read until ``text`` appears behind the last match; return what lies between, ``text`` included."""
        end = time.monotonic() + timeout
        begin = self.matched
        while text not in self.text[begin:]:
            if not select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"no {text!r} in {self.text[begin:]!r}")
            try:
                data = os.read(self.master, 4096)
            except OSError:
                raise AssertionError(f"ended without {text!r}: {self.text[begin:]!r}") from None
            self.text += data.decode(errors="replace")
        self.matched = self.text.index(text, begin) + len(text)
        return self.text[begin : self.matched]

    def end(self, timeout=60.0):
        """Read to the end; return the exit status."""
        while True:
            try:
                data = os.read(self.master, 4096)
            except OSError:
                break
            if not data:
                break
            self.text += data.decode(errors="replace")
        return self.process.wait(timeout)


def wait_idle(client):
    """The daemon runs no request and every page is free again."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        model = client.status().models[0]
        if model.running == model.waiting == 0 and model.pages_free == model.pages:
            return
        time.sleep(0.05)
    raise AssertionError(client.status())
