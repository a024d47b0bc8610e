"""The executor of device cuda, held to the CPU's: on the kernels' references everywhere, on the kernels on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from executor_runner import Runner, load
from host_device import HostDevice
from safetensors.numpy import save_file

from edged.config import AttentionConfig, ModelConfig
from edged.errors import CheckpointError, UnsupportedError
from edged.executor.base import SamplingRow
from edged.executor.cuda_executor import CudaExecutor
from edged.executor.host_sampler import HostOptions, HostSampler
from edged.memory.buffers import ModelPlan, step_buffers, weight_buffers
from edged.memory.cuda_buffers import bucket_sizes, logit_rows
from edged.models.architecture import Architecture
from edged.models.weights import weight_specs
from plugins_trt.sample.reference import sample

SMALL = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 257,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
WIDE = {
    **SMALL,
    "model_type": "minicpm",
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "scale_emb": 3,
    "scale_depth": 1.4,
    "dim_model_base": 32,
}
BIASED = {**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
MODELS = {"small": SMALL, "wide": WIDE, "biased": BIASED}
LENGTH = 520
FEW = AttentionConfig(mode="sparse", dense_below=300, top_k=3, window=64)
SETTINGS = {"context_length": 1024, "max_sequences": 3, "prefill_chunk": 512}
ERROR = {"bfloat16": 0.06, "float16": 0.008}
"""Mean difference from fp32 over the spread of the logits: 16 and 13 bits of mantissa less, through two layers."""


def write_model(folder, config, seed=11):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for spec in weight_specs(Architecture.from_config(config)):
        for source in spec.sources:
            if len(source.shape) > 1:
                values = 1.5 * random.standard_normal(source.shape) / source.shape[-1] ** 0.5
            else:
                values = 0.5 + random.random(source.shape)
            tensors[source.name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, config) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(5).integers(0, 257, LENGTH).tolist()


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def open_device(request):
    """None: the first GPU."""
    return HostDevice if request.param == "references" else None


@pytest.fixture(scope="module")
def executors(folders, open_device):
    """Loads each executor once."""
    made = {}

    def get(model, dtype="bfloat16", attention=AttentionConfig()):  # noqa: B008 - frozen
        key = (model, dtype, attention)
        if key not in made:
            config = ModelConfig(
                name="m",
                path=folders[model],
                device="cuda",
                dtype=dtype,
                attention=attention,
                embeddings="mean",
                **SETTINGS,
            )
            made[key] = CudaExecutor(config, open_device)
            made[key].load(lambda *_: None)
        return made[key]

    yield get
    for executor in made.values():
        executor.close()


@pytest.fixture(scope="module")
def reference(folders, prompt):
    """fp32 logits of the prompt on the CPU."""
    made = {}

    def get(model, attention=AttentionConfig()):  # noqa: B008
        if (model, attention) not in made:
            executor = load(folders[model], dtype="float32", attention=attention, **SETTINGS)
            runner = Runner(executor)
            made[model, attention] = runner.prefill(runner.sequence(prompt), 260)
        return made[model, attention]

    return get


def error(ours, expected):
    assert np.isfinite(ours).all()
    return np.abs(ours - expected).mean() / expected.std()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_cpus(executors, reference, prompt, model, dtype):
    executor = executors(model, dtype)
    runner = Runner(executor)
    sequence = runner.sequence(prompt)
    ours = [runner.logits([(sequence, count)], "all") for count in (1, 2, 29, 200)]
    ours += [runner.logits([(sequence, 1)]) for _ in range(5)]
    ours = np.concatenate(ours)
    assert error(ours, reference(model)[: len(ours)]) < ERROR[dtype]


@pytest.mark.parametrize("model", ["small", "wide"])
def test_sparse_logits_are_the_cpus(executors, reference, prompt, model):
    executor = executors(model, "float16", FEW)
    expected = reference(model, FEW)
    runner = Runner(executor)
    sequence = runner.sequence(prompt)
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


def test_a_sequence_crosses_dense_below_while_decoding(executors, reference, prompt):
    executor = executors("small", "float16", FEW)
    runner = Runner(executor)
    sequence = runner.sequence(prompt[:330])
    runner.logits([(sequence, 280)], "none")
    ours = np.concatenate([runner.logits([(sequence, 1)]) for _ in range(50)])
    rows = np.abs(ours - reference("small", FEW)[280:330]).mean(1) / reference("small", FEW).std()
    assert np.median(rows) < ERROR["float16"]
    assert np.sort(rows)[-3] < 5 * ERROR["float16"]


def test_sparse_equals_dense_when_every_block_is_selected(executors, prompt):
    every = AttentionConfig(mode="sparse", dense_below=0, top_k=100, window=64)
    results = []
    for attention in (AttentionConfig(), every):
        runner = Runner(executors("wide", "float16", attention))
        sequence = runner.sequence(prompt)
        runner.logits([(sequence, 500)], "none")
        results.append(np.concatenate([runner.logits([(sequence, 1)]) for _ in range(20)]))
    assert error(results[1], results[0]) < ERROR["float16"]


@pytest.mark.parametrize("attention", [AttentionConfig(), FEW])
def test_nothing_depends_on_how_a_prompt_is_cut(executors, prompt, attention):
    executor = executors("small", "float16", attention)
    results = []
    for chunk in (7, 64, 512):
        runner = Runner(executor)
        sequence = runner.sequence(prompt)
        first = runner.prefill(sequence, chunk, "last")
        results.append(first)
    for other in results[1:]:
        assert error(other, results[0]) < ERROR["float16"]


def test_ragged_steps_in_scattered_pages_give_what_each_sequence_gives_alone(executors, reference, prompt):
    executor = executors("small", "float16")
    expected = reference("small")
    runner = Runner(executor)
    order = np.random.default_rng(1).permutation(executor.limits.pages).tolist()
    sequences = [runner.sequence(prompt, pages=order[at : at + 9]) for at in (0, 9, 18)]
    runner.logits([(sequences[0], 250)], "none")
    got = runner.logits([(sequences[0], 1), (sequences[1], 70), (sequences[2], 3)])
    assert error(got, expected[[250, 69, 2]]) < ERROR["float16"]
    got = runner.logits(
        [(sequence, 1) for sequence in sequences]
    )  # a decode step of three, in a bucket of four
    assert error(got, expected[[251, 70, 3]]) < ERROR["float16"]
    got = runner.logits([(sequences[2], 1)])
    assert error(got, expected[[4]]) < ERROR["float16"]


def test_padding_writes_no_page(executors, prompt):
    executor = executors("small", "float16")
    for name in ("keys", "values"):
        executor.buffers[name].fill_(float("nan"))
    runner = Runner(executor)
    sequence = runner.sequence(prompt[:70], pages=[5, 3])
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


ROWS = (
    SamplingRow(temperature=0.8, seed=7),
    SamplingRow(temperature=1.3, top_k=5, seed=1),
    SamplingRow(temperature=1.0, top_p=0.7, seed=2**63 + 5),
    SamplingRow(temperature=0.7, top_k=40, top_p=0.9, seed=3),
    SamplingRow(temperature=1e-3, seed=3),
    SamplingRow(),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hidden_states_are_the_cpus(executors, folders, prompt, dtype):
    cpu = load(folders["small"], dtype="float32", **SETTINGS)
    wanted, found = [], []
    for executor, states in ((cpu, wanted), (executors("small", dtype), found)):
        runner = Runner(executor)
        long, short = runner.sequence(prompt[:300]), runner.sequence(prompt[300:340])
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


def test_tokens_are_drawn_as_the_reference_draws_them(executors, prompt):
    executor = executors("small", "float16")
    runner = Runner(executor)
    sequence = runner.sequence(prompt)
    runner.logits([(sequence, 100)], "none")
    for position in range(8):
        for row in ROWS:
            row = replace(row, position=position)  # noqa: PLW2901
            batch = replace(runner.batch([(sequence, 1)]), sampling=(row,))
            logits = torch.from_numpy(executor.logits(batch))
            expected = sample(
                logits,
                temperatures=[row.temperature],
                top_ks=[row.top_k],
                top_ps=[row.top_p],
                seeds=[row.seed],
                positions=[row.position],
            )
            assert executor.step(batch).tolist() == expected.tolist()


def test_rows_of_every_kind_share_a_step(executors, prompt):
    """A greedy row, one drawn on the device, one with a penalty that only the host's sampler knows."""
    executor = executors("small", "float16")

    def rows():
        options = HostOptions(repetition_penalty=1.5, logprobs=2)
        return (
            SamplingRow(),
            SamplingRow(temperature=1.0, seed=4, position=30),
            SamplingRow(host=HostSampler(options, prompt[:30])),
        )

    alone = []
    for row in rows():
        runner = Runner(executor)
        batch = replace(runner.batch([(runner.sequence(prompt[:30]), 30)]), sampling=(row,))
        alone += executor.step(batch).tolist()
    runner = Runner(executor)
    chosen = rows()
    batch = runner.batch([(runner.sequence(prompt[:30]), 30) for _ in range(3)])
    assert executor.step(replace(batch, sampling=chosen)).tolist() == alone
    assert chosen[2].host is not None
    assert chosen[2].host.logprobs is not None


