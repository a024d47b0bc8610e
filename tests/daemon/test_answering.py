"""Status, health and reflection of the real daemon."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import grpc
import pytest
from fixtures.daemon import DaemonProcess, demo_configuration
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from edged import __version__
from edged.client import Client
from edged.errors import InvalidArgumentError
from edged.v1 import control_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def started(demo_model):
    """A daemon whose process has loaded what it loads, and no more."""
    process = DaemonProcess(demo_configuration(demo_model), program=("-m", "edged"))
    try:
        yield process.wait_ready()
        assert process.stop() == 0, process.log()
    finally:
        process.close()


def test_status_says_everything(started):
    with started.client() as client:
        status = client.status()
    assert status.state == control_pb2.STATE_SERVING
    assert status.version == __version__
    assert status.daemon_pid == started.process.pid
    assert Path(f"/proc/{status.engine_pid}/cmdline").read_text().count("edged.worker.engine") == 1
    assert status.uptime_seconds > 0
    assert status.engine_restarts == 0
    assert status.last_error == ""
    assert status.addresses[0] == started.address
    (model,) = status.models
    assert (model.name, model.executor, model.device, model.dtype) == ("smollm", "torch", "cpu", "float32")
    assert (model.context_length, model.max_sequences) == (1024, 4)
    assert model.state == control_pb2.STATE_SERVING
    assert model.pages >= 4 * 1024 // 64
    assert model.loading == ""


def test_status_shows_the_ledger(client):
    ledger = client.status().ledger
    assert ledger.total_bytes == sum(row.bytes for row in ledger.rows)
    assert 0 < ledger.total_bytes <= ledger.budget_bytes == 4 * 2**30
    assert all(row.name for row in ledger.rows)


def test_status_counts(client):
    before = client.status()
    client.generate("Hello there", temperature=0.0, max_tokens=5, ignore_eos=True).answer()
    with pytest.raises(InvalidArgumentError):
        client.generate("").answer()
    end = time.monotonic() + 60
    while client.status().models[0].generated_tokens < before.models[0].generated_tokens + 5:
        assert time.monotonic() < end
        time.sleep(0.02)
    after = client.status()
    assert after.requests_finished == before.requests_finished + 1
    assert after.requests_failed == before.requests_failed + 1
    assert after.models[0].generated_tokens == before.models[0].generated_tokens + 5
    assert after.models[0].steps > before.models[0].steps


def test_tcp_answers_too(client):
    address = client.status().addresses[1]
    assert address.startswith("127.0.0.1:")
    with Client(address) as other:
        assert other.status().daemon_pid == client.status().daemon_pid
        assert other.generate("Hello", temperature=0.0, max_tokens=2).answer().text


def test_the_socket_is_for_owner_and_group(daemon):
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660


def test_health(daemon):
    with grpc.insecure_channel(daemon.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "edged.v1.Inference", "model/smollm"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
        assert set(stub.List(health_pb2.HealthListRequest()).statuses) == {
            "",
            "edged.v1.Inference",
            "model/smollm",
        }
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="model/smollm"))
        assert next(watch).status == SERVING
        watch.cancel()


def test_reflection_describes_the_api(daemon):
    with grpc.insecure_channel(daemon.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            "edged.v1.Control",
            "edged.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("edged.v1.Inference")
        assert {method.name for method in service.methods} == {"Generate", "Tokenize", "Detokenize", "Embed"}
        assert service.methods_by_name["Generate"].input_type.fields_by_name["sampling"].number == 5


def test_the_daemon_process_holds_no_torch(started):
    libraries = Path(f"/proc/{started.process.pid}/maps").read_text()
    assert "tokenizers" in libraries  # the file says what is loaded
    for name in ("torch", "nvinfer", "pycuda", "libcuda"):
        assert name not in libraries
    with started.client() as client:
        assert "libtorch" in Path(f"/proc/{client.status().engine_pid}/maps").read_text()


def test_the_daemon_gives_way_to_the_engine(daemon, client):
    assert os.sched_getscheduler(daemon.process.pid) == os.SCHED_BATCH
    engine = client.status().engine_pid
    policies = {os.sched_getscheduler(int(task.name)) for task in Path(f"/proc/{engine}/task").iterdir()}
    assert policies == {os.SCHED_OTHER}


def test_the_log_is_json_and_holds_no_prompt(daemon, client):
    secret = "The password is xyzzy-4711"
    client.generate(secret, temperature=0.0, max_tokens=4).answer()
    client.tokenize(secret)
    with pytest.raises(InvalidArgumentError):
        client.generate(secret, stop=["s3cret-stop"] * 40).answer()
    lines = daemon.log_lines()
    assert len(lines) == len(daemon.log().splitlines())
    assert "xyzzy" not in daemon.log()
    assert "s3cret" not in daemon.log()
    assert {line["process"] for line in lines} == {"daemon", "engine"}


def test_one_request_id_runs_through_both_processes(daemon, client):
    started = client.generate("Hello", temperature=0.0, max_tokens=2).answer().started
    end = time.monotonic() + 60
    while time.monotonic() < end:
        processes = {
            line["process"] for line in daemon.log_lines() if line.get("request_id") == started.request_id
        }
        if processes == {"daemon", "engine"}:
            return
        time.sleep(0.05)
    raise AssertionError(processes)


def test_ten_connections_leave_no_descriptor(daemon, client):
    client.status()
    descriptors = Path(f"/proc/{daemon.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(10):
        with daemon.client() as other:
            other.status()
    end = time.monotonic() + 60
    while len(list(descriptors.iterdir())) > before:
        assert time.monotonic() < end
        time.sleep(0.05)
