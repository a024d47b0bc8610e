"""What is drawn through trees has the model's own distribution; a rule that is nearly right has not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fixtures.small_models import model_files

from edged.config import ModelConfig
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from plugins_trt.sample.philox import uniform

PROMPT = [9, 200, 31, 77, 5, 120, 9, 200]
DRAWS = 20_000
TEMPERATURE = 3.0
LIKELY = 12


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    folder.mkdir()
    for name, content in model_files(seed=3).items():
        (folder / name).write_bytes(content)
    executor = TorchExecutor(
        ModelConfig(
            name="m",
            path=folder,
            dtype="float64",
            context_length=128,
            max_sequences=1,
            prefill_chunk=64,
            threads=1,
        )
    )
    executor.load(lambda *_: None)
    return executor


def step(tokens, stored, parents=None, seed=None):
    """A step of a chain, or of a tree whose rows are drawn with a seed."""
    count = len(tokens)
    masks, depths = [], list(range(count))
    if parents is not None:
        for node, parent in enumerate(parents):
            masks.append((masks[parent] if node else 0) | 1 << node)
        depths = [mask.bit_count() - 1 for mask in masks]
    rows = range(count) if parents is not None else [count - 1]
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.array([stored + depth for depth in depths], np.int32),
        sequence_starts=np.array([0, count], np.int32),
        lengths=np.array([stored], np.int32),
        page_tables=[np.arange(2, dtype=np.int32)],
        logit_rows=np.array(rows, np.int32),
        sampling=[
            SamplingRow(temperature=TEMPERATURE, seed=seed or 0, position=stored + depths[row] + 1)
            for row in rows
        ],
        tree_masks=None if parents is None else np.array(masks, np.uint64),
    )


def chances(executor, tokens):
    """The exact distribution of the token after these, fp64 [V]."""
    logits = executor.logits(step(tokens, 0))[0].astype(np.float64) / TEMPERATURE
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.fixture(scope="module")
def exact(executor):
    """The likeliest first tokens, and the distribution of (first, second) over the cells that are counted."""
    first = chances(executor, PROMPT)
    likely = np.argsort(-first)[:LIKELY].tolist()
    cells = {}
    for token in likely[:3]:
        second = chances(executor, [*PROMPT, token])
        for follower in np.argsort(-second)[:3].tolist():
            cells[token, follower] = first[token] * second[follower]
        cells[token, None] = first[token] - sum(
            p for (t, f), p in cells.items() if t == token and f is not None
        )
    for token in likely[3:]:
        cells[token, None] = first[token]
    cells[None, None] = 1 - sum(cells.values())
    followers = {token: [f for t, f in cells if t == token and f is not None] for token in likely}
    return likely, followers, cells


def draw_pairs(executor, exact, count):
    """(first, second) drawn through one tree with each seed; the second is None where the tree has no first."""
    likely, followers, _ = exact
    tokens, parents = [PROMPT[-1]], [-1]
    for token in likely:
        tokens.append(token)
        parents.append(0)
        at = len(tokens) - 1
        for follower in followers[token]:
            tokens.append(follower)
            parents.append(at)
    child = {token: node for node, token in enumerate(tokens) if parents[node] == 0}
    executor.logits(step(PROMPT[:-1], 0))
    pairs = []
    for seed in range(count):
        drawn = executor.step(step(tokens, len(PROMPT) - 1, parents, seed)).tolist()
        node = child.get(drawn[0])
        pairs.append((drawn[0], None if node is None else drawn[node]))
    return pairs


def counted(pairs, cells):
    """How often each cell was drawn."""
    seen = dict.fromkeys(cells, 0)
    for first, second in pairs:
        cell = next(each for each in ((first, second), (first, None), (None, None)) if each in seen)
        seen[cell] += 1
    return seen


def deviation(seen, cells):
    """How far Pearson's statistic is from its mean, in standard deviations (Wilson and Hilferty 1931)."""
    total = sum(seen.values())
    pairs = [(seen[cell], total * p) for cell, p in cells.items()]
    rare = [pair for pair in pairs if pair[1] < 5]  # too few for the test: one cell together
    pairs = [pair for pair in pairs if pair[1] >= 5] + (
        [tuple(map(sum, zip(*rare, strict=True)))] if rare else []
    )
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
    freedom = len(pairs) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def check(executor, exact, count):
    likely, _, cells = exact
    pairs = draw_pairs(executor, exact, count)
    assert deviation(counted(pairs, cells), cells) < 3.1  # one in a thousand

    firsts = {}
    for (token, _), p in cells.items():
        firsts[token, None] = firsts.get((token, None), 0.0) + p
    assert deviation(counted(pairs, firsts), firsts) < 3.1
    # A draft accepted with its probability and, where it is not, a draw from all tokens instead of from the others.
    p = firsts[likely[0], None]
    wrong = [
        (likely[0] if uniform(seed + 2**40, 0) < p else first, None) for seed, (first, _) in enumerate(pairs)
    ]
    assert deviation(counted(wrong, firsts), firsts) > 6


def test_a_tenth_of_the_draws_have_the_exact_distribution(executor, exact):
    check(executor, exact, DRAWS // 10)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_draws_have_the_exact_distribution(executor, exact):
    check(executor, exact, DRAWS)
