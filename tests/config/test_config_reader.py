"""Files that are read: every key, defaults, paths, merges."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edged.config import (
    AttentionConfig,
    Config,
    ListenConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    QueueConfig,
    RopeScalingConfig,
    SocketConfig,
    SpeculationConfig,
    ThermalConfig,
    TlsConfig,
    WatchdogConfig,
)
from edged.config_reader import ConfigFileError, parse_config, read_config

FOLDER = Path("/srv/robot")
LEAST = "models: [{name: a, path: b}]\n"


def parse(text):
    return parse_config(text, folder=FOLDER)


def test_least_file_has_every_default():
    assert parse(LEAST) == Config(models=(ModelConfig(name="a", path=FOLDER / "b"),))


def test_every_key_arrives():
    config = parse(
        """
        listen:
          unix: run/edged.sock
          tcp: "[::1]:50051"
          sockets: [{path: run/arm.sock, owner: robot, group: "44", mode: "0600", scopes: [infer]}]
          tls: {certificate: tls/server.pem, key: tls/server.key, client_ca: /etc/robots.pem}
          tokens: tokens
          tcp_scopes: [infer, status]
          i_accept_off_host_access_without_tls_and_authentication: false
        memory: {budget: 1.5GiB, host: 256 MiB}
        models:
          - name: openbmb/MiniCPM4-8B
            path: /models/minicpm4
            executor: torch
            device: cuda
            dtype: bfloat16
            kv_dtype: int8
            context_length: 131_072
            max_sequences: 2
            prefill_chunk: 1024
            max_step_tokens: 800
            prefill_share: 0.25
            prefix_cache: false
            session_share: 0.125
            host_kv: 512MiB
            residency: evictable
            threads: 4
            attention: {mode: sparse, dense_below: 0, top_k: 32, window: 1024, init_blocks: 2, lse: exact}
            speculation: {method: off, tree_size: 12, depth: 4, adaptive: false, window: 512, width: 8, residual_layers: 32}
            rope_scaling: {preset: minicpm4-128k}
            tool_format: minicpm4
            reasoning_format: none
        queue: {capacity: 0, aging: 2.5s, stream_buffer: 8}
        limits: {message_size: 1MiB, prompt_size: 64KiB, stop_strings: 4, stop_bytes: 100B, stop_token_ids: 0, constraint_size: 3KiB, requests_per_client: 3, concurrent_streams: 7, connections: 9, header_size: 8KiB}
        watchdog: {step_timeout: 5s, stall_timeout: 3s, load_timeout: 2min}
        metrics: {listen: "unix:/run/edged/metrics.sock"}
        traces: {endpoint: "http://127.0.0.1:4318/v1/traces"}
        thermal: {margin: 5, max_requests: 1}
        log: {level: debug, format: json}
        drain_timeout: 1.5min
        default_model: openbmb/MiniCPM4-8B
        """
    )
    assert config.listen == ListenConfig(
        unix=FOLDER / "run/edged.sock",
        tcp="[::1]:50051",
        sockets=(SocketConfig(FOLDER / "run/arm.sock", "robot", "44", "0600", ("infer",)),),
        tls=TlsConfig(FOLDER / "tls/server.pem", FOLDER / "tls/server.key", Path("/etc/robots.pem")),
        tokens=FOLDER / "tokens",
        tcp_scopes=("infer", "status"),
    )
    assert config.memory == MemoryConfig(budget=1536 * 2**20, host=256 * 2**20)
    assert config.models == (
        ModelConfig(
            name="openbmb/MiniCPM4-8B",
            path=Path("/models/minicpm4"),
            executor="torch",
            device="cuda",
            dtype="bfloat16",
            kv_dtype="int8",
            context_length=131072,
            max_sequences=2,
            prefill_chunk=1024,
            max_step_tokens=800,
            prefill_share=0.25,
            prefix_cache=False,
            session_share=0.125,
            host_kv=512 * 2**20,
            residency="evictable",
            threads=4,
            attention=AttentionConfig("sparse", 0, 32, 1024, 2, "exact"),
            speculation=SpeculationConfig(
                "off", 12, 4, adaptive=False, window=512, width=8, residual_layers=32
            ),
            rope_scaling=RopeScalingConfig(preset="minicpm4-128k"),
            tool_format="minicpm4",
            reasoning_format="none",
        ),
    )
    assert config.queue == QueueConfig(capacity=0, aging=2.5, stream_buffer=8)
    assert config.limits.requests_per_client == 3
    assert config.limits.message_size == 2**20
    assert config.limits.prompt_size == 2**16
    assert config.limits.stop_bytes == 100
    assert (config.limits.connections, config.limits.header_size) == (9, 8192)
    assert config.limits.constraint_size == 3072
    assert config.watchdog == WatchdogConfig(step_timeout=5.0, stall_timeout=3.0, load_timeout=120.0)
    assert config.step_timeout == 5.0
    assert config.metrics.listen == "unix:/run/edged/metrics.sock"
    assert config.traces.endpoint == "http://127.0.0.1:4318/v1/traces"
    assert config.thermal == ThermalConfig(5, 1)
    assert config.log == LogConfig(level="debug", format="json")
    assert config.drain_timeout == 90.0
    assert config.default_model == "openbmb/MiniCPM4-8B"


def test_every_parameter_of_rope_scaling_arrives():
    def read(text):
        return parse(f"models: [{{name: a, path: b, rope_scaling: {{{text}}}}}]").models[0].rope_scaling

    assert read(
        "type: yarn, factor: 4, beta_fast: 24, beta_slow: 2, attention_factor: 1"
    ) == RopeScalingConfig(type="yarn", factor=4.0, beta_fast=24.0, beta_slow=2.0, attention_factor=1.0)
    llama3 = "type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4.0"
    assert read(f"{llama3}, original_max_position_embeddings: 8192") == RopeScalingConfig(
        type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert read("type: longrope, short_factor: [1, 1.5], long_factor: [2, 3.0e+0]") == RopeScalingConfig(
        type="longrope", short_factor=(1.0, 1.5), long_factor=(2.0, 3.0)
    )


def test_the_paths_of_a_draft_arrive():
    keys = "{method: eagle, draft: drafts/mini, token_map: /maps/frequent.json}"
    assert parse(f"models: [{{name: a, path: b, speculation: {keys}}}]").models[
        0
    ].speculation == SpeculationConfig(
        "eagle", draft=FOLDER / "drafts/mini", token_map=Path("/maps/frequent.json")
    )


def test_every_key_of_the_types_is_in_that_test():
    """A key added to the dataclasses must be added above, or it would never be read in a test."""
    text = Path(__file__).read_text("utf-8")

    def names(kind):
        for field in dataclasses.fields(kind):
            yield field.name
            if field.default_factory is not dataclasses.MISSING:
                yield from names(type(field.default_factory()))

    for name in [*names(Config), *names(ModelConfig), *names(RopeScalingConfig)]:
        assert f"{name}:" in text, name


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("model", FOLDER / "model"),
        ("./model", FOLDER / "model"),
        ("../model", FOLDER / "../model"),
        ("/model", Path("/model")),
        ("~/model", Path("/home/robot/model")),
        ('"with space"', FOLDER / "with space"),
        ("模型/量化", FOLDER / "模型/量化"),
        ("price$5", FOLDER / "price$5"),
    ],
)
def test_paths_start_at_the_folder_of_the_file(written, read, monkeypatch):
    monkeypatch.setenv("HOME", "/home/robot")
    assert parse(f"models: [{{name: a, path: {written}}}]").models[0].path == read


def test_relative_path_from_a_relative_file(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "edged.yaml").write_text(LEAST)
    monkeypatch.chdir(tmp_path)
    assert read_config(Path("conf/edged.yaml")).models[0].path == tmp_path / "conf" / "b"


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    file = tmp_path / "edged.yaml"
    file.write_bytes(b"\xef\xbb\xbfmodels:\r\n  - name: a\r\n    path: b\r\n")
    assert read_config(file).models[0].name == "a"


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 300.0), ("cuda", 30.0)])
def test_the_step_timeout_follows_the_device(device, seconds):
    assert parse(f"models: [{{name: a, path: b, device: {device}}}]").step_timeout == seconds


def test_sections_with_nothing_under_them_have_their_defaults():
    assert parse("listen:\nmemory:\n  # budget: 1GiB\nlog: {}\n" + LEAST) == parse(LEAST)


def test_default_prefill_chunk_follows_a_small_context():
    assert parse("models: [{name: a, path: b, context_length: 64}]").models[0].prefill_chunk == 64


def test_anchors_and_merges():
    config = parse(
        """
        models:
          - &base {name: a, path: /m, dtype: bfloat16, max_sequences: 4}
          - {<<: *base, name: b, max_sequences: 2}
          - {<<: [*base, {threads: 3, dtype: float32}], name: c}
        """
    )
    assert [(m.name, m.dtype, m.max_sequences, m.threads) for m in config.models] == [
        ("a", "bfloat16", 4, 0),
        ("b", "bfloat16", 2, 0),
        ("c", "bfloat16", 4, 3),
    ]


@pytest.mark.parametrize("tcp", ["127.0.0.1:1", "127.8.9.10:65535", "localhost:50051", "[::1]:0"])
def test_loopback_addresses(tcp):
    assert parse(LEAST + f'listen: {{tcp: "{tcp}"}}').listen.tcp == tcp


def test_a_tcp_address_needs_no_quotes():
    assert parse(LEAST + "listen: {tcp: 127.0.0.1:50051}").listen.tcp == "127.0.0.1:50051"


def test_longest_socket_path():
    path = "/" + "s" * 106
    assert parse(LEAST + f"listen: {{unix: {path}}}").listen.unix == Path(path)
    with pytest.raises(ConfigFileError):
        parse(LEAST + f"listen: {{unix: {path}s}}")
