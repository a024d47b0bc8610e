"""Any interleaving gives each request what a sequential model gives it, on a small random float64 model with real pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import check, draw_schedule

SCHEDULES = 10_000
TAILS = [[(11 * which + i * i) % 97 for i in range(which * 3 + 1)] for which in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = small_model.save(tmp_path_factory.mktemp("small") / "model")
    return small_model.load(folder), small_model.Sequential(small_model.load(folder))


def drive(seed, model):
    executor, alone = model
    schedule, shape, extra = draw_schedule(seed)
    # Few and short, and some of a hundred prompts, so that a schedule takes some ten milliseconds.
    numbers = random.Random(seed)
    schedule = [
        replace(
            each,
            common=numbers.choice([0, 30, 64, 130, 130, 150]),
            own=numbers.choice(TAILS),
            max_tokens=1 + each.max_tokens // 10,
            at=each.at // 3,
        )
        for each in schedule[:3]
    ]
    shape["prefill_chunk"] = max(12, shape["prefill_chunk"])
    extra = max(8, extra)
    return check(schedule, shape, extra, alone, executor=executor)


def test_a_tenth_of_the_schedules(model):
    benches = [drive(seed, model) for seed in range(SCHEDULES // 10)]
    assert sum(bench.holdings.cached_tokens > 0 for bench in benches) > SCHEDULES // 100
    assert sum(bench.scheduler.suspensions > 0 for bench in benches) > SCHEDULES // 100


@pytest.mark.soak
@settings(max_examples=SCHEDULES, deadline=None)
@given(st.integers(0, 2**64))
def test_all_of_the_schedules(model, seed):
    drive(seed, model)
