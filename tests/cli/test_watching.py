"""edgectl status --watch: lines for programs, a screen for people; and edgectl sessions."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from edgectl_process import COMMAND, Terminal, clean_environment

from edged.cli.exit_codes import ExitCode


def test_a_line_of_json_for_each_look_until_ctrl_c(daemon):
    process = subprocess.Popen(
        [*COMMAND, "status", "--watch", "--interval", "0.1", "--json"],
        stdout=subprocess.PIPE,
        env=clean_environment(EDGED_ADDRESS=daemon.address),
        text=True,
    )
    looks = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert [look["state"] for look in looks] == ["serving"] * 3
    assert looks[0]["uptime_seconds"] < looks[1]["uptime_seconds"] < looks[2]["uptime_seconds"]
    assert looks[0]["models"][0]["time_to_first_token"]["count"] >= 0
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == ExitCode.DONE


def test_a_screen_that_shows_what_runs(daemon, client):
    client.generate("Hello", max_tokens=3).answer()
    with Terminal("status", "--watch", "--interval", "200ms", EDGED_ADDRESS=daemon.address) as terminal:
        terminal.expect("serving")
        terminal.expect("TTFT p50/p90/p99")
        terminal.expect("serving")  # the next look
        terminal.type("\x03")
        assert terminal.end() == ExitCode.DONE


def test_a_daemon_that_is_not_there_is_waited_for(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "status", "--watch", "--json", "--address", tmp_path / "none.sock"],
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    )
    look = json.loads(process.stdout.readline())
    assert look["state"] == "unreachable"
    assert "none.sock" in look["error"]
    assert json.loads(process.stdout.readline())["state"] == "unreachable"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == ExitCode.DONE


def test_sessions_are_listed_and_dropped(edgectl, daemon):
    def ctl(*arguments):
        return edgectl(*arguments, EDGED_ADDRESS=daemon.address)

    text = "A robot counts waves. " * 20
    assert ctl("generate", text, "-n", "3", "--session", "waves").code == 0
    listed = ctl("sessions")
    assert any(line.split()[:2] == ["waves", "smollm"] for line in listed.out.splitlines())
    as_json = json.loads(ctl("sessions", "--json").out)
    assert [each["requests"] for each in as_json["sessions"] if each["name"] == "waves"] == [1]
    again = ctl("generate", text, "-n", "3", "--session", "waves", "--json")
    assert json.loads(again.out)["usage"]["cached_tokens"] >= 64
    assert ctl("sessions", "drop", "waves").code == 0
    gone = ctl("sessions", "drop", "waves")
    assert gone.code == ExitCode.REFUSED
    assert "no session 'waves'" in gone.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["drop"], "needs the name"), (["list", "x"], "goes with drop"), (["keep"], "not one of list, drop")],
)
def test_sessions_that_make_no_sense(edgectl, arguments, said):
    result = edgectl("sessions", *arguments)
    assert result.code == ExitCode.USAGE
    assert said in result.err
