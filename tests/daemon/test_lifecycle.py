"""Starting, draining, dying and coming back."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edged import errors
from edged.client import Chunk, Finished
from edged.v1 import control_pb2

STORY = "Once upon a time"
IDS = [5, 6, 7]
SLOW = {"step_seconds": 0.03}
"""A fake model whose 900 tokens take half a minute."""
LONG = {"temperature": 0.0, "ignore_eos": True}


def first_chunk(stream):
    return next(event for event in stream if isinstance(event, Chunk))


class Watcher:
    """Collects what health's Watch says of one service."""

    def __init__(self, daemon, service: str) -> None:
        self.seen: list[str] = []
        self._channel = grpc.insecure_channel(daemon.address)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(
            health_pb2.HealthCheckRequest(service=service)
        )
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name
        try:
            for response in self._call:
                self.seen.append(name(response.status))
        except grpc.RpcError:
            pass

    def wait_for(self, *statuses: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while self.seen != list(statuses):
            assert time.monotonic() < end, self.seen
            time.sleep(0.01)

    def close(self) -> None:
        self._call.cancel()
        self._thread.join()
        self._channel.close()


def test_a_killed_engine_comes_back(start_daemon):
    daemon = start_daemon()
    watchers = [Watcher(daemon, service) for service in ("", "edged.v1.Inference", "model/smollm")]
    with daemon.client() as client, daemon.client(wait_for_ready=True) as patient:
        streams = [iter(client.generate(STORY, max_tokens=900, **LONG)) for _ in range(3)]
        for stream in streams:
            first_chunk(stream)
        before = client.status()
        os.kill(before.engine_pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(errors.UnavailableError) as caught:
                list(stream)
            assert type(caught.value) is errors.UnavailableError
            assert caught.value.retry_seconds is not None
        # Refused with a hint while it is away, status answered all the same.
        try:
            client.generate(STORY, max_tokens=2).answer()
        except errors.UnavailableError as error:
            assert error.retry_seconds > 0  # noqa: PT017 - it may be back already
        assert client.status().daemon_pid == before.daemon_pid
        after = client.wait_ready(60)
        for watcher in watchers:
            watcher.wait_for("SERVING", "NOT_SERVING", "SERVING")
            watcher.close()
        assert after.engine_pid not in {0, before.engine_pid}
        assert after.engine_restarts == 1
        assert "SIGKILL" in after.last_error or "9" in after.last_error
        assert after.models[0].pages_free == after.models[0].pages
        assert patient.generate(STORY, max_tokens=4, **LONG).answer().finished.reason == "length"
    assert daemon.stop() == 0


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(start_daemon):
    daemon = start_daemon(drain_timeout="200s")
    watcher = Watcher(daemon, "")
    with daemon.client() as client, ThreadPoolExecutor(4) as pool:
        streams = [iter(client.generate(STORY, max_tokens=24, **LONG)) for _ in range(3)]
        for stream in streams:
            first_chunk(stream)
        answers = [pool.submit(lambda stream=stream: list(stream)[-1]) for stream in streams]
        daemon.signal(signal.SIGTERM)
        watcher.wait_for("SERVING", "NOT_SERVING")
        assert client.status().state == control_pb2.STATE_DRAINING
        with pytest.raises(errors.UnavailableError) as caught:
            client.generate(STORY).answer()
        assert caught.value.retry_seconds is not None
        for answer in answers:
            last = answer.result(180)
            assert isinstance(last, Finished)
            assert last.usage.generated_tokens == 24
    assert daemon.wait() == 0
    watcher.close()
    assert not daemon.socket.exists()
    assert not daemon.socket.with_name("edged.sock.lock").exists()
    assert "Traceback" not in daemon.log()


def test_the_drain_timeout_cuts_what_is_left(start_daemon):
    daemon = start_daemon(fake=SLOW, drain_timeout="200ms")
    with daemon.client() as client:
        stream = iter(client.generate(IDS, max_tokens=900, **LONG))
        first_chunk(stream)
        daemon.signal()
        with pytest.raises(errors.UnavailableError) as caught:
            list(stream)
        assert caught.value.retry_seconds is not None
    assert daemon.wait(60) == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(start_daemon, number, status):
    daemon = start_daemon(fake=SLOW, forked=False)
    with daemon.client() as client:
        stream = iter(client.generate(IDS, max_tokens=900, **LONG))
        first_chunk(stream)
        engine = client.status().engine_pid
        daemon.signal(signal.SIGTERM)
        while client.status().state != control_pb2.STATE_DRAINING:
            time.sleep(0.01)
        daemon.signal(signal.SIGTERM)  # an echo, as wrappers make them, is no second signal
        time.sleep(0.5)
        assert client.status().state == control_pb2.STATE_DRAINING
        daemon.signal(number)
        assert daemon.wait(60) == status
        with pytest.raises(errors.UnavailableError):
            list(stream)
    assert not Path(f"/proc/{engine}").exists()
    assert not daemon.socket.exists()


def test_a_killed_daemon_takes_its_engine_along_and_the_next_one_starts(start_daemon):
    daemon = start_daemon(fake=SLOW, forked=False)
    with daemon.client() as client:
        engine = client.status().engine_pid
    daemon.process.kill()
    daemon.wait()
    end = time.monotonic() + 60
    while Path(f"/proc/{engine}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert daemon.socket.exists()
    successor = start_daemon(listen={"unix": str(daemon.socket)}, wait=False, fake=SLOW)
    with daemon.client() as client:
        assert client.wait_ready(60).daemon_pid == successor.process.pid
    assert successor.stop() == 0


def test_a_signal_while_loading(start_daemon):
    daemon = start_daemon(wait=False, fake={"load_seconds": 20})
    with daemon.client() as client:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                status = client.status()
                break
            except errors.UnreachableError:
                time.sleep(0.01)
        assert status.state == control_pb2.STATE_LOADING
        assert status.ledger.total_bytes > 0
        with pytest.raises(errors.UnavailableError) as caught:
            client.generate(STORY).answer()
        assert caught.value.retry_seconds is not None
    daemon.signal()
    assert daemon.wait(30) == 0


def test_systemd_hears_of_it(start_daemon, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        daemon = start_daemon(
            wait=False, fake={"slow_load": 0.6}, environment={"NOTIFY_SOCKET": str(tmp_path / "notify")}
        )
        messages = []
        while not messages or "READY=1" not in messages[-1]:
            messages.append(manager.recv(4096).decode())
        assert "STATUS=serving smollm" in messages[-1]
        with daemon.client() as client:
            assert client.status().state == control_pb2.STATE_SERVING
        daemon.signal()
        while "STOPPING=1" not in messages[-1]:
            messages.append(manager.recv(4096).decode())
        assert daemon.wait() == 0
    assert any(message.startswith("STATUS=loading smollm") for message in messages)
    assert any(message.startswith("EXTEND_TIMEOUT_USEC=") for message in messages)
    assert not any("READY" in message for message in messages[:-2] if "STATUS=loading" in message)


def edged(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edged", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_socket_in_use(daemon):
    result = edged("--config", str(daemon.config_file))
    assert result.returncode == 69
    assert f"in use by the edged with process id {daemon.process.pid}" in result.stderr
    with daemon.client() as client:
        assert client.status().daemon_pid == daemon.process.pid


def test_check_accepts_a_good_configuration_also_beside_a_running_daemon(daemon):
    result = edged("--config", str(daemon.config_file), "--check")
    assert result.returncode == 0, result.stderr
    assert "1 model" in result.stdout
    assert "4.00 GiB" in result.stdout


def write(folder, folder_of_model, **changes):
    import yaml
    from fixtures.daemon import demo_configuration

    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    configuration = demo_configuration(folder_of_model, **changes)
    configuration.setdefault("listen", {"unix": str(folder / "s")})
    path.write_text(yaml.safe_dump(configuration))
    return str(path)


def damaged(folder, model, name, size):
    """A model folder whose file ``name`` ends after ``size`` bytes; None: is missing."""
    copy = folder / f"damaged-{name}-{size}"
    copy.mkdir()
    for file in model.iterdir():
        if file.name != name:
            (copy / file.name).symlink_to(file)
        elif size is not None:
            (copy / name).write_bytes(file.read_bytes()[:size])
    return copy


@pytest.fixture
def check(capsys):
    """Run `edged --config PATH --check` in this process; return its exit status and what it said."""
    from edged.daemon import main

    handlers, level = logging.getLogger().handlers, logging.getLogger().level

    def run(path: str) -> tuple[int, str]:
        status = main(["--config", path, "--check"])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.err

    yield run
    structlog.reset_defaults()
    logging.getLogger().handlers = handlers
    logging.getLogger().setLevel(level)


def test_check_refuses_with_the_place_and_the_remedy(check, tmp_path, demo_model):
    cases = [
        (str(tmp_path / "none.yaml"), 78, "no such file"),
        (write(tmp_path, demo_model, nonsense=1), 78, "nonsense"),
        (write(tmp_path, demo_model, memory={"budget": "300MiB"}), 78, "300.00 MiB"),
        (write(tmp_path, tmp_path / "no-model"), 66, "no-model"),
        (write(tmp_path, damaged(tmp_path, demo_model, "model.safetensors", 1000)), 66, "model.safetensors"),
        (write(tmp_path, damaged(tmp_path, demo_model, "tokenizer.json", 1000)), 66, "tokenizer.json"),
        (write(tmp_path, damaged(tmp_path, demo_model, "tokenizer.json", None)), 66, "tokenizer.json"),
        (write(tmp_path, demo_model, listen={"unix": str(tmp_path / "no" / "s")}), 69, "mkdir -p"),
        (write(tmp_path, demo_model, listen={"unix": "/tmp/" + "x" * 120}), 78, "107"),
        (write(tmp_path, demo_model, listen={"tcp": "0.0.0.0:50051"}), 78, "loopback"),
        (
            write(tmp_path, demo_model, model={"executor": "tensorrt", "device": "cuda"}),
            78,
            "set device to cpu and executor to torch",
        ),
        (write(tmp_path, demo_model, model={"device": "cuda"}), 78, "set device to cpu"),
        (write(tmp_path, demo_model, model={"attention": {"top_k": 8}}), 78, "write mode: sparse"),
    ]
    for path, status, said in cases:
        found, message = check(path)
        assert found == status, message
        assert said in message
        assert message.startswith("edged: ")


def test_refusals_end_the_daemon_before_anything_is_loaded(tmp_path, demo_model):
    result = edged("--config", write(tmp_path, demo_model, memory={"budget": "300MiB"}))
    assert result.returncode == 78
    assert "300.00 MiB" in result.stderr
    result = edged("--config", write(tmp_path, demo_model, listen={"unix": str(tmp_path / "no" / "s")}))
    assert result.returncode == 69
    assert "mkdir -p" in result.stderr
    assert "engine started" not in result.stderr


def test_wrong_command_lines():
    assert edged().returncode == 2
    assert edged("--config").returncode == 2
    version = edged("--version")
    assert version.returncode == 0
    assert version.stdout.startswith("edged ")
