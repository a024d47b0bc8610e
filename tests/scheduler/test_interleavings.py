"""Any interleaving gives each request what it gets alone, on an executor that reads every token back from its pages."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_executor import generate
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import VOCABULARY, arrivals, check, draw_schedule, extra_tokens, shapes


def alone(prompt, count, sampling):
    return generate(prompt, count, VOCABULARY, seed=sampling.seed, temperature=sampling.temperature)


@settings(max_examples=80, deadline=None)
@given(arrivals, shapes, extra_tokens)
def test_any_interleaving_gives_each_request_what_it_gets_alone(schedule, shape, extra):
    check(schedule, shape, extra, alone)


@pytest.mark.one_python
def test_full_schedules_that_reach_the_cache_and_the_host_memory():
    seen = Counter()
    for seed in range(200):
        bench = check(*draw_schedule(seed), alone)
        seen["cached"] += bench.holdings.cached_tokens > 0
        seen["suspended"] += bench.scheduler.suspensions > 0
    assert seen["cached"] > 25, seen
    assert seen["suspended"] > 40, seen


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(arrivals, shapes, extra_tokens)
def test_ten_thousand_interleavings(schedule, shape, extra):
    check(schedule, shape, extra, alone)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(st.integers(0, 2**64))
def test_ten_thousand_full_schedules(seed):
    check(*draw_schedule(seed), alone)
