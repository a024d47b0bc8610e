"""edgectl at a terminal: colours, the conversation, Ctrl-C, and text that must not command the terminal."""

from __future__ import annotations

import subprocess

import pytest
from edgectl_process import COMMAND, Terminal, clean_environment, wait_idle

from edged.cli.exit_codes import ExitCode
from edged.cli.terminal import visible


def test_colours_are_for_terminals(daemon, edgectl):
    with Terminal("status", "--address", daemon.address) as terminal:
        assert terminal.end() == 0
        assert "\x1b[1;32mserving" in terminal.text
    with Terminal("status", "--address", daemon.address, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
        assert "\x1b[1;32m" not in terminal.text
    assert "\x1b" not in edgectl("status", "--address", daemon.address).out


def test_control_characters_become_visible():
    assert visible("a\x1b[2J\x07b\r\x9b1mc\n\td") == "a\\x1b[2J\\x07b\\x0d\\x9b1mc\n\td"
    assert visible("日本語 🙂 é") == "日本語 🙂 é"


def test_a_conversation(daemon):
    arguments = ["chat", "--address", daemon.address, "--max-tokens", "8", "--temperature", "0"]
    with Terminal(*arguments) as terminal:
        terminal.expect("/help shows the commands")
        terminal.expect("> ")
        terminal.type("My name is Ada.\n")
        terminal.expect("Ada.")
        terminal.expect("\n> ")
        terminal.type("/stats\n")
        terminal.expect("counts are shown")
        terminal.expect("> ")
        terminal.type("What is my name?\n")
        first = int(terminal.expect("prompt tokens").split("[")[-1].split()[0])
        terminal.expect("> ")
        terminal.type("/reset\n")
        terminal.expect("forgotten")
        terminal.expect("> ")
        terminal.type("What is my name?\n")
        again = int(terminal.expect("prompt tokens").split("[")[-1].split()[0])
        assert again < first  # the history is in the first, not in the second
        terminal.expect("> ")
        terminal.type("/nonsense\n")
        terminal.expect("there is no /nonsense; /help shows the commands")
        terminal.expect("> ")
        terminal.type("/help\n")
        terminal.expect("/retry")
        terminal.expect("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0


def test_ctrl_c_stops_an_answer_and_not_the_program(daemon, client):
    with Terminal("chat", "--address", daemon.address, "--temperature", "0") as terminal:
        terminal.expect("> ")
        terminal.interrupt("/exit or Ctrl-D leaves")
        terminal.expect("> ")
        terminal.type("Count from one to nine hundred in words, all of them.\n")
        terminal.expect("words, all of them.")
        terminal.expect("o")
        terminal.type("\x03")
        terminal.expect("stopped; what was said so far is kept")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    wait_idle(client)


def test_a_refused_message_does_not_end_the_conversation(daemon):
    with Terminal("chat", "--address", daemon.address, "--model", "gpt-9") as terminal:
        terminal.expect("> ")
        terminal.type("hello\n")
        assert "gpt-9" in terminal.expect("\n> ")
        terminal.type("/retry\n")
        terminal.expect("there is no message to answer again")
        terminal.expect("> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0


def test_lines_of_a_pipe_are_messages(edgectl, daemon, client):
    first = [{"role": "user", "content": "Say hello."}]
    answer = client.generate(first, temperature=0.0, max_tokens=4).answer().text
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "Say\nbye."}]
    answers = [answer, client.generate(second, temperature=0.0, max_tokens=4).answer().text]
    result = edgectl(
        "chat", "-n", "4", "-t", "0", "--address", daemon.address, stdin=b"Say hello.\n\nSay\\\nbye.\n"
    )
    assert result.code == 0
    assert result.out == "".join(f"{text}\n" for text in answers)
    assert result.err == ""


def test_a_refused_message_of_a_pipe_is_an_exit_status(edgectl, daemon):
    result = edgectl("chat", "--model", "gpt-9", "--address", daemon.address, stdin=b"hello\n")
    assert result.code == ExitCode.REFUSED
    assert "gpt-9" in result.err


def test_generate_ends_its_line_on_ctrl_c(daemon):
    arguments = ["generate", "Once upon a time", "-n", "900", "--ignore-eos", "--address", daemon.address]
    with Terminal(*arguments) as terminal:
        terminal.expect(" ")
        terminal.type("\x03")
        assert terminal.end() == ExitCode.INTERRUPTED
        assert terminal.text.endswith("\n")


def test_the_wait_is_shown(tmp_path):
    with Terminal("status", "--wait", "500ms", "--address", tmp_path / "none.sock") as terminal:
        terminal.expect("waiting for edged at")
        assert terminal.end() == ExitCode.UNREACHABLE


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_characters(daemon, encoding):
    done = subprocess.run(
        [*COMMAND, "generate", "从前有一个机器人", "-n", "4", "-t", "0", "--address", daemon.address],
        capture_output=True,
        env=clean_environment(PYTHONIOENCODING=encoding),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.decode(encoding)