def test_many_rows_are_drawn_as_each_alone(folders, open_device, prompt):
    """More rows than one at a time makes their random numbers."""
    config = ModelConfig(
        name="m",
        path=folders["small"],
        device="cuda",
        dtype="float16",
        context_length=64,
        max_sequences=20,
        prefill_chunk=64,
    )
    executor = CudaExecutor(config, open_device)
    executor.load(lambda *_: None)
    rows = tuple(SamplingRow(temperature=1.0, seed=seed, position=3) for seed in range(20))
    runner = Runner(executor)
    sequences = [runner.sequence(prompt[:9]) for _ in rows]
    for sequence in sequences:
        runner.logits([(sequence, 8)], "none")
    batch = replace(runner.batch([(sequence, 1) for sequence in sequences]), sampling=rows)
    # Each by its own number, whether one or many are made at a time. (Logits of another bucket are rounded another way.)
    for each in (batch, *(runner.batch([(sequence, 1)]) for sequence in sequences[:3])):
        some = replace(each, sampling=rows[: len(each.logit_rows)])
        logits = torch.from_numpy(executor.logits(some))
        expected = sample(
            logits,
            temperatures=[1.0] * len(logits),
            top_ks=[0] * len(logits),
            top_ps=[1.0] * len(logits),
            seeds=range(len(logits)),
            positions=[3] * len(logits),
        )
        assert executor.step(some).tolist() == expected.tolist()
    executor.close()


