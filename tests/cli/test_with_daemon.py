"""edgectl against the real daemon: outputs, exit statuses, pipes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from edgectl_process import COMMAND, clean_environment, wait_idle

from edged.cli.exit_codes import ExitCode
from edged.config_reader import read_config

STORY = "Once upon a time there was a robot who"


@pytest.fixture
def ctl(edgectl, daemon):
    """``edgectl`` that talks to the session's daemon."""

    def run(*arguments, **options):
        return edgectl(*arguments, EDGED_ADDRESS=daemon.address, **options)

    return run


def generate(ctl, *arguments, **options):
    result = ctl("generate", "--temperature", "0", *arguments, **options)
    assert result.code == 0, result.err
    return result.out


# status


def test_status_table(ctl, daemon):
    result = ctl("status")
    assert result.code == ExitCode.DONE
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0].startswith("edged 0.1.0  serving  up ")
    assert f"daemon {daemon.process.pid}, engine " in lines[2]
    model = next(line for line in lines if line.startswith("smollm"))
    planned = read_config(daemon.config_file).models[0]
    sizes = [str(planned.context_length), str(planned.max_sequences)]
    assert model.split()[:7] == ["smollm", "serving", "torch", "cpu", planned.dtype, *sizes]
    assert any(line.startswith("weights") and "MiB" in line for line in lines)
    assert lines[-1].startswith("total")
    assert "of a budget of 4.00 GiB" in lines[-1]
    assert all(line == line.rstrip() for line in lines)


def test_status_json(ctl, daemon):
    status = json.loads(ctl("status", "--json").out)
    assert status["state"] == "serving"
    assert status["address"] == daemon.address
    assert status["daemon_pid"] == daemon.process.pid
    assert status["models"][0]["name"] == "smollm"
    assert status["models"][0]["state"] == "serving"
    assert status["models"][0]["running"] == 0
    assert status["ledger"]["budget_bytes"] == 4 * 2**30
    assert status["ledger"]["total_bytes"] == sum(row["bytes"] for row in status["ledger"]["rows"])
    assert all(isinstance(row["bytes"], int) for row in status["ledger"]["rows"])


def test_status_of_what_is_no_edged(edgectl, tmp_path):
    import socket

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "dumb.sock"))
    listener.listen()
    with listener:
        result = edgectl("status", "--json", "--address", tmp_path / "dumb.sock", "--timeout", "1s")
    assert result.code == ExitCode.UNREACHABLE
    assert json.loads(result.out)["state"] == "unreachable"
    assert f"unix:{tmp_path}/dumb.sock" in result.err


def test_status_of_a_daemon_that_loads_and_of_one_that_drains(edgectl, start_daemon):
    daemon = start_daemon(wait=False)
    end = time.monotonic() + 60
    codes: list[int] = []
    while time.monotonic() < end and ExitCode.DONE not in codes[-1:]:
        codes.append(edgectl("status", "--address", daemon.address).code)
        time.sleep(0.2)
    assert codes[-1] == ExitCode.DONE
    assert sorted(set(codes), key=[2, 1, 0].index) == list(dict.fromkeys(codes)), codes
    running = start_generation(daemon, STORY, "--max-tokens", "900", "--ignore-eos")
    daemon.signal(signal.SIGTERM)
    end = time.monotonic() + 60
    while (result := edgectl("status", "--address", daemon.address)).code == ExitCode.DONE:
        assert time.monotonic() < end
    assert result.code == ExitCode.NO
    assert "draining" in result.out
    refused = edgectl("generate", "x", "--address", daemon.address)
    assert refused.code == ExitCode.FAILED
    assert "takes no new requests" in refused.err
    running.kill()
    running.wait(60)
    assert daemon.wait() == 0


def test_wait_bridges_the_start_and_a_kill_is_told(edgectl, start_daemon):
    daemon = start_daemon(wait=False)
    result = edgectl("generate", STORY, "-n", "2", "--wait", "90s", "--address", daemon.address, timeout=120)
    assert result.code == 0, result.err
    assert result.out.strip()
    process = start_generation(daemon, STORY, "-n", "900", "--ignore-eos")
    daemon.process.kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode in (ExitCode.FAILED, ExitCode.UNREACHABLE)
    assert err.startswith(b"edgectl: ")
    assert err.count(b"\n") == 1
    assert out.endswith(b"\n")


