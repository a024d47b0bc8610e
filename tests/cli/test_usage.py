"""What a newcomer mistypes: one line on standard error, the exit status of the reference, no traceback."""

from __future__ import annotations

import re
import subprocess

import pytest
from edgectl_process import COMMAND

from edged import __version__
from edged.cli.exit_codes import EPILOG, ExitCode, exit_code_of
from edged.cli.main import COMMANDS
from edged.errors import (
    CancelledError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    LedgerError,
    MessageTooLargeError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnreachableError,
    UnsupportedError,
)

MISTAKES = [
    (["stats"], "there is no command 'stats'; did you mean status?"),
    (["geneate", "x"], "there is no command 'geneate'; did you mean generate?"),
    (["frobnicate"], "there is no command 'frobnicate'; the commands are status, generate"),
    (["serve"], "edgectl does not start the daemon; run: edged --config FILE"),
    (["stop"], "send it SIGTERM"),
    (["ask", "why"], "did you mean generate --chat?"),
    (["ps"], "did you mean status?"),
    (["--adress", "x", "status"], "--adress"),
    (["status", "--adress", "x"], "--address"),
    (["status", "--address"], "--address"),
    (["status", "--address", ""], "the address is empty; write unix:PATH or HOST:PORT"),
    (["--address", "", "status"], "the address is empty; write unix:PATH or HOST:PORT"),
    (["status", "--address", "localhost"], "'localhost' is neither unix:PATH nor HOST:PORT"),
    (["status", "--address", "localhost:port"], "'localhost:port' is neither unix:PATH nor HOST:PORT"),
    (["status", "-a", "http://127.0.0.1:50051"], "edged speaks gRPC, not HTTP"),
    (["status", "--address", "127.0.0.1:99999"], "neither unix:PATH nor HOST:PORT"),
    (["status", "extra"], "extra"),
    (
        ["status", "--wait", "soon"],
        "'soon' is no duration; write a duration with a unit out of ms, s, min, h",
    ),
    (["status", "--wait", "-1"], "is no duration"),
    (["status", "--timeout", "nan"], "is no duration"),
    (["generate"], "missing argument 'PROMPT'"),
    (["generate", "two", "prompts"], "prompts"),
    (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
    (["generate", "x", "--max-tokens", "1.5"], "--max-tokens"),
    (["generate", "x", "--temperature", "hot"], "--temperature"),
    (["generate", "x", "--temprature", "1"], "--temperature"),
    (["generate", "x", "--stop"], "--stop"),
    (["chat", "hello"], "hello"),
    (["tokenize"], "missing argument 'TEXT'"),
    (["import"], "found 0 paths; give SOURCE, or SOURCE and DEST"),
    (["import", "a.gguf", "b", "c"], "found 3 paths; give SOURCE, or SOURCE and DEST"),
    (["import", "--demo", "a.gguf", "b"], "found 2 paths; --demo takes DEST alone, or nothing"),
    (["import", "folder", "a.gguf"], "give the source first, then the folder to make"),
    (["import", "a.gguf", "b", "--dtype", "q4_0"], "'q4_0' is not one of float32, bfloat16, float16"),
    (["pull"], "missing argument 'REPO[@REV]'"),
    (["pull", "a/b/c"], "'a/b/c' is no repository; write OWNER/NAME or OWNER/NAME@REVISION"),
    (["pull", "../secret"], "is no repository"),
    (["pull", "owner/name@"], "is no repository"),
    (["pull", "owner/name", "--dtype", "q4_0"], "'q4_0' is not one of float32, bfloat16, float16"),
    (["models", "show"], "'show' is not one of list, inspect, remove, verify, reference"),
    (["models", "inspect"], "inspect needs a MODEL"),
    (["models", "list", "x"], "list takes no MODEL; use inspect"),
    (["models", "inspect", "x", "--yes"], "goes with remove"),
    (["download", "x"], "did you mean pull?"),
    (["import", "a.gguf", "b", "--dtype", "q4_0"], "'q4_0' is not one of float32, bfloat16, float16"),
    (["plan"], "--config FILE"),
    (["doctor", "edged.yaml"], "edged.yaml"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_mistakes(edgectl_here, arguments, message):
    result = edgectl_here(*arguments)
    assert result.code == ExitCode.USAGE
    assert result.out == ""
    assert message in result.err
    assert result.err.count("\n") == 1
    assert result.err.startswith("edgectl: ")
    assert re.search(r"; see edgectl( \w+)? --help\n$", result.err)


def test_a_mistake_as_a_process(edgectl):
    result = edgectl("stats")
    assert result.code == ExitCode.USAGE
    assert result.err == "edgectl: there is no command 'stats'; did you mean status?; see edgectl --help\n"


def test_help_and_version(edgectl, edgectl_here):
    for arguments in ([], ["--help"], ["-h"]):
        result = edgectl_here(*arguments)
        assert result.code == 0
        assert all(re.search(rf"^  {name} +\S", result.out, re.MULTILINE) for name in COMMANDS)
        assert " ".join(EPILOG.split()) in " ".join(result.out.split())
    assert edgectl("--version").out == edgectl_here("-V").out == f"edgectl {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(edgectl_here, name):
    result = edgectl_here(name, "--help")
    assert result.code == 0
    assert f"Usage: edgectl {name}" in result.out
    if name in ("status", "generate", "chat", "tokenize", "doctor"):
        assert "--address" in result.out
        assert "EDGED_ADDRESS" in result.out


def test_help_into_a_closed_pipe():
    """``edgectl --help | true`` ends quietly."""
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"set -o pipefail; {' '.join(COMMAND)} generate --help | (exec <&-; sleep 1)",
        ],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.PIPE_CLOSED
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnreachableError("x"), 2),
        (InvalidArgumentError("x"), 3),
        (NotFoundError("x"), 3),
        (UnsupportedError("x"), 3),
        (FailedPreconditionError("x"), 3),
        (UnavailableError("x"), 4),
        (ResourceExhaustedError("x"), 4),
        (MessageTooLargeError("x"), 3),
        (DeadlineError("x"), 4),
        (CancelledError("x"), 4),
        (InternalError("x"), 4),
        (ConfigError("x"), 5),
        (CheckpointError("x"), 5),
        (LedgerError("x"), 1),
    ],
)
def test_exit_status_of_each_error(error, code):
    assert exit_code_of(error) == code
    assert f"{code} " in EPILOG


