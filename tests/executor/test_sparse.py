"""Sparse attention on the CPU: equal to dense where it must be, whatever the cut of the prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from executor_runner import Runner, load
from random_weights import write_random

from edged.config import AttentionConfig

CONFIG = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
SPARSE = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "block_size": 64,
    "init_blocks": 1,
    "window_size": 64,
    "topk": 3,
    "dense_len": 300,
    "use_nope": False,
}
LENGTH = 760
FEW = AttentionConfig(mode="sparse", dense_below=300, top_k=3, window=64)
ALL = AttentionConfig(mode="sparse", dense_below=0, top_k=100, window=64)
SETTINGS = {"dtype": "float64", "context_length": 1024, "max_sequences": 3, "prefill_chunk": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("model"), CONFIG, deviation=2)


@pytest.fixture(scope="module")
def dense(folder):
    return load(folder, **SETTINGS)


@pytest.fixture(scope="module")
def sparse(folder):
    return load(folder, **SETTINGS, attention=FEW)


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(5).integers(0, 61, LENGTH).tolist()


@pytest.fixture(scope="module")
def whole(sparse, prompt):
    """Logits of the prompt run as one chunk."""
    runner = Runner(sparse)
    return runner.prefill(runner.sequence(prompt), LENGTH)


def prefill(executor, prompt, chunk):
    runner = Runner(executor)
    return runner.prefill(runner.sequence(prompt), chunk)


def test_it_differs_from_dense_from_dense_below_on_and_not_before(dense, whole, prompt):
    expected = prefill(dense, prompt, LENGTH)
    # The query at position i is dense while i + 1 < dense_below.
    np.testing.assert_allclose(whole[:299], expected[:299], rtol=0, atol=1e-5)
    assert np.abs(whole[320:] - expected[320:]).max() > 0.1


def test_sparse_equals_dense_when_every_block_is_selected(folder, dense, prompt):
    executor = load(folder, **SETTINGS, attention=ALL)
    expected = prefill(dense, prompt, LENGTH)
    for chunk in (LENGTH, 130):
        np.testing.assert_allclose(prefill(executor, prompt, chunk), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_nothing_depends_on_how_a_prompt_is_cut(sparse, whole, prompt, chunk):
    length = 420 if chunk == 1 else LENGTH
    np.testing.assert_allclose(prefill(sparse, prompt[:length], chunk), whole[:length], rtol=0, atol=1e-4)


def test_a_sequence_crosses_dense_below_while_decoding(sparse, whole, prompt):
    runner = Runner(sparse)
    sequence = runner.sequence(prompt[:340])
    runner.logits([(sequence, 290)], "none")
    got = np.concatenate([runner.logits([(sequence, 1)]) for _ in range(50)])
    np.testing.assert_allclose(got, whole[290:340], rtol=0, atol=1e-4)


def test_ragged_steps_give_what_each_sequence_gives_alone(sparse, whole, prompt):
    runner = Runner(sparse)
    order = np.random.default_rng(1).permutation(sparse.limits.pages).tolist()
    sequences = [runner.sequence(prompt, pages=order[at : at + 12]) for at in (0, 12, 24)]
    runner.logits([(sequences[0], 250)], "none")
    got = runner.logits([(sequences[0], 90), (sequences[1], 700), (sequences[2], 1)], "all")
    np.testing.assert_allclose(got[:90], whole[250:340], rtol=0, atol=1e-4)
    np.testing.assert_allclose(got[90:790], whole[:700], rtol=0, atol=1e-4)
    got = runner.logits([(sequences[0], 1), (sequences[1], 1), (sequences[2], 400)])
    np.testing.assert_allclose(got, whole[[340, 700, 400]], rtol=0, atol=1e-4)


def test_compressed_keys_are_means_of_the_stored_keys(sparse, prompt):
    runner = Runner(sparse)
    sequence = runner.sequence(prompt, pages=list(range(12)))
    runner.logits([(sequence, 33)], "none")
    while sequence.stored < LENGTH:
        runner.logits([(sequence, 61)], "none")
    keys = sparse.buffers["kv"][:, :2, :LENGTH]  # [layers, kv_heads, n, D]; consecutive pages
    for name, kernel, stride, slots in (("fine", 32, 16, 4), ("coarse", 128, 64, 1)):
        means = keys.unfold(2, kernel, stride).mean(-1)  # [layers, kv_heads, count, D]
        pool = (
            sparse.buffers[name][:, :12].permute(0, 2, 1, 3, 4).flatten(2, 3)
        )  # [layers, kv_heads, 12 slots, D]
        stored = pool[:, :, 1 : 1 + means.shape[2]]
        assert means.shape[2] == (LENGTH - kernel) // stride + 1
        assert pool.shape[2] == 12 * slots
        torch.testing.assert_close(stored, means, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_stays_close(folder, whole, prompt, dtype):
    executor = load(folder, **{**SETTINGS, "dtype": dtype}, attention=FEW)
    ours = prefill(executor, prompt[:500], 200)
    error = np.abs(ours - whole[:500]).mean() / whole.std()
    assert error < {"bfloat16": 0.1, "float16": 0.02, "float32": 1e-3}[dtype]


def test_a_model_with_a_sparse_config_is_sparse_by_itself(folder, whole, prompt, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "sparse_config": SPARSE}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    executor = load(tmp_path, **SETTINGS)
    np.testing.assert_allclose(prefill(executor, prompt, LENGTH), whole, rtol=0, atol=1e-6)
    dense = load(tmp_path, **SETTINGS, attention=AttentionConfig(mode="dense"))
    assert "fine" not in dense.buffers
