"""On a GPU: SmolLM2-135M answers the same with drafts and without, dense and sparse, whatever was drafted.

The demo model's folder may be named by EDGED_DEMO_MODEL, for machines that cannot import it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from demo_runs import guessing, logits_after, lookup, many_prompts
from requests_with_drafts import Job, answer_all

from edged.config import AttentionConfig, ModelConfig, SpeculationConfig
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops

pytestmark = pytest.mark.gpu

SPARSE = AttentionConfig(mode="sparse", dense_below=64, init_blocks=0, top_k=2, window=64)
NEAR_TIE = 0.1
"""Where two logits are nearer than that, float16 may choose either in a step of another size (their spread is 3)."""
PROMPTS = int(os.environ.get("EDGED_DEMO_PROMPTS", "12"))
TOKENS = int(os.environ.get("EDGED_DEMO_TOKENS", "64"))


@pytest.fixture(scope="module")
def folder(request):
    named = os.environ.get("EDGED_DEMO_MODEL")
    return Path(named) if named else request.getfixturevalue("demo_model")


@pytest.fixture(scope="module")
def prompts(folder):
    from tokenizers import Tokenizer

    return many_prompts(Tokenizer.from_file(str(folder / "tokenizer.json")), PROMPTS)


@pytest.fixture(scope="module", params=["dense", "sparse"])
def executor(request, folder):
    from edged.executor.cuda_executor import CudaExecutor

    made = CudaExecutor(
        ModelConfig(
            name="m",
            path=folder,
            device="cuda",
            dtype="float16",
            context_length=1024,
            max_sequences=4,
            prefill_chunk=256,
            attention=SPARSE if request.param == "sparse" else AttentionConfig(),
            speculation=SpeculationConfig("prompt_lookup", 64),
        )
    )
    made.load(lambda *_: None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(executor, prompts):
    return answer_all(executor, [Job(prompt, Stops(TOKENS)) for prompt in prompts], together=4)


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("drafts", ["lookup 4", "lookup 16", "lookup 64", "random 12"])
def test_greedy_answers_are_the_plain_ones(executor, prompts, plain, drafts, together):
    kind, size = drafts.split()
    speculator = (lookup if kind == "lookup" else guessing)(int(size))
    jobs = [Job(prompt, Stops(TOKENS)) for prompt in prompts]
    told = answer_all(executor, jobs, speculator, together=together)
    ties = []
    for job, one, other in zip(jobs, told, plain, strict=True):
        pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
        place = next((at for at, pair in pairs if pair[0] != pair[1]), None)
        if place is not None:
            logits = logits_after(executor, [*job.prompt, *other.tokens[:place]])
            gap = abs(float(logits[one.tokens[place]] - logits[other.tokens[place]]))
            assert gap < NEAR_TIE
            ties.append(gap)
    assert speculator.drafted > PROMPTS
    assert speculator.accepted > 0 or kind == "random"
    counts = f"{speculator.drafted} drafted, {speculator.accepted} accepted"
    sys.stdout.write(
        f"\n{drafts} batch {together}: {len(jobs)} answers, {counts}, part at near ties {ties}\n"
    )


def test_seeded_answers_are_the_plain_ones(executor, prompts):
    """A draw at the border between two tokens may go the other way; the answer is another one from there on."""
    how = Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=11)
    jobs = [Job(prompt, Stops(24), how) for prompt in prompts]
    expected = answer_all(executor, jobs, together=4)
    told = answer_all(executor, jobs, lookup(16), together=4)
    same = sum(one.tokens == other.tokens for one, other in zip(told, expected, strict=True))
    sys.stdout.write(f"\nseeded: {same} of {len(jobs)} answers are the same\n")
    assert same >= 0.75 * len(jobs)