def test_wait_that_is_too_short(edgectl, tmp_path):
    result = edgectl("status", "--wait", "200ms", "--address", tmp_path / "none.sock")
    assert result.code == ExitCode.UNREACHABLE
    assert "does not serve after 0.2 s: cannot reach edged at" in result.err
    result = edgectl("generate", "x", "--wait", "200ms", "--address", tmp_path / "none.sock")
    assert result.code == ExitCode.FAILED


# generate


def test_generate_streams_the_text_that_json_has(ctl, client):
    answer = client.generate(STORY, temperature=0.0, max_tokens=12).answer()
    assert generate(ctl, STORY, "--max-tokens", "12") == answer.text + "\n"
    result = json.loads(generate(ctl, STORY, "--max-tokens", "12", "--json"))
    assert result["text"] == answer.text
    assert result["token_ids"] == list(answer.token_ids)
    assert result["finish_reason"] == "length"
    assert result["usage"] == {
        "prompt_tokens": answer.finished.usage.prompt_tokens,
        "cached_tokens": answer.finished.usage.cached_tokens,
        "generated_tokens": 12,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }
    assert set(result["timings"]) == {"queue_seconds", "prefill_seconds", "decode_seconds", "steps"}
    assert result["timings"]["steps"] >= 12
    assert result["model"] == "smollm"
    assert result["sampling"]["temperature"] == 0.0
    assert result["max_tokens"] == 12


def test_prompt_from_standard_input(ctl):
    told = generate(ctl, STORY, "-n", "4")
    assert generate(ctl, "-", "-n", "4", stdin=STORY.encode() + b"\n") == told
    assert generate(ctl, "-", "-n", "4", stdin=b"\xef\xbb\xbf" + STORY.encode() + b"\r\n") == told


def test_prompt_that_begins_with_a_dash(ctl, client):
    answer = client.generate("-x", temperature=0.0, max_tokens=4).answer()
    assert generate(ctl, "-n", "4", "--", "-x") == answer.text + "\n"


def test_chat_and_system(ctl, client):
    messages = [{"role": "user", "content": "Name three colours."}]
    answer = client.generate(messages, temperature=0.0, max_tokens=6).answer()
    assert generate(ctl, "Name three colours.", "--chat", "-n", "6") == answer.text.rstrip("\n") + "\n"
    messages.insert(0, {"role": "system", "content": "Answer in French."})
    answer = client.generate(messages, temperature=0.0, max_tokens=6).answer()
    told = generate(ctl, "Name three colours.", "--system", "Answer in French.", "-n", "6")
    assert told.rstrip("\n") == answer.text.rstrip("\n")


def test_stops_and_their_escapes(ctl):
    whole = json.loads(generate(ctl, STORY, "-n", "16", "--json"))["text"]
    word = whole.split()[4]
    stopped = json.loads(generate(ctl, STORY, "-n", "16", "--json", "--stop", "qqq", "--stop", word))
    assert stopped["finish_reason"] == "stop_string"
    assert stopped["matched"] == word
    assert stopped["text"] == whole[: whole.index(word)]
    line = json.loads(generate(ctl, "Colours:\n1. red\n2.", "-n", "16", "--json", "--stop", r"\n"))
    assert "\n" not in line["text"]
    assert line["matched"] == "\n"


def test_sampling_options_arrive(ctl):
    arguments = ["-n", "6", "--top-k", "50", "--top-p", "0.9", "--json"]
    results = [
        json.loads(ctl("generate", STORY, "--temperature", "1.5", "--seed", seed, *arguments).out)
        for seed in ("5", "5", "6")
    ]
    assert results[0]["text"] == results[1]["text"] != results[2]["text"]
    assert results[0]["sampling"] == {
        "temperature": 1.5,
        "top_k": 50,
        "top_p": pytest.approx(0.9),
        "seed": 5,
    }


def test_stats_go_to_standard_error(ctl):
    result = ctl("generate", STORY, "-n", "5", "-t", "0", "--stats")
    assert "5 generated" in result.err
    assert "ended by length" in result.err
    assert "generated" not in result.out


