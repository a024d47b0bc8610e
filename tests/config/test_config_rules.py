"""Faults of speculation, RoPE scaling and listeners, and values that are refused beside others, each with what to do."""

from __future__ import annotations

import pytest
from refusals import LEAST, assert_one_fault, model

# The file; the path, and a part each of what was found and of what to do.
ONE_FAULT = [
    # speculation
    (
        model("speculation: {method: ngram}"),
        "models[0].speculation.method",
        "found 'ngram'",
        "off, prompt_lookup",
    ),
    (model("speculation: {method: on}"), "models[0].speculation.method", "found on", "off, prompt_lookup"),
    (model("speculation: {tree_size: 65}"), "models[0].speculation.tree_size", "found 65", "1 to 64"),
    (model("speculation: {tree_size: 0}"), "models[0].speculation.tree_size", "found 0", "1 to 64"),
    (model("speculation: {depth: 0}"), "models[0].speculation.depth", "found 0", "1 to 63"),
    (
        model("speculation: {tree_size: 8, depth: 8}"),
        "models[0].speculation.depth",
        "found 8, and a tree of 8 tokens (tree_size) holds 7",
        "write at most 7",
    ),
    (
        model("speculation: {tree_size: 1, depth: 1}"),
        "models[0].speculation.depth",
        "holds 0 below its root",
        "method: off, or a larger tree_size",
    ),
    (
        model("device: cuda, executor: tensorrt, speculation: {method: prompt_lookup}"),
        "models[0].speculation.method",
        "found prompt_lookup with executor: tensorrt",
        "method: off, or executor: torch",
    ),
    (
        model("speculation: {method: eagle}"),
        "models[0].speculation.draft",
        "is missing",
        "the draft's folder",
    ),
    (
        model("speculation: {method: prompt_lookup, draft: d}"),
        "models[0].speculation.draft",
        "has no effect with method: prompt_lookup",
        "remove it",
    ),
    (
        model("speculation: {token_map: m.json}"),
        "models[0].speculation.token_map",
        "has no effect with method: off",
        "remove it",
    ),
    (
        model("speculation: {method: eagle, draft: d, width: 11}"),
        "models[0].speculation.width",
        "found 11",
        "1 to 10",
    ),
    # rope_scaling
    (model("rope_scaling: {}"), "models[0].rope_scaling", "neither preset nor type", "write one"),
    (
        model("rope_scaling: {preset: minicpm4-128k, type: yarn}"),
        "models[0].rope_scaling",
        "both preset and type",
        "write one",
    ),
    (
        model("rope_scaling: {preset: minicpm4}"),
        "models[0].rope_scaling.preset",
        "'minicpm4'",
        "did you mean minicpm4-128k?",
    ),
    (
        model("rope_scaling: {type: linear, factor: 2, beta_fast: 3}"),
        "models[0].rope_scaling.beta_fast",
        "no effect with type: linear",
        "remove it",
    ),
    (
        model("rope_scaling: {preset: minicpm4-128k, factor: 2}"),
        "models[0].rope_scaling.factor",
        "no effect with a preset",
        "remove it",
    ),
    (
        model("rope_scaling: {type: longrope, long_factor: [1, x]}"),
        "models[0].rope_scaling.long_factor[1]",
        "'x'",
        "a number",
    ),
    (
        model("rope_scaling: {type: longrope, long_factor: []}"),
        "models[0].rope_scaling.long_factor",
        "0 entries",
        "1 to 512",
    ),
    # keys that do not go together
    (
        "models: [{name: a, path: b}, {name: a, path: c}]",
        "models[1].name",
        "'a', which models[0] has",
        "its own",
    ),
    (
        model("context_length: 128, prefill_chunk: 129"),
        "models[0].prefill_chunk",
        "129, more than context_length (128)",
        "at most 128",
    ),
    (model("executor: tensorrt"), "models[0].executor", "tensorrt with device: cpu", "device: cuda"),
    (LEAST + "default_model: b", "default_model", "'b', which no model is named", "write one of: a"),
    (LEAST + "memory: {budget: 100MiB}", "memory.budget", "100MiB, which memory.host (144MiB)", "raise"),
    (LEAST + "memory: {host: 100MiB}", "memory.host", "found 100MiB", "set at least 144MiB"),
    (
        LEAST + "memory: {host: 112MiB}\nlimits: {prompt_size: 1MiB}",
        "memory.host",
        "1MiB (limits.prompt_size)",
        "set at least 624MiB",
    ),
    (LEAST + "memory: {budget: 1GiB, host: 1GiB}", "memory.budget", "1GiB, which memory.host", "raise"),
    (LEAST + f"listen: {{unix: /{'s' * 107}}}", "listen.unix", "a path of 108 bytes", "at most 107"),
    (LEAST + f"listen: {{unix: /{'é' * 54}}}", "listen.unix", "a path of 109 bytes", "at most 107"),
    (LEAST + "listen: {tcp: 50051}", "listen.tcp", "50051 (a number)", "needs quotes"),
    (
        LEAST + "listen: {tcp: localhost}",
        "listen.tcp",
        "'localhost', which is no HOST:PORT",
        "127.0.0.1:50051",
    ),
    (LEAST + "listen: {tcp: 'localhost:http'}", "listen.tcp", "no HOST:PORT", "127.0.0.1:50051"),
    (LEAST + "listen: {tcp: '::1:50051'}", "listen.tcp", "no HOST:PORT", "[::1]:50051"),
    (LEAST + "listen: {tcp: '127.0.0.1:65536'}", "listen.tcp", "port 65536", "from 1 to 65535"),
    (
        LEAST + "listen: {tcp: '0.0.0.0:50051', tokens: t}",
        "listen.tcp",
        "'0.0.0.0', which is not loopback",
        "write listen.tls.certificate and listen.tls.key, so",
    ),
    (
        LEAST + "listen: {tcp: '0.0.0.0:50051', tls: {certificate: c, key: k}}",
        "listen.tcp",
        "not loopback",
        "write listen.tokens or listen.tls.client_ca, so",
    ),
    (LEAST + "listen: {tcp: '127.0.0.1:1', tls: {key: k}}", "listen.tls.key", "without certificate", "too"),
    (
        LEAST + "listen: {tcp: '127.0.0.1:1', tls: {certificate: c}}",
        "listen.tls.certificate",
        "without key",
        "write listen.tls.key too",
    ),
    (
        LEAST + "listen: {tcp: '127.0.0.1:1', tls: {client_ca: c}}",
        "listen.tls.client_ca",
        "without certificate",
        "too",
    ),
    (LEAST + "metrics: {listen: '0.0.0.0:9464'}", "metrics.listen", "not loopback", "127.0.0.1"),
    (LEAST + "metrics: {listen: 'here'}", "metrics.listen", "neither HOST:PORT", "127.0.0.1:9464"),
    (LEAST + "metrics: {listen: 'unix:here'}", "metrics.listen", "unix:here", "absolute path"),
    (LEAST + "traces: {endpoint: '127.0.0.1:4318'}", "traces.endpoint", "4318", "https?://"),
    (LEAST + "listen: {tokens: t}", "listen.tokens", "without listen.tcp", "the rights on a unix socket"),
    (
        LEAST + "listen: {unix: a, sockets: [{path: ./a}]}",
        "listen.sockets[0].path",
        "listen.unix has too",
        "own",
    ),
    (LEAST + "listen: {sockets: [{path: a, mode: 0660}]}", "listen.sockets[0].mode", "0660", '"0660"'),
    (LEAST + "listen: {sockets: [{path: a, mode: '999'}]}", "listen.sockets[0].mode", "999", "0?[0-7]{3}"),
    (
        LEAST + "listen: {sockets: [{path: a, scopes: [root]}]}",
        "listen.sockets[0].scopes[0]",
        "root",
        "one of infer, control, status",
    ),
    (LEAST + "listen: {tcp: '0.0.0.0:50051'}", "listen.tcp", "'0.0.0.0', which is not loopback", "127.0.0.1"),
    (LEAST + "listen: {tcp: 'robot.local:50051'}", "listen.tcp", "not loopback", "127.0.0.1"),
    (LEAST + "listen: {tcp: '[::]:50051'}", "listen.tcp", "not loopback", "listen.tls.certificate"),
]


@pytest.mark.parametrize(("text", "path", "problem", "remedy"), ONE_FAULT, ids=[c[0][:60] for c in ONE_FAULT])
def test_refusal_names_path_problem_and_remedy(text, path, problem, remedy):
    assert_one_fault(text, path, problem, remedy)
