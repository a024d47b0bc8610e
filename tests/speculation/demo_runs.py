"""SmolLM2-135M with drafts and without: executors, speculators, prompts, and answers held to each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from forced_drafts import GuessingDraft, forced

from edged.config import ModelConfig, SpeculationConfig
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.speculation import expansion
from edged.speculation.acceptance import Acceptance
from edged.speculation.eagle_draft import EagleDraft
from edged.speculation.prompt_lookup import PRIOR_RATES, PromptLookup

VOCABULARY = 49152
NEAR_TIE = 1e-3
"""Where two logits are nearer than that, rounding may let either win: a step of many rows sums in another order."""
LIGHTHOUSE = (
    "The lighthouse at the end of the pier was built in 1873 by a family of stonemasons from the north. Its lamp was "
    "first lit with whale oil, then with gas, and since 1931 with electricity."
)
DOCS = Path(__file__).resolve().parents[2] / "docs"
TRAINED = Path(__file__).resolve().parent / "smollm2_draft"
"""A draft that `edgectl draft train` made, in 4 bits (docs/gpu_runs.md)."""


def load(folder, draft=None, **settings):
    """The model for trees of any size, with a draft model or without."""
    method = "prompt_lookup" if draft is None else "eagle"
    executor = TorchExecutor(
        ModelConfig(
            name="m",
            path=folder,
            threads=1,
            context_length=1024,
            max_sequences=4,
            prefill_chunk=256,
            speculation=SpeculationConfig(method, 64, draft=draft),
            **settings,
        )
    )
    executor.load(lambda *_: None)
    return executor


def lookup(size):
    speculator = forced(PromptLookup, size)
    speculator._acceptance = Acceptance(PRIOR_RATES)
    return speculator


def trained(executor, size):
    speculator = forced(lambda prompt: EagleDraft(prompt, executor.draft_model, 6), size, depth=min(size, 4))
    speculator._acceptance = Acceptance(expansion.PRIOR_RATES)
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


def many_prompts(demo_tokenizer, count):
    """Passages of the documentation to quote, to explain and to go on with; all of them differ."""
    lines = [
        line
        for file in sorted(DOCS.glob("*.md"))
        for line in file.read_text("utf-8").splitlines()
        if not line.lstrip().startswith(("|", "`", "#"))
    ]
    words = " ".join(lines).split()
    apart = len(words) // count
    texts = []
    for number in range(count):
        passage = " ".join(words[number * apart : number * apart + 30 + number % 60])
        texts.append(
            (
                quote(passage),
                f"<|im_start|>user\nExplain: {passage[:120]}<|im_end|>\n<|im_start|>assistant\n",
                passage[: 150 + number],
            )[number % 3]
        )
    return [encode(demo_tokenizer, text) for text in texts]
