"""SmolLM2-135M: greedy text with drafts is the text without, token for token."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from forced_drafts import GuessingDraft, forced
from requests_with_drafts import Job, answer_all

from edged.config import AttentionConfig, ModelConfig, SpeculationConfig
from edged.decoding.stops import Stops
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.speculation.acceptance import Acceptance
from edged.speculation.prompt_lookup import PRIOR_RATES, PromptLookup

VOCABULARY = 49152
NEAR_TIE = 1e-3
"""Where two logits are nearer than that, rounding may let either win: a step of many rows sums in another order."""
LIGHTHOUSE = (
    "The lighthouse at the end of the pier was built in 1873 by a family of stonemasons from the north. Its lamp was "
    "first lit with whale oil, then with gas, and since 1931 with electricity."
)
DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(folder, size=64, **settings):
    executor = TorchExecutor(
        ModelConfig(
            name="m",
            path=folder,
            threads=1,
            context_length=1024,
            max_sequences=4,
            prefill_chunk=256,
            speculation=SpeculationConfig("prompt_lookup", size),
            **settings,
        )
    )
    executor.load(lambda *_: None)
    return executor


def lookup(size):
    speculator = forced(PromptLookup, size)
    speculator._acceptance = Acceptance(PRIOR_RATES)
    return speculator


def guessing(size):
    return forced(lambda prompt: GuessingDraft(prompt, lambda *_: None, VOCABULARY), size, depth=min(size, 4))


def logits_after(executor, tokens):
    """Logits of the last of some tokens, run by themselves."""
    result = None
    for stored in range(0, len(tokens), 256):
        piece = tokens[stored : stored + 256]
        end = stored + len(piece)
        result = executor.logits(
            StepBatch(
                token_ids=np.array(piece, np.int32),
                positions=np.arange(stored, end, dtype=np.int32),
                sequence_starts=np.array([0, len(piece)], np.int32),
                lengths=np.array([stored], np.int32),
                page_tables=[np.arange(-(-end // 64), dtype=np.int32)],
                logit_rows=np.array([len(piece) - 1], np.int32),
                sampling=[SamplingRow()],
            )
        )
    return result[0]


def differences(executor, jobs, told, expected):
    """How many answers part at a near tie; any other difference fails."""
    ties = 0
    for job, one, other in zip(jobs, told, expected, strict=True):
        place = next(
            (p for p, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1]),
            None,
        )
        if place is not None:
            logits = logits_after(executor, [*job.prompt, *other.tokens[:place]])
            gap = abs(float(logits[one.tokens[place]] - logits[other.tokens[place]]))
            assert gap < NEAR_TIE, (
                f"token {place} is {one.tokens[place]}, not {other.tokens[place]}, by {gap}"
            )
            ties += 1
    return ties


def encode(demo_tokenizer, text):
    return demo_tokenizer.encode(text, add_special_tokens=False).ids


def quote(passage):
    return f"<|im_start|>user\nQuote this passage back to me, word for word:\n\n{passage}<|im_end|>\n<|im_start|>assistant\n"


def test_a_quoted_passage_and_a_guessed_answer(demo_model, demo_tokenizer):
    executor = load(demo_model)
    prompts = [encode(demo_tokenizer, text) for text in (quote(LIGHTHOUSE), "The capital of Portugal is")]
    jobs = [Job(prompt, Stops(16)) for prompt in prompts]
    expected = answer_all(executor, jobs)
    quoting = lookup(16)
    told = answer_all(executor, jobs, quoting)
    assert [one.tokens for one in told] == [one.tokens for one in expected]
    assert quoting.accepted >= 10
    assert told[0].steps < 8
    told = answer_all(executor, jobs, guessing(9))
    assert [one.tokens for one in told] == [one.tokens for one in expected]


def many_prompts(demo_tokenizer, count):
    paragraphs = [
        " ".join(part.split())[:700]
        for file in sorted(DOCS.glob("*.md"))
        for part in re.split(r"\n\s*\n", file.read_text("utf-8"))
        if len(part) > 250 and not part.lstrip().startswith(("|", "`"))
    ]
    texts = []
    for number in range(count):
        paragraph = paragraphs[number * 7 % len(paragraphs)]
        texts.append(
            (
                quote(paragraph),
                f"<|im_start|>user\nExplain: {paragraph[:120]}<|im_end|>\n<|im_start|>assistant\n",
                paragraph[: 150 + number],
            )[number % 3]
        )
    return [encode(demo_tokenizer, text) for text in texts]


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_two_hundred_prompts(demo_model, demo_tokenizer, attention):
    """Each prompt with a tree size of its own, 1 to 64, alone and among four, by lookup and by chance."""
    sparse = AttentionConfig(mode="sparse", dense_below=0, top_k=2, window=64)
    executor = load(demo_model, attention=sparse if attention == "sparse" else AttentionConfig())
    jobs = [Job(prompt, Stops(128)) for prompt in many_prompts(demo_tokenizer, 200)]
    expected = answer_all(executor, jobs, together=1)
    ties = accepted = 0
    for first in range(0, len(jobs), 4):
        some, right = jobs[first : first + 4], expected[first : first + 4]
        size = 1 + first // 4 * 13 % 64
        for make, together in ((lookup, 1), (lookup, 4), (guessing, 1), (guessing, 4)):
            speculator = make(size)
            told = answer_all(executor, some, speculator, together=together)
            ties += differences(executor, some, told, right)
            accepted += speculator.accepted
    assert accepted > 2000
    assert ties <= 8  # of 800 answers of 128 tokens
