"""What Prometheus gets, what the dashboard and the alerts ask for, and what a collector of traces gets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import re
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from edged import errors
from edged.jetson import Board
from edged.memory.ledger import Ledger
from edged.memory.model_rows import LedgerRow
from edged.metrics.collector import DaemonCollector
from edged.metrics.exporter import Exporter
from edged.metrics.requests import CHAT, RequestMetrics
from edged.metrics.traces import Tracer
from edged.worker.messages import Finished, Started, Submit, Tokens
from edged.worker.state import State

ROOT = Path(__file__).resolve().parents[2]
IDS = [5, 6, 7]
SAMPLED = {"temperature": 0.0, "ignore_eos": True}
BOARD = Board(
    model="Orin",
    l4t="36.4.3",
    power_mode="MAXN",
    temperatures={"tj": 45.0},
    thermal_margin=54.0,
    rails={"VDD_GPU_SOC": 4.4},
    throttle_events={"peak_over_current": 3},
    clocks={"gpu": 1_300_500_000},
)


def fetch(address, path="/metrics", method="GET"):
    if address.startswith("unix:"):
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(address.removeprefix("unix:"))
    else:
        connection = http.client.HTTPConnection(address, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body


def samples(text):
    """Name and labels of every sample → its value."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def served(demo_model):
    """A daemon with metrics that has answered and refused."""
    from fixtures.daemon import FAKE_MODEL_DAEMON, DaemonProcess, demo_configuration

    daemon = DaemonProcess(
        demo_configuration(demo_model, metrics={"listen": "127.0.0.1:0"}, thermal={"max_requests": 1}),
        {"FAKE_ENGINE": json.dumps({"step_seconds": 0.002})},
        (str(FAKE_MODEL_DAEMON),),
        forked=True,
    )
    try:
        daemon.wait_ready()
        with daemon.client() as client:
            for _ in range(3):
                client.generate(IDS, max_tokens=5, **SAMPLED).answer()
            with pytest.raises(errors.InvalidArgumentError):
                client.generate([], max_tokens=5).answer()
            with pytest.raises(errors.NotFoundError):
                client.generate(IDS, model="none").answer()
            stream = iter(client.generate(IDS, max_tokens=900, **SAMPLED))
            next(stream)
            stream.close()
            time.sleep(0.5)
            address = client.status().metrics_address
        yield daemon, address
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log()
    finally:
        daemon.close()


def test_what_was_asked_is_counted_and_timed(served):
    _, address = served
    status, text = fetch(address)
    assert status == 200
    found = samples(text)
    model = ("gen_ai_request_model", "smollm")
    what = ("gen_ai_operation_name", "text_completion")
    assert (
        found["edged_requests_finished_total", what, model, ("gen_ai_response_finish_reason", "length")] == 3
    )
    assert found["gen_ai_server_token_usage_tokens_total", what, model, ("gen_ai_token_type", "input")] == 9
    assert found["gen_ai_server_token_usage_tokens_total", what, model, ("gen_ai_token_type", "output")] == 15
    assert found["gen_ai_server_time_to_first_token_seconds_count", what, model] >= 3
    assert 0.004 < found["gen_ai_server_time_per_output_token_seconds_sum", what, model] < 300
    assert found["gen_ai_server_time_per_output_token_seconds_count", what, model] == 3
    assert found["edged_inter_token_latency_seconds_count", what, model] >= 12
    failed = {key[1][1]: value for key, value in found.items() if key[0] == "edged_requests_failed_total"}
    assert failed == {"INVALID_ARGUMENT": 1, "NOT_FOUND": 1, "CANCELLED": 1}
    assert found["edged_state", ("state", "serving")] == 1
    assert found["edged_state", ("state", "failed")] == 0
    assert found["edged_kv_pages", model] == found["edged_kv_pages_free", model] > 0
    steps = sum(value for key, value in found.items() if key[0] == "edged_bucket_steps_total")
    assert steps == found["edged_steps_total", model] > 10
    assert found["edged_ledger_budget_bytes",] == 4 * 2**30
    assert found["edged_resident_bytes", ("process", "engine")] > 2**20
    assert found["edged_admission_capped",] == 0


def test_nothing_of_prompts_or_clients_is_a_label(served):
    _, address = served
    for key in samples(fetch(address)[1]):
        assert {name for name, _ in key[1:]} <= {
            "gen_ai_request_model", "gen_ai_operation_name", "gen_ai_token_type", "gen_ai_response_finish_reason",
            "error_type", "code", "le", "state", "row", "process", "bucket", "version",
        }  # fmt: skip