def test_a_step_that_needs_no_row_draws_nothing(executors, prompt):
    executor = executors("small", "float16")
    runner = Runner(executor)
    batch = runner.batch([(runner.sequence(prompt), 100)], "none")
    assert executor.step(batch).tolist() == []


def test_pages_are_copied_bit_by_bit(executors, prompt):
    executor = executors("small", "float16", FEW)
    runner = Runner(executor)
    sequence = runner.sequence(prompt, pages=list(range(9)))
    runner.logits([(sequence, 500)], "none")
    expected = runner.logits([(sequence, 1)])
    saved = np.empty((9, executor.page_bytes), np.uint8)
    executor.read_pages(np.arange(9, dtype=np.int32), saved)
    for name in ("keys", "values", "fine", "coarse"):
        executor.buffers[name].fill_(0)
    executor.write_pages(np.arange(20, 29, dtype=np.int32), saved)
    moved = runner.sequence(prompt, pages=list(range(20, 29)))
    moved.stored = 500
    np.testing.assert_array_equal(runner.logits([(moved, 1)]), expected)


def test_buffers_are_those_of_the_plan(executors):
    for attention in (AttentionConfig(), FEW):
        executor = executors("small", "float16", attention)
        specs = (*weight_buffers(executor.plan), *step_buffers(executor.plan))
        assert {spec.name for spec in specs} == set(executor.buffers)
        for spec in specs:
            assert executor.buffers[spec.name].untyped_storage().nbytes() == spec.nbytes


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


def test_a_checkpoint_that_does_not_load_leaves_nothing(folders, tmp_path):
    bad = write_model(tmp_path / "bad", {**SMALL, "num_hidden_layers": 1})
    (bad / "config.json").write_text((folders["small"] / "config.json").read_text())
    executor = CudaExecutor(
        ModelConfig(name="m", path=bad, device="cuda", dtype="bfloat16", **SETTINGS), HostDevice
    )
    with pytest.raises(CheckpointError, match="missing"):
        executor.load(lambda *_: None)
    assert executor.buffers == {}
    assert not hasattr(executor, "device")


def test_what_the_kernels_do_not_do_is_refused(folders, tmp_path):
    def refused(**changes):
        config = ModelConfig(
            name="m", **{"path": folders["small"], "device": "cuda", "dtype": "bfloat16", **changes}
        )
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
