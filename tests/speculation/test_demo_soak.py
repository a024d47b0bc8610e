"""SmolLM2-135M over 200 prompts: greedy text with every kind of draft is the text without, token for token.

Each prompt has a tree size of its own: the first 64 have one each of 1 to 64, the others 2 to 16 in turn. A shard is 25 prompts;
`-k shard3` runs one of them, so that several processes share the work. The trained draft is `smollm2_draft/`, or `EDGED_DEMO_DRAFT` (a folder).
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from demo_runs import TRAINED, VOCABULARY, differences, load, many_prompts
from forced_drafts import GuessingDraft, forced
from requests_with_drafts import Job, answer_all

from edged.config import AttentionConfig
from edged.decoding.stops import Stops
from edged.speculation import expansion
from edged.speculation.acceptance import Acceptance
from edged.speculation.eagle_draft import EagleDraft
from edged.speculation.prompt_lookup import PRIOR_RATES, PromptLookup

PROMPTS, SHARDS, TOKENS = 200, 8, 128
ATTENTION = {
    "dense": AttentionConfig(),
    "sparse": AttentionConfig(mode="sparse", dense_below=0, top_k=2, window=64),
}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(6 * 3600)]


def tree_size(number):
    return number + 1 if number < 64 else 2 + number % 15


class Sized:
    """A draft whose trees are cut to a size of its own.

    Args:
        draft: Guesses.
        size: Most nodes of a tree, its root among them.
    """

    def __init__(self, draft, size):
        self._draft, self._size = draft, size

    @property
    def slot(self):
        return self._draft.slot

    def close(self):
        self._draft.close()

    def extend(self, tokens):
        self._draft.extend(tokens)

    def propose(self, depth, rates):
        proposal = self._draft.propose(depth, rates) if self._size > 1 else None
        if not proposal:
            return None
        order = sorted(range(len(proposal)), key=lambda node: -proposal.chances[node])
        return proposal.part(sorted(order[: self._size - 1]))


@pytest.fixture(scope="session")
def draft():
    """A trained draft."""
    return Path(os.environ.get("EDGED_DEMO_DRAFT", TRAINED))


@pytest.fixture(
    scope="module",
    params=[(attention, shard) for attention in ATTENTION for shard in range(SHARDS)],
    ids=lambda param: f"{param[0]}-shard{param[1]}",
)
def plain(request, demo_model, demo_tokenizer, draft):
    """An executor, some prompts with their numbers, and their answers without drafts."""
    attention, shard = request.param
    executor = load(demo_model, draft, attention=ATTENTION[attention])
    prompts = many_prompts(demo_tokenizer, PROMPTS)
    assert len({tuple(each) for each in prompts}) == PROMPTS
    numbers = range(shard, PROMPTS, SHARDS)
    jobs = [Job(prompts[number], Stops(TOKENS)) for number in numbers]
    yield executor, numbers, jobs, answer_all(executor, jobs, together=4)
    executor.close()


def speculator(kind, executor, numbers, jobs, expected):
    """Verifies whatever is drafted; every prompt has its size."""
    sizes = {tuple(job.prompt): tree_size(number) for number, job in zip(numbers, jobs, strict=True)}
    answers = {tuple(job.prompt): one.tokens for job, one in zip(jobs, expected, strict=True)}

    def truth(prompt, answer, depth):
        """What comes next, for every other prompt: a random draft is then right here and there."""
        place, known = len(answer) + depth, answers[tuple(prompt)]
        return known[place] if sizes[tuple(prompt)] % 2 and place < len(known) else None

    def make(prompt):
        if kind == "lookup":
            made = PromptLookup(prompt)
        elif kind == "trained":
            made = EagleDraft(prompt, executor.draft_model, 6)
        else:
            made = GuessingDraft(prompt, truth, VOCABULARY, share=0.5)
        return Sized(made, sizes[tuple(prompt.tolist())])

    verifying = forced(make, 64, depth={"lookup": 63, "trained": 4, "random": 8}[kind])
    if kind != "random":
        verifying._acceptance = Acceptance(PRIOR_RATES if kind == "lookup" else expansion.PRIOR_RATES)
    return verifying


@pytest.mark.parametrize("together", [1, 4], ids=partial("batch{}".format))
@pytest.mark.parametrize("kind", ["lookup", "trained", "random"])
def test_two_hundred_prompts(plain, kind, together):
    executor, numbers, jobs, expected = plain
    begun = time.monotonic()
    verifying = speculator(kind, executor, numbers, jobs, expected)
    told = answer_all(executor, jobs, verifying, together=together)
    ties = differences(executor, jobs, told, expected)
    accepted = verifying.accepted
    sys.stdout.write(
        f"\n{kind} batch {together}: {len(jobs)} answers of {TOKENS} tokens, {verifying.drafted} drafted, {accepted} accepted, "
        f"{ties} parted at a near tie, {time.monotonic() - begun:.0f} s\n"
    )
    assert accepted > 100
    assert ties <= 1