def test_other_pages_and_methods_are_refused(served):
    _, address = served
    assert fetch(address, "/secrets")[0] == 404
    assert fetch(address, method="POST")[0] == 405
    assert fetch(address, method="HEAD") == (200, "")


def test_who_connects_and_says_nothing_holds_up_nobody(served):
    _, address = served
    host, port = address.rsplit(":", 1)
    idle = [socket.create_connection((host, int(port))) for _ in range(12)]
    for connection in idle[:6]:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 100)
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(10)
        connection.sendall(b"x" * 200_000)
        with contextlib.suppress(ConnectionError):
            assert b"200 OK" not in connection.recv(100)
    assert fetch(address)[0] == 200
    for connection in idle:
        connection.close()


class FakeSupervisor:
    models: dict = {}  # noqa: RUF012
    restarts = 2
    engine_pid = 0


def full_collector():
    return DaemonCollector(
        FakeSupervisor(),
        Ledger((LedgerRow("weights", 5),), 10),
        state=lambda: State.SERVING,
        board=lambda: BOARD,
        admission=type("Capped", (), {"capped": True, "waiting": lambda _, model: 3})(),
        certificate_expiry=lambda: 1e9,
    )


def exported(served):
    """Every name that a daemon exports, with TLS and a board, and the labels seen on it."""
    registry = CollectorRegistry()
    registry.register(full_collector())
    RequestMetrics(registry)
    labels = {}
    for family in (*text_string_to_metric_families(fetch(served[1])[1]), *registry.collect()):
        labels.setdefault(family.name, set()).update(*(sample.labels for sample in family.samples))
    return labels


def asked(expression):
    """Names of metrics in a query."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\bby\s*\([^)]*\)", "", expression)
    return set(re.findall(r"\b((?:edged|gen_ai|process|up)[a-z_]*)\b", bare)) - {"up"}


def family_of(name, names):
    """The family that a sample's name belongs to."""
    for suffix in ("", "_total", "_bucket", "_count", "_sum"):
        if name.endswith(suffix) and name.removesuffix(suffix) in names:
            return name
    return None


def test_the_board_is_there():
    registry = CollectorRegistry()
    registry.register(full_collector())
    values = {
        (s.name, *sorted(s.labels.items())): s.value for family in registry.collect() for s in family.samples
    }
    assert values["edged_board_temperature_celsius", ("zone", "tj")] == 45
    assert values["edged_board_throttle_events_total", ("cause", "peak_over_current")] == 3
    assert values["edged_board_power_watts", ("rail", "VDD_GPU_SOC")] == 4.4
    assert values["edged_board_thermal_margin_celsius",] == 54
    assert values["edged_admission_capped",] == 1
    assert values["edged_certificate_expiry_timestamp_seconds",] == 1e9


def test_every_metric_of_the_alerts_is_exported(served):
    names = exported(served)
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    assert len(rules) > 8
    for rule in rules:
        wanted = asked(rule["expr"])
        assert wanted or 'up{job="edged"}' in rule["expr"]
        known = {"instance", "job", "le"}  # Prometheus' own
        for name in wanted:
            assert family_of(name, names), f"{rule['alert']}: {name}"
            known |= names[re.sub(r"_(total|bucket|count|sum)$", "", name)]
        text = f"{rule['expr']} {rule['annotations']['summary']}"
        named = re.findall(r"\$labels\.(\w+)|(\w+)!?=~?\"|by \(([^)]*)\)", text)
        assert set(re.findall(r"\w+", " ".join(map(" ".join, named)))) <= known, rule["alert"]
        assert rule["annotations"]["action"]


