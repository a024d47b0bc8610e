"""On a GPU: the demo model held to the CPU, long generations, and memory that stays as it was planned.

The demo model's folder may be named by EDGED_DEMO_MODEL, for machines that cannot import it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_models import SMALL, write_model
from executor_runner import Runner, load

from edged.config import AttentionConfig, ModelConfig
from edged.executor.base import SamplingRow

pytestmark = pytest.mark.gpu

SPARSE = AttentionConfig(mode="sparse", dense_below=300, top_k=4, window=128)
NEAR_TIE = 0.35
"""Where the CPU's two best logits are closer than this, bfloat16 may choose either: it changes a logit of this model by
0.05 on average (a spread of 3)."""
TEXT = (
    "Once upon a time, in a village by the sea, there lived a robot that repaired boats. On day {0} it drove {1} metres "
    "and met {2} people. "
)


@pytest.fixture(scope="module")
def folder(request):
    named = os.environ.get("EDGED_DEMO_MODEL")
    return Path(named) if named else request.getfixturevalue("demo_model")


@pytest.fixture(scope="module")
def tokenizer(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    texts = ("The capital of France is", "def fibonacci(n):\n    if n < 2:\n", "SELECT name, COUNT(*) FROM")
    long = "".join(TEXT.format(day, day * 37 % 101, day % 7) for day in range(30))
    return [tokenizer.encode(text).ids for text in texts] + [tokenizer.encode(long).ids[:600]]


def on_gpu(folder, **settings):
    from edged.executor.cuda_executor import CudaExecutor

    settings = {"context_length": 2048, "max_sequences": 4, "prefill_chunk": 512, **settings}
    executor = CudaExecutor(
        ModelConfig(name="m", path=folder, device="cuda", **{"dtype": "bfloat16", **settings})
    )
    executor.load(lambda *_: None)
    return executor


def assert_tokens(executor, prompt, answer):
    """Each token is the CPU's choice after those before it, or nearly."""
    runner = Runner(executor)
    sequence = runner.sequence([*prompt, *answer[:-1]])
    while sequence.stored < len(prompt) - 1:
        runner.logits([(sequence, min(300, len(prompt) - 1 - sequence.stored))], "none")
    logits = runner.logits([(sequence, len(answer))], "all")
    gaps = logits.max(1) - logits[np.arange(len(answer)), answer]
    assert gaps.max() < NEAR_TIE, gaps
    assert (gaps > 0).mean() < 0.1
    return gaps


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_the_cpus_within_rounding(folder, prompts, dtype, record_property):
    cpu = load(folder, dtype="float32", context_length=2048, max_sequences=4, prefill_chunk=512)
    cuda = on_gpu(folder, dtype=dtype)
    for prompt in prompts:
        ours, expected = (
            (runner := Runner(executor)).prefill(runner.sequence(prompt), 300) for executor in (cuda, cpu)
        )
        error = np.abs(ours - expected).mean() / expected.std()
        record_property(f"mean error over {len(prompt)} tokens", f"{error:.4f} of {expected.std():.2f}")
        assert error < (0.04 if dtype == "bfloat16" else 0.006)
    cuda.close()


def test_greedy_tokens_are_the_cpus(folder, prompts, record_property):
    cpu = load(folder, dtype="float32", context_length=2048, max_sequences=4, prefill_chunk=512)
    cuda = on_gpu(folder)
    runner = Runner(cuda)
    answers = runner.generate([runner.sequence(prompt, room=64) for prompt in prompts], 64)
    for prompt, answer in zip(prompts, answers, strict=True):
        gaps = assert_tokens(cpu, prompt, answer)
        record_property(f"after {len(prompt)} tokens", f"{(gaps > 0).sum()} near ties, {gaps.max():.3f}")
    cuda.close()


def test_sparse_tokens_are_those_of_the_cpus_sparse_reference(folder, prompts, record_property):
    cpu = load(
        folder, dtype="bfloat16", context_length=1024, max_sequences=1, prefill_chunk=512, attention=SPARSE
    )
    cuda = on_gpu(folder, context_length=1024, attention=SPARSE)
    prompt = prompts[-1][:400]
    runner = Runner(cuda)
    answer = runner.generate([runner.sequence(prompt, room=48)], 48, 200)[0]
    gaps = assert_tokens(cpu, prompt, answer)
    record_property("near ties", f"{(gaps > 0).sum()}, {gaps.max():.3f}")
    cuda.close()


def test_a_graph_replayed_over_1000_tokens_keeps_the_compressed_keys_complete(tmp_path):
    cuda = on_gpu(write_model(tmp_path / "m", SMALL), context_length=1280, attention=SPARSE)
    for name in ("keys", "values", "fine", "coarse"):
        cuda.buffers[name].fill_(float("nan"))
    runner = Runner(cuda)
    prompt = np.random.default_rng(3).integers(0, 257, 200).tolist()
    sequence = runner.sequence(prompt, pages=np.random.default_rng(1).permutation(60)[:20].tolist())
    answer = runner.generate([sequence], 1001)[0]
    stored = sequence.stored
    assert stored == 1200
    table = torch.from_numpy(sequence.table).long().cuda()

    def whole(name):
        """[layers, kv_heads, positions, D]"""
        return cuda.buffers[name][:, table].transpose(1, 2).flatten(2, 3).float()

    keys = whole("keys")[:, :, :stored]
    for name, kernel, stride in (("fine", 32, 16), ("coarse", 128, 64)):
        means = keys.unfold(2, kernel, stride).mean(-1)
        found = whole(name)[:, :, 1 : 1 + means.shape[2]]
        torch.testing.assert_close(found, means, rtol=2**-7, atol=1e-3)
        assert whole(name)[:, :, 1 + means.shape[2] :].isnan().all()
    # The same tokens prefilled at once leave the same pages and choose the same next token.
    runner = Runner(cuda)
    again = runner.sequence([*prompt, *answer[:-1]], pages=list(range(20, 40)))
    logits = runner.prefill(again, 512, "last")
    assert logits[0, answer[-1]] > logits[0].max() - 0.3 * logits[0].std()
    cuda.close()


def test_no_memory_is_taken_after_loading(tmp_path):
    cuda = on_gpu(write_model(tmp_path / "m", SMALL), attention=SPARSE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    runner = Runner(cuda)
    sequences = [runner.sequence(list(range(200)), room=100) for _ in range(4)]
    runner.generate(sequences, 50)
    for count in (1, 3, 30, 100):
        other = Runner(cuda)
        batch = other.batch([(other.sequence(list(range(200))), count)])
        warm = [SamplingRow(temperature=1.0, seed=1, position=count) for _ in batch.sampling]
        batch = type(batch)(**{**vars(batch), "sampling": tuple(warm)})
        cuda.step(batch)
        cuda.logits(batch)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]) == before
    cuda.close()


def test_closing_gives_the_memory_back(tmp_path):
    folder = write_model(tmp_path / "m", SMALL)
    on_gpu(folder, attention=SPARSE).close()  # what a process holds once anyway
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        cuda = on_gpu(folder, context_length=32768, attention=SPARSE)
        assert torch.cuda.mem_get_info()[0] < free - (100 << 20)
        cuda.close()
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] > free - (48 << 20)
