"""The executor of device cuda, held to the CPU's: on the kernels' references everywhere, on the kernels on a GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cuda_models import ERROR, FEW, MODELS, PROMPT, SETTINGS, SMALL, CudaExecutors, error, write_model
from executor_runner import Runner, load
from fixtures.held_buffers import check_buffers
from host_device import HostDevice

from edged.config import AttentionConfig, ModelConfig
from edged.errors import CheckpointError, UnsupportedError
from edged.executor.cuda_executor import CudaExecutor
from edged.memory.buffers import ModelPlan, step_buffers, weight_buffers
from edged.memory.cuda_buffers import bucket_sizes, logit_rows
from edged.models.architecture import Architecture


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def executors(tmp_path_factory, request):
    made = CudaExecutors(tmp_path_factory.mktemp("models"), request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(executors):
    """fp32 logits of the prompt on the CPU."""
    made = {}

    def get(model, attention=AttentionConfig()):  # noqa: B008
        if (model, attention) not in made:
            executor = load(executors.folders[model], dtype="float32", attention=attention, **SETTINGS)
            runner = Runner(executor)
            made[model, attention] = runner.prefill(runner.sequence(PROMPT), 260)
        return made[model, attention]

    return get


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_cpus(executors, reference, model, dtype):
    executor = executors(model, dtype)
    runner = Runner(executor)
    sequence = runner.sequence(PROMPT)
    ours = [runner.logits([(sequence, count)], "all") for count in (1, 2, 29, 200)]
    ours += [runner.logits([(sequence, 1)]) for _ in range(5)]
    ours = np.concatenate(ours)
    assert error(ours, reference(model)[: len(ours)]) < ERROR[dtype]


@pytest.mark.parametrize("model", ["small", "wide"])
def test_sparse_logits_are_the_cpus(executors, reference, model):
    executor = executors(model, "float16", FEW)
    expected = reference(model, FEW)
    runner = Runner(executor)
    sequence = runner.sequence(PROMPT)
    ours = [
        runner.logits([(sequence, count)], "all") for count in (280, 40, 150)
    ]  # the second crosses dense_below
    ours += [runner.logits([(sequence, 1)]) for _ in range(25)]
    ours = np.concatenate(ours)
    expected = expected[: len(ours)]
    rows = np.abs(ours - expected).mean(1) / expected.std()
    # A block within rounding of the last one chosen may be swapped, here and there.
    assert np.median(rows) < ERROR["float16"]
    assert (rows > 5 * ERROR["float16"]).mean() < 0.05
    assert error(expected, reference(model)[: len(ours)]) > 10 * ERROR["float16"]


def test_a_sequence_crosses_dense_below_while_decoding(executors, reference):
    executor = executors("small", "float16", FEW)
    runner = Runner(executor)
    sequence = runner.sequence(PROMPT[:330])
    runner.logits([(sequence, 280)], "none")
    ours = np.concatenate([runner.logits([(sequence, 1)]) for _ in range(50)])
    rows = np.abs(ours - reference("small", FEW)[280:330]).mean(1) / reference("small", FEW).std()
    assert np.median(rows) < ERROR["float16"]
    assert np.sort(rows)[-3] < 5 * ERROR["float16"]


def test_sparse_equals_dense_when_every_block_is_selected(executors):
    every = AttentionConfig(mode="sparse", dense_below=0, top_k=100, window=64)
    results = []
    for attention in (AttentionConfig(), every):
        runner = Runner(executors("wide", "float16", attention))
        sequence = runner.sequence(PROMPT)
        runner.logits([(sequence, 500)], "none")
        results.append(np.concatenate([runner.logits([(sequence, 1)]) for _ in range(20)]))
    assert error(results[1], results[0]) < ERROR["float16"]


@pytest.mark.parametrize("attention", [AttentionConfig(), FEW])
def test_nothing_depends_on_how_a_prompt_is_cut(executors, attention):
    executor = executors("small", "float16", attention)
    results = []
    for chunk in (7, 64, 512):
        runner = Runner(executor)
        sequence = runner.sequence(PROMPT)
        first = runner.prefill(sequence, chunk, "last")
        results.append(first)
    for other in results[1:]:
        assert error(other, results[0]) < ERROR["float16"]


def test_ragged_steps_in_scattered_pages_give_what_each_sequence_gives_alone(executors, reference):
    executor = executors("small", "float16")
    expected = reference("small")
    runner = Runner(executor)
    order = np.random.default_rng(1).permutation(executor.limits.pages).tolist()
    sequences = [runner.sequence(PROMPT, pages=order[at : at + 9]) for at in (0, 9, 18)]
    runner.logits([(sequences[0], 250)], "none")
    got = runner.logits([(sequences[0], 1), (sequences[1], 70), (sequences[2], 3)])
    assert error(got, expected[[250, 69, 2]]) < ERROR["float16"]
    got = runner.logits(
        [(sequence, 1) for sequence in sequences]
    )  # a decode step of three, in a bucket of four
    assert error(got, expected[[251, 70, 3]]) < ERROR["float16"]
    got = runner.logits([(sequences[2], 1)])
    assert error(got, expected[[4]]) < ERROR["float16"]


def test_padding_writes_no_page(executors):
    executor = executors("small", "float16")
    for name in ("keys", "values"):
        executor.buffers[name].fill_(float("nan"))
    runner = Runner(executor)
    sequence = runner.sequence(PROMPT[:70], pages=[5, 3])
    assert np.isfinite(runner.logits([(sequence, 37)])).all()
    assert np.isfinite(runner.logits([(sequence, 33)])).all()
    for name in ("keys", "values"):
        pool = executor.buffers[name].cpu()
        assert pool[:, 5].isfinite().all()
        assert pool[:, 3, :, :6].isfinite().all()
        assert pool[:, 3, :, 6:].isnan().all()
        untouched = [page for page in range(executor.limits.pages) if page not in (3, 5)]
        assert pool[:, untouched].isnan().all()
        executor.buffers[name].fill_(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hidden_states_are_the_cpus(executors, dtype):
    cpu = load(executors.folders["small"], dtype="float32", **SETTINGS)
    wanted, found = [], []
    for executor, states in ((cpu, wanted), (executors("small", dtype), found)):
        runner = Runner(executor)
        long, short = runner.sequence(PROMPT[:300]), runner.sequence(PROMPT[300:340])
        for parts, rows in (([(long, 200)], "all"), ([(long, 100), (short, 40)], "last")):
            batch = runner.batch(parts, rows)
            states.append(executor.hidden_states(batch))
            for sequence, count in parts:
                sequence.stored += count
    cpu.close()
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == np.float32
        assert np.abs(one - other).mean() / other.std() < ERROR[dtype]


def test_pages_are_copied_bit_by_bit(executors):
    executor = executors("small", "float16", FEW)
    runner = Runner(executor)
    sequence = runner.sequence(PROMPT, pages=list(range(9)))
    runner.logits([(sequence, 500)], "none")
    expected = runner.logits([(sequence, 1)])
    saved = np.empty((9, executor.page_bytes), np.uint8)
    executor.read_pages(np.arange(9, dtype=np.int32), saved)
    for name in ("keys", "values", "fine", "coarse"):
        executor.buffers[name].fill_(0)
    executor.write_pages(np.arange(20, 29, dtype=np.int32), saved)
    moved = runner.sequence(PROMPT, pages=list(range(20, 29)))
    moved.stored = 500
    np.testing.assert_array_equal(runner.logits([(moved, 1)]), expected)


def test_buffers_are_those_of_the_plan(executors):
    for attention in (AttentionConfig(), FEW):
        executor = executors("small", "float16", attention)
        specs = (*weight_buffers(executor.plan), *step_buffers(executor.plan))
        check_buffers(executor.buffers, specs)


def test_buckets_are_powers_of_two_and_the_longest_step():
    architecture = Architecture.from_config(SMALL)

    def plan(chunk, sequences):
        return ModelPlan(architecture, "bfloat16", 8192, sequences, chunk, device="cuda")

    assert bucket_sizes(plan(1, 1)) == (1, 2)
    assert bucket_sizes(plan(40, 3)) == (1, 2, 4, 8, 16, 32, 64)
    assert bucket_sizes(plan(64, 1)) == (1, 2, 4, 8, 16, 32, 64, 80)
    assert bucket_sizes(plan(2048, 1))[-2:] == (2048, 2064)
    assert bucket_sizes(plan(8192, 4))[-2:] == (2048, 8208)
    assert [logit_rows(plan(2048, 5), tokens) for tokens in (1, 4, 2048)] == [1, 4, 8]


def test_a_checkpoint_that_does_not_load_leaves_nothing(tmp_path):
    bad = write_model(tmp_path / "bad", {**SMALL, "num_hidden_layers": 1})
    (bad / "config.json").write_text(json.dumps(SMALL))
    executor = CudaExecutor(
        ModelConfig(name="m", path=bad, device="cuda", dtype="bfloat16", **SETTINGS), HostDevice
    )
    with pytest.raises(CheckpointError, match="missing"):
        executor.load(lambda *_: None)
    assert executor.buffers == {}
    assert not hasattr(executor, "device")


def test_what_the_kernels_do_not_do_is_refused(tmp_path):
    small = write_model(tmp_path / "small", SMALL)

    def refused(**changes):
        config = ModelConfig(name="m", **{"path": small, "device": "cuda", "dtype": "bfloat16", **changes})
        with pytest.raises(UnsupportedError) as caught:
            CudaExecutor(config, HostDevice)
        return caught.value.message

    assert "set dtype to bfloat16 or float16" in refused(dtype="float32")
    narrow = write_model(tmp_path / "narrow", {**SMALL, "head_dim": 32})
    assert "head_dim: 32" in refused(path=narrow)
    long = refused(context_length=2**20, attention=FEW)
    assert "set it to at most 524288" in long
    odd = write_model(tmp_path / "odd", {**SMALL, "hidden_size": 40})
    assert "hidden_size 40 is no multiple of 32" in refused(path=odd)
