"""What a trained EAGLE draft is worth: verified on prompts that no training saw, with its whole head and with a token map.

    python bench/draft.py DRAFT [--model FOLDER] [--token-map FILE] [--tree-size 12] [--depth N] [--width N] [--tokens N]
                          [--prompts N] [--threads N] [--json FILE]

Every step verifies a tree of the `tree-size` - 1 likeliest nodes, greedily, in float32 on the CPU, whether it pays or not.
`acceptance_length` is the tokens that a step gains, over all steps; `chat_length` and `text_length` are those of chats and of
texts that are gone on with. `frspec_length` is the first with the token map (FR-Spec; `DRAFT/token_map.json` unless another is
named), `acceptance_frspec_vs_full` the two over each other. `draft_head_frspec_vs_full` is the time of the LM head, softmax and
choice of the likeliest tokens for a level's rows with the map over that without. `drafting_vs_step` is what drafting a tree takes
over a plain step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from _report import add_json_option, environment, report
from _texts import PASSAGES, STORIES

if TYPE_CHECKING:
    from edged.executor.torch_eagle import DraftSlot
    from edged.executor.torch_executor import TorchExecutor
    from edged.speculation.tree import DraftTree

QUESTIONS = (
    "What is a robot?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a short poem about the sea.",
    "What is the difference between a virus and a bacterium?",
    "Give me three tips for sleeping better.",
    "Explain how a bicycle stays upright.",
    "Who was Marie Curie?",
    "Write a Python function that returns the largest number of a list.",
    "What should I pack for a week in the mountains?",
    "Translate 'good morning' into French, Spanish and German.",
    "How does a refrigerator work?",
    "Write a polite email that asks for a meeting next week.",
    "What are the causes of inflation?",
    "Tell me a story about a dog that finds a key.",
    "List five uses of an old newspaper.",
)
REQUESTS = (
    "Summarize this text:\n\n{}",
    "What is this text about?\n\n{}",
    "Rewrite this in simple words:\n\n{}",
)
TEXTS = (
    *STORIES,
    "The history of the bicycle begins in",
    "To make bread at home you need",
    "In the middle of the desert, the two travellers",
    "The human heart is",
    'def read_lines(path):\n    """',
    "Dear Sir or Madam,\n\nI am writing to",
    "When the power went out, everybody in the office",
    "Photosynthesis is the process by which",
)
TOGETHER = 4
BOUNDS = {
    "acceptance_length": ">= 2.2",
    "acceptance_frspec_vs_full": ">= 0.93",
    "draft_head_frspec_vs_full": "<= 0.4",
}


def chats() -> list[str]:
    """What users ask: questions, and requests about a passage."""
    return [*QUESTIONS, *(request.format(passage) for passage in PASSAGES for request in REQUESTS)]


@dataclass
class Sequence:
    """One answer."""

    place: int
    tokens: list[int]
    slot: DraftSlot | None
    stored: int = 0
    prompt: int = 0
    steps: int = 0
    gained: int = 0
    tree: DraftTree | None = field(default=None, repr=False)


def load(model: Path, draft: Path, options: argparse.Namespace, token_map: Path | None) -> TorchExecutor:
    """The model with the draft beside it."""
    from edged.config import ModelConfig, SpeculationConfig
    from edged.executor.torch_executor import TorchExecutor

    speculation = SpeculationConfig("eagle", options.tree_size, draft=draft, token_map=token_map)
    executor = TorchExecutor(
        ModelConfig(
            name="m",
            path=model,
            context_length=1024,
            max_sequences=TOGETHER,
            prefill_chunk=512,
            threads=options.threads,
            speculation=speculation,
        )
    )
    executor.load(lambda *_: None)
    return executor


def step(executor: TorchExecutor, sequences: list[Sequence]) -> None:
    """Run what is not stored of each, or its tree; each gains the tokens that were drawn along its path."""
    import numpy as np

    from edged.executor.base import SamplingRow, StepBatch

    pages = executor.plan.pages_per_sequence
    ids: list[int] = []
    positions: list[int] = []
    masks: list[int] = []
    rows: list[int] = []
    starts = [0]
    for each in sequences:
        if each.tree is None:
            new = each.tokens[each.stored :]
            ids += new
            positions += range(each.stored, len(each.tokens))
            masks += [0] * len(new)
            rows.append(len(ids) - 1)
        else:
            rows += range(len(ids), len(ids) + len(each.tree))
            ids += each.tree.tokens
            positions += [each.stored + depth for depth in each.tree.depths]
            masks += each.tree.masks
        starts.append(len(ids))
    batch = StepBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        sequence_starts=np.array(starts, np.int32),
        lengths=np.array([each.stored for each in sequences], np.int32),
        page_tables=[
            np.arange(each.place * pages, (each.place + 1) * pages, dtype=np.int32) for each in sequences
        ],
        logit_rows=np.array(rows, np.int32),
        sampling=[SamplingRow()] * len(rows),
        tree_masks=np.array(masks, np.uint64) if any(masks) else None,
        draft_slots=[each.slot for each in sequences],
    )
    drawn = executor.step(batch).tolist()
    for each in sequences:
        if each.tree is None:
            each.stored = len(each.tokens)
            each.tokens.append(drawn.pop(0))
            continue
        some, drawn = drawn[: len(each.tree)], drawn[len(each.tree) :]
        node: int | None = 0
        while node is not None:
            each.tokens.append(some[node])
            each.stored += 1
            each.gained += 1
            node = each.tree.follow(node, some[node])
        each.steps += 1


