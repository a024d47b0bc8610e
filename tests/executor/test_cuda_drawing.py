"""Tokens drawn by the executor of device cuda, held to the reference: on the kernels' references everywhere, on a GPU on the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_models import PROMPT, CudaExecutors
from executor_runner import Runner

from edged.executor.base import SamplingRow
from edged.executor.host_sampler import HostOptions, HostSampler
from plugins_trt.sample.reference import sample

ROWS = (
    SamplingRow(temperature=0.8, seed=7),
    SamplingRow(temperature=1.3, top_k=5, seed=1),
    SamplingRow(temperature=1.0, top_p=0.7, seed=2**63 + 5),
    SamplingRow(temperature=0.7, top_k=40, top_p=0.9, seed=3),
    SamplingRow(temperature=1e-3, seed=3),
    SamplingRow(),
)


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def executors(tmp_path_factory, request):
    made = CudaExecutors(tmp_path_factory.mktemp("models"), request.param)
    yield made
    made.close()


def test_tokens_are_drawn_as_the_reference_draws_them(executors):
    executor = executors("small", "float16")
    runner = Runner(executor)
    sequence = runner.sequence(PROMPT)
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


def test_rows_of_every_kind_share_a_step(executors):
    """A greedy row, one drawn on the device, one with a penalty that only the host's sampler knows."""
    executor = executors("small", "float16")

    def rows():
        options = HostOptions(repetition_penalty=1.5, logprobs=2)
        return (
            SamplingRow(),
            SamplingRow(temperature=1.0, seed=4, position=30),
            SamplingRow(host=HostSampler(options, PROMPT[:30])),
        )

    alone = []
    for row in rows():
        runner = Runner(executor)
        batch = replace(runner.batch([(runner.sequence(PROMPT[:30]), 30)]), sampling=(row,))
        alone += executor.step(batch).tolist()
    runner = Runner(executor)
    chosen = rows()
    batch = runner.batch([(runner.sequence(PROMPT[:30]), 30) for _ in range(3)])
    assert executor.step(replace(batch, sampling=chosen)).tolist() == alone
    assert chosen[2].host is not None
    assert chosen[2].host.logprobs is not None


def test_many_rows_are_drawn_as_each_alone(executors):
    """More rows than one at a time makes their random numbers."""
    executor = executors.load("small", context_length=64, max_sequences=20, prefill_chunk=64)
    rows = tuple(SamplingRow(temperature=1.0, seed=seed, position=3) for seed in range(20))
    runner = Runner(executor)
    sequences = [runner.sequence(PROMPT[:9]) for _ in rows]
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


def test_a_step_that_needs_no_row_draws_nothing(executors):
    executor = executors("small", "float16")
    runner = Runner(executor)
    batch = runner.batch([(runner.sequence(PROMPT), 100)], "none")
    assert executor.step(batch).tolist() == []
