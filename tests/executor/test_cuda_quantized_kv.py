"""Keys and values in eight bits on device cuda, held to the CPU's executor: on the kernels' references and on a GPU."""

import numpy as np
import pytest
import torch
from cuda_models import FEW, SETTINGS, SMALL, WIDE, error, write_model
from executor_runner import Runner, load
from host_device import HostDevice

from edged.config import AttentionConfig, ModelConfig
from edged.executor.cuda_executor import CudaExecutor
from edged.memory.buffers import step_buffers

FORMATS = ["int8", "fp8"]
POOLS = ("keys", "values", "key_scales", "value_scales", "fine", "coarse")
LENGTH = 520
ALL = AttentionConfig(mode="sparse", dense_below=0, top_k=100, window=64)
WORST = 0.06
"""Mean difference over the spread of the logits: what bfloat16's activations cost (cuda_models)."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, config) for name, config in {"small": SMALL, "wide": WIDE}.items()}


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(5).integers(0, 257, LENGTH).tolist()


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def executors(request, folders):
    """Loads each executor once."""
    device = HostDevice if request.param == "references" else None
    made = {}

    def get(model, kv_dtype, attention=AttentionConfig(), dtype="bfloat16"):  # noqa: B008 - frozen
        key = (model, kv_dtype, attention, dtype)
        if key not in made:
            config = ModelConfig(
                name="m",
                path=folders[model],
                device="cuda",
                dtype=dtype,
                kv_dtype=kv_dtype,
                attention=attention,
                **SETTINGS,
            )
            made[key] = CudaExecutor(config, device)
            made[key].load(lambda *_: None)
        return made[key]

    yield get
    for executor in made.values():
        executor.close()


@pytest.fixture(scope="module")
def reference(folders, prompt):
    """fp32 logits of the prompt on the CPU, with keys and values in eight bits."""
    made = {}

    def get(model, kv_dtype, attention=AttentionConfig()):  # noqa: B008
        if (model, kv_dtype, attention) not in made:
            executor = load(
                folders[model], dtype="float32", kv_dtype=kv_dtype, attention=attention, **SETTINGS
            )
            runner = Runner(executor)
            made[model, kv_dtype, attention] = runner.prefill(runner.sequence(prompt), 260)
        return made[model, kv_dtype, attention]

    return get


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("kind", [("small", "bfloat16"), ("wide", "bfloat16"), ("small", "float16")])
def test_logits_are_the_cpus(executors, reference, prompt, kv_dtype, kind):
    model, dtype = kind
    executor = executors(model, kv_dtype, dtype=dtype)
    assert executor.buffers["keys"].element_size() == 1
    for cut in (512, 100, 33):
        runner = Runner(executor)
        got = runner.prefill(runner.sequence(prompt), cut)
        assert error(got, reference(model, kv_dtype)) < WORST, cut


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_sparse_logits_are_the_cpus(executors, reference, prompt, kv_dtype):
    expected = reference("wide", kv_dtype, FEW)
    for cut in (512, 64):
        runner = Runner(executors("wide", kv_dtype, FEW))
        got = runner.prefill(runner.sequence(prompt), cut)
        # A block whose score is within rounding of the last one in may be swapped, in a few rows.
        rows = np.abs(got - expected).mean(1) / expected.std()
        assert np.median(rows) < WORST
        assert (rows > 4 * WORST).mean() < 0.1


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_sparse_equals_dense_when_every_block_is_selected(executors, prompt, kv_dtype):
    logits = []
    for attention in (AttentionConfig(), ALL):
        runner = Runner(executors("wide", kv_dtype, attention))
        logits.append(runner.prefill(runner.sequence(prompt), 256))
    assert error(logits[1], logits[0]) < WORST / 4


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("attention", [AttentionConfig(), FEW])
def test_decoded_tokens_are_those_of_the_same_prompt_prefilled(executors, prompt, kv_dtype, attention):
    """Greedy tokens, one step each, and the logits of all of them in one piece."""
    executor = executors("wide", kv_dtype, attention)
    runner = Runner(executor)
    sequence = runner.sequence(prompt[:310], room=40)
    runner.prefill(sequence, 310)
    tokens = list(prompt[:310])
    for _ in range(12):
        sequence.stored -= 1
        tokens.append(int(executor.logits(runner.batch([(sequence, 1)]))[0].argmax()))
        sequence.stored += 1
        sequence.tokens.append(tokens[-1])
        runner.prefill(sequence, 1)
    runner = Runner(executor)
    whole = runner.prefill(runner.sequence(tokens), 512)
    top = whole[309:-1].max(1) - whole[np.arange(309, len(tokens) - 1), tokens[310:]]
    assert top.max() < 0.1 * whole.std()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_pages_are_copied_bit_by_bit_with_their_scales(executors, prompt, kv_dtype):
    executor = executors("wide", kv_dtype, FEW)
    runner = Runner(executor)
    sequence = runner.sequence(prompt)
    runner.prefill(sequence, 512)
    pages = np.asarray(sequence.table)
    saved = np.empty((len(pages), executor.page_bytes), np.uint8)
    executor.read_pages(pages, saved)
    before = {name: executor.buffers[name][:, pages].clone() for name in POOLS}
    for name in POOLS:
        executor.buffers[name].view(torch.uint8).fill_(0x7F)
    executor.write_pages(pages, saved)
    for name in POOLS:
        mine, theirs = executor.buffers[name][:, pages].view(torch.uint8), before[name].view(torch.uint8)
        assert torch.equal(mine, theirs), name


def test_buffers_are_those_of_the_plan(executors):
    executor = executors("wide", "int8", FEW)
    specs = {spec.name: spec for spec in step_buffers(executor.plan)}
    for name in ("keys", "values", "key_scales", "value_scales"):
        buffer = executor.buffers[name]
        assert buffer.numel() * buffer.element_size() == specs[name].nbytes
    assert executor.page_bytes == sum(specs[name].nbytes for name in POOLS) // executor.limits.pages
