"""Choosing drafts: no text makes decoding slower than the small part that may be lost, and text that repeats is fast.

Time is counted, not measured: a step costs what a table says of its tokens.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_executor import FakeExecutor
from requests_with_drafts import Job, answer_all

from edged.decoding.stops import Stops
from edged.executor.base import ExecutorLimits
from edged.speculation.prompt_lookup import PRIOR_RATES, PromptLookup
from edged.speculation.speculator import Speculator

VOCABULARY = 5000
TOKENS = 100
PROMPT = 400
COSTS = {
    "a CPU": {1: 1.0, 2: 2.1, 4: 1.95, 8: 1.8, 16: 1.9, 32: 2.6, 64: 4.0},
    "a GPU": {1: 1.0, 2: 1.02, 4: 1.04, 8: 1.08, 16: 1.15, 32: 1.3, 64: 1.6},
    "no gain": {size: float(size) for size in (1, 2, 4, 8, 16, 32, 64)},
}


class Reciting(FakeExecutor):
    """Says what it has been given for each position, and counts what that takes.

    Args:
        texts: One a sequence; the first token of each says which.
        costs: Time of a step by its tokens.
    """

    def __init__(self, texts, costs):
        super().__init__(
            ExecutorLimits(64 * len(texts) + 64, len(texts), 1024, 16 * len(texts) + 8, VOCABULARY)
        )
        self._texts = {text[0]: text for text in texts}
        self._sizes, self._costs = zip(*sorted(costs.items()), strict=True)
        self.time = 0.0

    def cost(self, tokens):
        return float(np.interp(tokens, self._sizes, self._costs)) * max(1.0, tokens / self._sizes[-1])

    def step(self, batch):
        drawn = np.zeros(len(batch.logit_rows), np.int32)
        for row, history in self._run(batch):
            drawn[row] = self._texts[int(history[0])][len(history)]
        if batch.tree_masks is not None:
            self._keep(batch, drawn)
        return drawn


def recite(texts, costs, speculator):
    """Time of decoding them together, and what was said."""
    executor = Reciting(texts, costs)
    jobs = [Job(text[:PROMPT], Stops(TOKENS)) for text in texts]
    seconds = []

    def clock(batch):
        streams = len(batch.lengths)
        prompts = batch.tree_masks is None and len(batch.token_ids) > streams
        taken = executor.cost(len(batch.token_ids))
        if not prompts:
            seconds.append(taken)
        return taken

    told = answer_all(executor, jobs, speculator, together=len(texts), clock=clock)
    assert [one.tokens for one in told] == [text[PROMPT : PROMPT + TOKENS] for text in texts]
    return sum(seconds)


def speculator_for(costs):
    speculator = Speculator(PromptLookup, PRIOR_RATES, tree_size=16, depth=15)
    speculator.costs.note_loaded({size: cost for size, cost in costs.items() if size <= 16})
    return speculator


def novel(r):
    """Nothing repeats."""
    return [r.randrange(VOCABULARY) for _ in range(PROMPT + TOKENS + 20)]


def trap(r, length):
    """Phrases that come again and again and never go on as before."""
    phrases = [[r.randrange(VOCABULARY) for _ in range(length)] for _ in range(5)]
    text = []
    while len(text) < PROMPT + TOKENS + 20:
        text += [*r.choice(phrases), r.randrange(VOCABULARY), r.randrange(VOCABULARY)]
    return text


def babble(r, choices):
    """Each token is one of a few that may follow the one before."""
    following = [[r.randrange(200) for _ in range(choices)] for _ in range(200)]
    text = [r.randrange(200)]
    while len(text) < PROMPT + TOKENS + 20:
        text.append(r.choice(following[text[-1]]))
    return text


def betrayal(r):
    """A faithful quotation, until trust is won; traps from then on."""
    text = [r.randrange(VOCABULARY) for _ in range(PROMPT)]
    return [*text, *text[10:40], *trap(r, 20)]


def quotation(r):
    """The prompt again."""
    text = [r.randrange(VOCABULARY) for _ in range(PROMPT)]
    return [*text, *text]


TEXTS = {
    "novel": novel,
    **{f"traps of {length}": lambda r, length=length: trap(r, length) for length in (3, 5, 8, 12, 20, 40)},
    **{f"babble of {choices}": lambda r, choices=choices: babble(r, choices) for choices in (2, 3)},
    "betrayal": betrayal,
}


def named(texts):
    """Each with a first token of its own."""
    return [[index, *text[1:]] for index, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("name", "streams"),
    [*((name, 1) for name in TEXTS), ("traps of 8", 4), ("babble of 2", 4), ("betrayal", 4)],
)
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_no_text_makes_it_slower(name, costs, streams):
    text, r = TEXTS[name], random.Random(1)
    speculator = speculator_for(costs)
    ratios = []
    for _ in range(2):  # the same model serves one after the other
        texts = named([text(r) for _ in range(streams)])
        ratios.append(recite(texts, costs, speculator) / recite(texts, costs, None))
    assert max(ratios) <= 1.03, ratios


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("machine", "most"), [("a CPU", 0.35), ("a GPU", 0.2)])
def test_quotations_are_fast(machine, most, streams):
    costs, r = COSTS[machine], random.Random(2)
    texts = named([quotation(r) for _ in range(streams)])
    ratio = recite(texts, costs, speculator_for(costs)) / recite(texts, costs, None)
    assert ratio <= (most if streams == 1 else 2 * most), ratio


def test_costs_follow_the_machine():
    """What was measured while the model loaded is replaced by what steps take."""
    costs = COSTS["a CPU"]
    speculator = speculator_for(dict.fromkeys((1, 2, 4, 8, 16), 1.0))
    r = random.Random(3)
    for _ in range(4):
        recite(named([quotation(r)]), costs, speculator)
    assert speculator.costs.factor(1, 16) == pytest.approx(1.9, abs=0.1)
