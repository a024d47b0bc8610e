"""Neither pages, nor chunks, nor who shares the step change a result: float64, random cuts and tables."""

from __future__ import annotations

import numpy as np
import pytest
from executor_runner import Runner, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_weights import write_random

from edged.errors import InternalError, UnsupportedError
from edged.executor.base import PAGE_TOKENS
from edged.memory import buffers

CONFIG = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.35, "float16": 0.04}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module")
def executors(folder):
    return {
        dtype: load(folder, dtype=dtype, context_length=3000, max_sequences=5, prefill_chunk=3000)
        for dtype in TOLERANCE
    }


def test_the_page_size_is_one(executors):
    assert buffers.PAGE_TOKENS == PAGE_TOKENS


@given(data=st.data(), dtype=st.sampled_from(sorted(TOLERANCE)))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_in_any_pages_beside_anyone(executors, data, dtype):
    executor = executors[dtype]
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    length = st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 128, 1023, 1100, 1700, 2500]))
    lengths = data.draw(st.lists(length, min_size=1, max_size=4))
    prompts = [random.integers(0, 61, length).tolist() for length in lengths]
    expected = []
    for prompt in prompts:
        runner = Runner(executor)
        expected.append(runner.prefill(runner.sequence(prompt), 3000)[-40:])

    # Pages: consecutive, in a few runs, or scattered all over.
    count = sum(-(-length // PAGE_TOKENS) for length in lengths)
    pool = np.arange(executor.limits.pages)
    run = data.draw(st.sampled_from([1, 3, 9, 1000]))
    runs = np.array_split(pool, -(-len(pool) // run))
    order = np.concatenate([runs[index] for index in random.permutation(len(runs))])[:count].tolist()
    runner = Runner(executor)
    sequences = []
    for prompt in prompts:
        pages = -(-len(prompt) // PAGE_TOKENS)
        sequences.append(runner.sequence(prompt, pages=order[:pages]))
        order = order[pages:]

    most = data.draw(st.sampled_from([1, 7, 64, 700]))
    if most < 64 and max(lengths) > 300:
        most = 300
    got = [[] for _ in sequences]
    while any(s.stored < len(s.tokens) for s in sequences):
        parts, who = [], []
        for index, sequence in enumerate(sequences):
            left = len(sequence.tokens) - sequence.stored
            if left and (not parts or random.random() < 0.7):
                parts.append((sequence, int(random.integers(1, min(most, left) + 1))))
                who.append(index)
        logits = runner.logits(parts, rows="all")
        start = 0
        for (_, taken), index in zip(parts, who, strict=True):
            got[index].append(logits[start : start + taken])
            start += taken
    for ours, alone in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(ours)[-40:], alone, rtol=0, atol=TOLERANCE[dtype])


def test_rows_that_are_not_needed_cost_nothing_and_change_nothing(executors):
    runner = Runner(executors["float64"])
    prompt = list(range(50))
    every = runner.prefill(runner.sequence(prompt), 50)
    for cut in (10, 49):
        sequence = runner.sequence(prompt)
        none = runner.logits([(sequence, cut)], rows="none")
        assert none.shape == (0, 61)
        last = runner.logits([(sequence, 50)], rows="last")
        np.testing.assert_allclose(last[0], every[-1], rtol=0, atol=1e-6)


def test_stored_keys_and_values_end_where_the_tokens_do(executors):
    executor = executors["float64"]
    kv = executor.buffers["kv"]
    kv.fill_(float("nan"))  # whatever an old sequence left behind must not matter
    runner = Runner(executor)
    sequence = runner.sequence(list(range(60)), pages=[7])
    assert np.isfinite(runner.prefill(sequence, 17)).all()
    assert bool(kv[:, :, 7 * 64 : 7 * 64 + 60].isfinite().all())
    assert bool(kv[:, :, 7 * 64 + 60 : 8 * 64].isnan().all())
    kv.fill_(0)


def test_batches_outside_the_limits_are_refused(executors):
    executor = executors["float32"]
    runner = Runner(executor)
    with pytest.raises(InternalError, match="needs 2 pages, its table has 1"):
        runner.logits([(runner.sequence([1] * 65, pages=[0]), 65)])
    with pytest.raises(InternalError, match="1 to 5 sequences, this one has 6"):
        runner.logits([(runner.sequence([1], pages=[page]), 1) for page in range(6)])
    with pytest.raises(InternalError, match="1 to 3005 tokens"):
        runner.logits([(runner.sequence([1] * 4000), 4000)])


def test_a_device_or_dtype_it_does_not_have_is_refused(folder):
    with pytest.raises(UnsupportedError, match="set device to cpu"):
        load(folder, device="cuda")
    with pytest.raises(UnsupportedError, match="set one of float32, bfloat16, float16"):
        load(folder, dtype="int8")


def test_nothing_is_allocated_for_good_after_loading(folder):
    import gc

    import torch

    executor = load(folder, dtype="bfloat16", context_length=512, max_sequences=2, prefill_chunk=64)

    def tensors_alive():
        gc.collect()
        storages = {
            item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
            for item in gc.get_objects()
            if isinstance(item, torch.Tensor)
        }
        return sum(storages.values())

    def work():
        runner = Runner(executor)
        runner.generate(
            [runner.sequence(list(range(30)), room=20), runner.sequence(list(range(50)), room=20)], 20, 16
        )

    work()
    before = tensors_alive()
    for _ in range(3):
        work()
    assert tensors_alive() == before