def test_every_metric_of_the_dashboard_is_exported_and_every_exported_one_is_shown_or_known(served):
    names = exported(served)
    dashboard = json.loads((ROOT / "deploy/grafana/edged.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 20
    shown = set()
    for query in queries:
        for name in asked(query):
            assert family_of(name, names), name
            shown.add(re.sub(r"_(total|bucket|count|sum)$", "", name))
    known = {
        "edged_info", "edged_board_info", "edged_sessions", "edged_host_pages", "edged_host_pages_free", "edged_steps",
        "edged_suspensions", "edged_ledger_budget_bytes",
    }  # fmt: skip
    ours = {
        name for name in names if name.startswith(("edged_", "gen_ai_")) and not name.endswith("_created")
    }
    assert ours - shown - known == set()
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)


def test_the_dashboard_is_what_its_program_writes():
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "deploy/grafana/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.dashboard() == json.loads(module.PLACE.read_text())


def test_denied_calls_are_counted(start_daemon, tmp_path):
    from edged.server.tokens import make_token, token_line

    tokens = tmp_path / "tokens"
    tokens.write_text(token_line("robot", ("infer",), make_token()) + "\n")
    tokens.chmod(0o600)
    place = f"unix:{tmp_path / 'metrics'}"
    daemon = start_daemon(
        fake={}, listen={"tcp": "127.0.0.1:0", "tokens": str(tokens)}, metrics={"listen": place}
    )
    with daemon.client() as client:
        status = client.status()
    assert status.metrics_address == place
    assert (tmp_path / "metrics").stat().st_mode & 0o777 == 0o660
    with grpc.insecure_channel(status.addresses[-1]) as channel:
        call = channel.unary_unary("/edged.v1.Control/GetStatus")
        for _ in range(4):
            with pytest.raises(grpc.RpcError):
                call(b"")
    assert samples(fetch(place)[1])["edged_calls_denied_total", ("code", "UNAUTHENTICATED")] == 4
    assert daemon.stop() == 0
    assert not (tmp_path / "metrics").exists()


def test_a_place_that_is_taken_is_named():
    async def main(port):
        with pytest.raises(errors.ListenError, match=r"metrics\.listen"):
            await Exporter(f"127.0.0.1:{port}", CollectorRegistry()).start()

    with socket.create_server(("127.0.0.1", 0)) as other:
        asyncio.run(main(other.getsockname()[1]))


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path):
    place = tmp_path / "metrics"
    place.write_text("precious")
    with pytest.raises(errors.ListenError, match="is no socket"):
        asyncio.run(Exporter(f"unix:{place}", CollectorRegistry()).start())
    assert place.read_text() == "precious"


def spans_of(run):
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer("http://127.0.0.1:1/v1/traces", exporter=exporter)
    metrics = RequestMetrics(CollectorRegistry(), tracer)
    run(metrics)
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_phases():
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

    def run(metrics):
        with metrics.observe("r1", CHAT, parent) as observed:
            observed.submit(Submit("r1", "m", (1,), None, None))
            observed.note(Started("r1", 1))
            time.sleep(0.02)
            observed.note(Tokens("r1", (2,), "a"))
            observed.note(Tokens("r1", (3,), "b"))
            observed.note(Finished("r1", "length", "", 1, 2))

    spans = spans_of(run)
    assert set(spans) == {"chat m", "queue", "prefill", "decode"}
    root = spans["chat m"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert f"{root.parent.span_id:016x}" == "b" * 16
    assert f"{root.context.trace_id:032x}" == "a" * 32
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == root.context.span_id
    assert spans["prefill"].end_time - spans["prefill"].start_time >= 15_000_000
    assert root.start_time <= spans["queue"].start_time
    assert spans["decode"].end_time == root.end_time


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", "00-zz-xx-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-00"]
)
def test_a_failed_request_has_its_code_and_a_broken_parent_is_none(traceparent):
    def run(metrics):
        with pytest.raises(errors.NotFoundError), metrics.observe("r1", CHAT, traceparent):
            raise errors.NotFoundError("no such model")

    (span,) = spans_of(run).values()
    assert span.attributes["error.type"] == "NOT_FOUND"
    assert span.parent is None


def test_spans_reach_a_collector_and_one_that_is_away_harms_nothing(start_daemon):
    import http.server

    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        daemon = start_daemon(fake={}, traces={"endpoint": endpoint})
        with daemon.client() as client:
            client.generate(IDS, max_tokens=3, **SAMPLED).answer()
        assert daemon.stop() == 0
        assert b"text_completion smollm" in b"".join(received)
    finally:
        server.shutdown()
        server.server_close()
    away = start_daemon(fake={}, traces={"endpoint": endpoint})
    with away.client() as client:
        assert client.generate(IDS, max_tokens=3, **SAMPLED).answer().finished
    assert away.stop() == 0


def test_traces_without_their_package_are_refused_by_name(monkeypatch):
    import sys

    pytest.importorskip("opentelemetry.sdk.trace")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'edged\[otel\]'"):
        Tracer("http://127.0.0.1:1")