def draft_tree(executor: TorchExecutor, one: Sequence, options: argparse.Namespace) -> None:
    """The likeliest nodes of the pool."""
    from edged.speculation.expansion import PRIOR_RATES, grow
    from edged.speculation.tree import DraftTree

    model = executor.draft_model
    assert model is not None
    assert one.slot is not None
    tree = model.start(one.slot, one.tokens)
    assert tree is not None
    pool = grow(tree, depth=options.depth, width=options.width, rates=PRIOR_RATES)
    order = sorted(range(len(pool)), key=lambda node: -pool.chances[node])[: options.tree_size - 1]
    one.tree = DraftTree(one.tokens[-1], pool.part(sorted(order)))


def answer(
    executor: TorchExecutor, prompts: list[list[int]], endings: set[int], options: argparse.Namespace
) -> tuple[list[tuple[int, int]], float]:
    """(Steps, tokens gained) of each prompt's answer, and the median seconds of drafting a tree."""
    found, drafting = [], []
    model = executor.draft_model
    assert model is not None
    for first in range(0, len(prompts), TOGETHER):
        some = prompts[first : first + TOGETHER]
        group = [
            Sequence(place, list(tokens), model.open(), prompt=len(tokens))
            for place, tokens in enumerate(some)
        ]
        for each in group:  # prompts of various lengths, one step each
            step(executor, [each])
        running = list(group)
        while running:
            for each in running:
                before = time.perf_counter()
                draft_tree(executor, each, options)
                drafting.append(time.perf_counter() - before)
            step(executor, running)
            running = [
                each
                for each in running
                if len(each.tokens) - each.prompt < options.tokens
                and not endings.intersection(each.tokens[each.prompt :])
            ]
        for each in group:
            assert each.slot is not None
            model.close(each.slot)
            found.append((each.steps, each.gained))
    return found, statistics.median(drafting)


def head_seconds(executor: TorchExecutor, width: int, rounds: int = 30) -> float:
    """Of a level's rows."""
    import torch

    model = executor.draft_model
    assert model is not None
    rows = torch.randn(width, executor.plan.architecture.hidden)
    taken = []
    for _ in range(rounds):
        before = time.perf_counter()
        model.likeliest(rows, width)
        taken.append(time.perf_counter() - before)
    return statistics.median(taken[3:])


def plain_seconds(executor: TorchExecutor, rounds: int = 12) -> float:
    """Of a step of one token."""
    one = Sequence(0, list(range(100, 200)), None)
    step(executor, [one])
    taken = []
    for _ in range(rounds):
        before = time.perf_counter()
        step(executor, [one])
        taken.append(time.perf_counter() - before)
    return statistics.median(taken[2:])


def measure(model: Path, options: argparse.Namespace) -> dict[str, float]:
    """Both heads, one after the other."""
    from edged.checkpoint.chat_template import ChatTemplate
    from edged.checkpoint.tokenizer import Tokenizer

    tokenizer, template = Tokenizer.load(model), ChatTemplate.load(model)
    asked = [
        tokenizer.encode_chat(
            template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        )
        for text in chats()[: options.prompts]
    ]
    prompts = asked + [tokenizer.encode(text) for text in TEXTS[: options.prompts]]
    endings = set(tokenizer.eos_token_ids)
    token_map = options.token_map or options.draft / "token_map.json"
    figures: dict[str, float] = {}

    executor = load(model, options.draft, options, None)
    found, drafting = answer(executor, prompts, endings, options)
    figures["acceptance_length"] = _length(found)
    figures["chat_length"] = _length(found[: len(asked)])
    figures["text_length"] = _length(found[len(asked) :])
    figures["steps"] = sum(steps for steps, _ in found)
    figures["drafting_vs_step"] = drafting / plain_seconds(executor)
    if token_map.exists():
        cut = load(model, options.draft, options, token_map)
        heads = [  # in turn, so that what else the machine does falls on both
            head_seconds(cut, options.width) / head_seconds(executor, options.width) for _ in range(5)
        ]
        executor.close()
        found, _ = answer(cut, prompts, endings, options)
        figures["frspec_length"] = _length(found)
        figures["acceptance_frspec_vs_full"] = figures["frspec_length"] / figures["acceptance_length"]
        figures["draft_head_frspec_vs_full"] = statistics.median(heads)
    return figures


def _length(found: list[tuple[int, int]]) -> float:
    return sum(gained for _, gained in found) / max(1, sum(steps for steps, _ in found))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", type=Path, metavar="DRAFT", help="the draft's folder")
    add_json_option(parser)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a model folder (default: the demo model)"
    )
    parser.add_argument("--token-map", type=Path, metavar="FILE")
    parser.add_argument("--tree-size", type=int, default=12, metavar="N")
    parser.add_argument("--depth", type=int, default=5, metavar="N")
    parser.add_argument("--width", type=int, default=8, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer (default: 64)")
    parser.add_argument("--prompts", type=int, default=1000, metavar="N", help="of each kind, at most")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    options = parser.parse_args()
    surroundings = environment(
        **{key: str(value) for key, value in vars(options).items() if key not in ("json", "model")}
    )
    if options.model is None:
        from daemon import demo_model

        with demo_model(None) as model:
            figures = measure(model, options)
    else:
        figures = measure(options.model, options)
    report(figures, surroundings, file=options.json, bounds=BOUNDS)


if __name__ == "__main__":
    main()
