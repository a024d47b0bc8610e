"""Runs edgectl as a process of its own, and its commands in this one."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import pytest
from edgectl_process import COMMAND, clean_environment
from fixtures.forked import Ended, suits
from small_gguf import write_gguf

from edged.cli.main import main


@dataclass(frozen=True)
class Result:
    """What one process left: exit status, both streams as text."""

    code: int
    out: str
    err: str


def _started(arguments, *, stdin, timeout, cwd, environment):
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        timeout=timeout,
        cwd=cwd,
        env=environment,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def edgectl(tmp_path, fork_server):
    """``edgectl(*arguments, stdin=bytes, **environment)`` runs it in an empty folder."""

    def run(*arguments, stdin=b"", timeout=60, cwd=None, **environment):
        # XDG_RUNTIME_DIR keeps tests away from a daemon that this user may be running.
        done = (fork_server.run if suits(environment) else _started)(
            [str(each) for each in arguments],
            stdin=stdin,
            timeout=timeout,
            cwd=cwd or tmp_path,
            environment=clean_environment(**{"XDG_RUNTIME_DIR": str(tmp_path), **environment}),
        )
        result = Result(done.code, done.out.decode(), done.err.decode())
        assert "Traceback" not in result.err, result.err
        assert "\x1b" not in result.out + result.err
        return result

    return run


@pytest.fixture
def edgectl_here(tmp_path, monkeypatch, capsys):
    """As ``edgectl``, without a process of its own, for tables of many cases."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # Set first, so that what edgectl itself puts there is taken back after the test.
    monkeypatch.setenv("EDGED_ADDRESS", "")

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return Result(code, output.out, output.err)

    return run


@pytest.fixture
def small_gguf(tmp_path):
    """A GGUF file of a few kilobytes."""
    return write_gguf(tmp_path / "small.gguf")