@pytest.mark.parametrize("command", [["status"], ["generate", "x"], ["chat"], ["tokenize", "x"]])
def test_unreachable(edgectl, tmp_path, command):
    result = edgectl(*command, "--address", tmp_path / "none.sock")
    assert result.code == ExitCode.UNREACHABLE
    assert result.out == ""
    assert result.err == (
        f"edgectl: cannot reach edged at unix:{tmp_path}/none.sock: there is no such socket; "
        "start the daemon with: edged --config FILE, or name its address\n"
    )


def test_address_of_the_environment(edgectl, tmp_path):
    result = edgectl("status", EDGED_ADDRESS="127.0.0.1:1")
    assert result.code == ExitCode.UNREACHABLE
    assert "127.0.0.1:1: no daemon listens there" in result.err
    named = edgectl("status", "--address", tmp_path / "x.sock", EDGED_ADDRESS="127.0.0.1:1")
    assert f"unix:{tmp_path}/x.sock" in named.err
    before = edgectl("--address", tmp_path / "y.sock", "status", EDGED_ADDRESS="127.0.0.1:1")
    assert f"unix:{tmp_path}/y.sock" in before.err
    assert edgectl("status", EDGED_ADDRESS="nonsense").code == ExitCode.USAGE


def test_prompt_that_is_no_utf8(edgectl):
    result = edgectl("generate", "-", stdin=b"caf\xe9")
    assert result.code == ExitCode.USAGE
    assert "standard input is no UTF-8: byte 0xE9 at offset 3" in result.err


def test_a_fault_of_edgectl_is_one_line(monkeypatch, capsys):
    """In-process, because no input is known to cause one."""
    from edged.cli import main as program
    from edged.cli import status

    monkeypatch.setenv("EDGED_ADDRESS", "")

    def broken(_address):
        raise ZeroDivisionError("deliberate")

    monkeypatch.setattr(status, "connect", broken)
    assert program.main(["status"]) == ExitCode.INTERNAL
    assert capsys.readouterr().err == (
        "edgectl: a fault of edgectl itself: ZeroDivisionError: deliberate; "
        "EDGED_DEBUG=1 in the environment shows where; please report it\n"
    )


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">/dev/full", ExitCode.FILE, "edgectl: the system refused: No space left on device\n"),
        (">&-", ExitCode.DONE, ""),
        ("2>&-", ExitCode.DONE, ""),
        ("<&-", ExitCode.DONE, ""),
        (">&- 2>&- <&-", ExitCode.DONE, ""),
    ],
)
def test_streams_that_are_full_or_closed(redirection, code, message):
    shell = f"{' '.join(COMMAND)} --version {redirection}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stderr.decode() == message


def test_a_closed_standard_input_is_an_empty_prompt(tmp_path):
    shell = f"{' '.join(COMMAND)} generate - --address {tmp_path}/none.sock <&-"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=60, check=False)
    assert done.returncode == ExitCode.UNREACHABLE