REFUSALS = [
    ([""], ExitCode.REFUSED, "empty"),
    (["word " * 2000], ExitCode.REFUSED, "1024"),
    (["x", "--max-tokens", "5000"], ExitCode.REFUSED, "5000"),
    (["x", "--max-tokens", "0"], ExitCode.REFUSED, "max_tokens"),
    (["x", "--max-tokens", "-1"], ExitCode.REFUSED, "max_tokens"),
    (["x", "--temperature", "nan"], ExitCode.REFUSED, "temperature"),
    (["x", "--temperature", "-1"], ExitCode.REFUSED, "temperature"),
    (["x", "--top-p", "2"], ExitCode.REFUSED, "top_p"),
    (["x", "--seed", "-1"], ExitCode.REFUSED, "seed"),
    (["x", "--model", "gpt-9"], ExitCode.REFUSED, "gpt-9"),
    (["x", "--stop", ""], ExitCode.REFUSED, "stop"),
    (["x", *["--stop", "a"] * 40], ExitCode.REFUSED, "16"),
    (["x", "--timeout", "1ms"], ExitCode.FAILED, "allow more time"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals_are_one_line(ctl, arguments, code, message):
    result = ctl("generate", *arguments)
    assert result.code == code, result
    assert message in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert result.err.startswith("edgectl: ")


def start_generation(daemon, *arguments, **options):
    """An ``edgectl generate`` that has printed its first character."""
    process = subprocess.Popen(
        [*COMMAND, "generate", "--address", daemon.address, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        **options,
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)
    return process


def test_ctrl_c_stops_the_work(daemon, client):
    process = start_generation(daemon, STORY, "-n", "900", "--ignore-eos")
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert err == b""
    wait_idle(client)


def test_a_reader_that_goes_away_stops_the_work(daemon, client):
    process = start_generation(daemon, STORY, "-n", "900", "--ignore-eos")
    process.stdout.close()
    assert process.wait(60) == ExitCode.PIPE_CLOSED
    assert process.stderr.read() == b""
    process.stderr.close()
    wait_idle(client)


# tokenize


def test_tokenize(ctl, client):
    ids = client.tokenize(STORY)
    assert ctl("tokenize", STORY).out == " ".join(map(str, ids)) + "\n"
    assert ctl("tokenize", "-", stdin=STORY.encode()).out == " ".join(map(str, ids)) + "\n"
    assert ctl("tokenize", STORY, "--count").out == f"{len(ids)}\n"
    assert json.loads(ctl("tokenize", STORY, "--json").out) == {"token_ids": list(ids), "count": len(ids)}
    pieces = [line.split("\t") for line in ctl("tokenize", STORY, "--pieces").out.splitlines()]
    assert [int(number) for number, _ in pieces] == list(ids)
    assert "".join(json.loads(piece) for _, piece in pieces) == STORY
    chat = client.tokenize([{"role": "user", "content": "hi"}])
    assert ctl("tokenize", "hi", "--chat").out.split() == [str(number) for number in chat]
    assert ctl("tokenize", "hi", "--model", "gpt-9").code == ExitCode.REFUSED


# doctor


def test_doctor_sees_the_daemon(ctl, daemon):
    result = ctl("doctor", "--config", daemon.config_file)
    assert result.code == 0, result.out
    assert f"at {daemon.address}: serving" in result.out
    assert "model smollm" in result.out
    assert "budget" in result.out


# embed


def test_embed_prints_a_line_a_text(ctl, client):
    texts = ["The robot opens the door.", "A second\u2028text."]
    result = ctl("embed", *texts)
    assert result.code == 0, result.err
    vectors = [json.loads(line) for line in result.out.splitlines()]
    np.testing.assert_allclose(vectors, client.embed(texts), atol=1e-5)  # who shares a step differs
    result = ctl(
        "embed", "--json", "--pooling", "last", "--no-normalize", "-", stdin="\n".join(texts).encode()
    )
    plain = client.embed(texts, pooling="last", normalize=False)
    np.testing.assert_allclose(json.loads(result.out)["embeddings"], plain, rtol=1e-3, atol=1e-3)
    result = ctl("embed", "--pooling", "max", "x")
    assert result.code == ExitCode.REFUSED
    assert "use last or mean" in result.err
    result = ctl("embed", "-")
    assert result.code == ExitCode.REFUSED
    assert "inputs has 0 entries" in result.err
