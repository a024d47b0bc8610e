"""Any interleaving of requests with drafts gives each what it gets alone without: pages, cache and suspension included."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_executor import generate
from forced_drafts import GuessingDraft, forced
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from interleaving import VOCABULARY, check, draw_schedule

from edged.decoding.sampling import Sampling


def alone(prompt, count, sampling):
    return generate(prompt, count, VOCABULARY, seed=sampling.seed, temperature=sampling.temperature)


def drive(seed, tree_size):
    schedule, shape, extra = draw_schedule(seed)
    known = {
        tuple(each.prompt): alone(each.prompt, each.max_tokens, Sampling(each.temperature, seed=index))
        for index, each in enumerate(schedule)
    }

    def truth(prompt, answer, depth):
        tokens = known[tuple(prompt)]
        right = tokens[: len(answer)] == answer and len(answer) + depth < len(tokens)
        return tokens[len(answer) + depth] if right else None

    speculator = forced(lambda prompt: GuessingDraft(prompt, truth, VOCABULARY), tree_size)
    bench = check(schedule, shape, max(extra, 16), alone, speculator=speculator)
    return bench, speculator


def run(seeds):
    seen = Counter()
    for seed in seeds:
        bench, speculator = drive(seed, (2, 7, 16, 64)[seed % 4])
        seen["accepted"] += speculator.accepted
        seen["cached"] += bench.holdings.cached_tokens > 0
        seen["suspended"] += bench.scheduler.suspensions > 0
    return seen


@pytest.mark.one_python
def test_full_schedules_with_drafts():
    seen = run(range(60))
    assert seen["accepted"] > 500, seen
    assert seen["cached"] > 5, seen
    assert seen["suspended"] > 5, seen


@pytest.mark.soak
@settings(max_examples=5_000, deadline=None)
@given(st.integers(0, 2**64))
def test_thousands_of_schedules_with_drafts(seed):
    drive(seed, (2, 7, 16, 64)[seed % 4])
