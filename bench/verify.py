"""A step that verifies a tree of drafts beside a plain decode step: MiniCPM4-8B's shape, random weights, one sequence.

    python bench/verify.py [--weights bf16|w4a16|ternary] [--parts] [--json FILE]

A tree of N nodes is a random one, half of whose nodes hang below the node before them. `verifyN_4k_vs_decode` is the time of
its graph (the forward over all nodes, a token after each, the path that they follow, the move of its keys and values)
over that of the graph of a plain step, both the mean over eight places of a page in turns, so that both complete
compressed keys. `..._drawn` is the same with tokens drawn by temperature and top_p at every node. `..._with_host_ms` are
whole steps of the executor. `draft_vs_decode` is an EAGLE draft of the same shape in 4 bits that takes three accepted tokens
and grows three levels of ten over a quarter of the vocabulary, over a plain step at 4K. `cycle_..._ms` is a step over 16
nodes and the next draft, in turn, where the draft is enqueued right behind the step (ahead), or by the host when it has
seen the tokens (after). `--parts` measures where a step's time goes: by how much its graph is faster when the launches of
one kind are left out of it.

Needs an NVIDIA GPU with 24 GiB, torch with CUDA and PyCUDA.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from _parts import nothing, without_one_kind
from _random_model import LAUNCH_CYCLES, TEMPERATURE, RandomModel, median_ms, run

from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch
from edged.executor.cuda_trees import TreeSteps
from edged.executor.torch_tree import accepted_paths

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

BOUNDS = {
    "bf16": {},
    "ternary": {},
    "w4a16": {
        "verify16_4k_vs_decode": ("<=", 1.25),
        "verify64_4k_vs_decode": ("<=", 1.8),
        "verify16_128k_vs_decode": ("<=", 1.5),
        "verify64_128k_vs_decode": ("<=", 2.6),
        "draft_vs_decode": ("<=", 0.35),
    },
}
LENGTHS = {"4k": 4096, "128k": 131072}
SIZES = (4, 8, 16, 32, 64)
_PLACES = 8
_ROUNDS = 5


def tree(model: RandomModel, nodes: int, stored: int, *, greedy: bool = True) -> StepBatch:
    """A random tree behind so many tokens of the one sequence."""
    random = np.random.default_rng(nodes)
    masks = [1]
    for node in range(1, nodes):
        parent = node - 1 if random.random() < 0.5 else int(random.integers(0, node))
        masks.append(masks[parent] | 1 << node)
    positions = np.array([stored + mask.bit_count() - 1 for mask in masks], np.int32)
    temperature, top_p = (0.0, 1.0) if greedy else (TEMPERATURE, 0.9)
    return StepBatch(
        token_ids=random.integers(0, 1000, nodes).astype(np.int32),
        positions=positions,
        sequence_starts=np.array([0, nodes], np.int32),
        lengths=np.array([stored], np.int32),
        page_tables=[model.table],
        logit_rows=np.arange(nodes, dtype=np.int32),
        sampling=[
            SamplingRow(temperature=temperature, top_p=top_p, seed=1, position=int(at) + 1)
            for at in positions
        ],
        tree_masks=np.array(masks, np.uint64),
    )


def plain(model: RandomModel, stored: int, *, greedy: bool = True) -> StepBatch:
    """A step of one token."""
    batch = model.batch(np.array([stored % 97], np.int32), stored)
    row = SamplingRow(temperature=TEMPERATURE, top_p=0.9, seed=1, position=stored + 1)
    return batch if greedy else replace(batch, sampling=(row,))


def device_ms(model: RandomModel, batch: StepBatch) -> float:
    """One step's graphs on the device."""
    stream = model.gpu.torch_stream
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    enqueue = model.staged(batch)
    with torch.cuda.stream(stream):  # until the graph has been launched, which is the host's time
        torch.cuda._sleep(LAUNCH_CYCLES)  # noqa: SLF001 - torch's own tests keep a stream busy with it
    begin.record(stream)
    enqueue()
    end.record(stream)
    model.gpu.synchronize()
    return float(begin.elapsed_time(end))


def measure(model: RandomModel, options: argparse.Namespace, ceilings: dict[str, float]) -> dict[str, float]:
    """All figures; times in milliseconds."""
    del ceilings
    figures: dict[str, float] = {}
    for name, length in LENGTHS.items():
        places = range(length - PAGE_TOKENS, length, PAGE_TOKENS // _PLACES)
        kinds: dict[str, Callable[[int], StepBatch]] = {"decode": partial(plain, model)}
        kinds["decode_drawn"] = partial(plain, model, greedy=False)
        for nodes in SIZES:
            kinds[f"verify{nodes}"] = partial(tree, model, nodes)
        for nodes in (16, 64):
            kinds[f"verify{nodes}_drawn"] = partial(tree, model, nodes, greedy=False)
        device: dict[str, list[float]] = {kind: [] for kind in kinds}
        whole: dict[str, list[float]] = {kind: [] for kind in kinds}
        for place in places:
            for kind, make in kinds.items():
                batch = make(place)
                device[kind].append(statistics.median(device_ms(model, batch) for _ in range(_ROUNDS)))
                before = time.perf_counter()
                model.step(batch)
                whole[kind].append((time.perf_counter() - before) * 1e3)
        for kind in kinds:
            figures[f"{kind}_{name}_ms"] = statistics.mean(device[kind])
            figures[f"{kind}_{name}_with_host_ms"] = statistics.median(whole[kind])
            base = "decode_drawn" if kind.endswith("drawn") else "decode"
            if kind != base:
                figures[f"{kind}_{name}_vs_decode"] = (
                    figures[f"{kind}_{name}_ms"] / figures[f"{base}_{name}_ms"]
                )
    figures.update(_draft(model))
    figures.update(_cycles(model))
    figures["draft_vs_decode"] = figures["draft_ms"] / figures["decode_4k_ms"]
    if options.parts:
        figures.update(_parts(model))
    return figures


def _draft(model: RandomModel) -> dict[str, float]:
    """One run of the draft behind a full window."""
    eagle = model.draft_model
    assert eagle is not None
    slot, window, accepted = eagle.open(), 1024, 3
    assert slot is not None
    tokens = [token % 1000 for token in range(5000)]
    eagle.observe(slot, range(window), 2000)
    eagle.start(slot, tokens[: 2000 + window + 1])
    whole = []
    for turn in range(8):
        end = 2000 + window + accepted * (turn + 1)
        eagle.observe(slot, range(accepted), end - accepted)
        before = time.perf_counter()
        eagle.start(slot, tokens[: end + 1])
        whole.append((time.perf_counter() - before) * 1e3)
    replay = eagle.captured(accepted)
    eagle.close(slot)
    return {
        "draft_ms": median_ms(model.gpu.torch_stream, replay, 20),
        "draft_with_host_ms": statistics.median(whole),
    }


def _cycles(model: RandomModel) -> dict[str, float]:
    """Verifying a tree of 16 and drafting the next one, in turn, as a host sees it; drafting ahead of the host, and after it."""
    eagle = model.draft_model
    assert eagle is not None
    figures: dict[str, float] = {}
    for ahead in (True, False):
        if not ahead:
            vars(eagle)["go_on"] = lambda _batch: None
        slot, stored = eagle.open(), 3000
        assert slot is not None
        eagle.observe(slot, range(1024), stored - 1024)
        tokens = [token % 1000 for token in range(stored + 1)]
        eagle.start(slot, tokens)
        taken = []
        for _ in range(40):
            batch = replace(tree(model, 16, stored), draft_slots=[slot])
            before = time.perf_counter()
            drawn = model.step(batch)
            path = accepted_paths(batch, drawn)[0]
            tokens += drawn[path].tolist()
            stored += len(path)
            eagle.start(slot, tokens)
            taken.append((time.perf_counter() - before) * 1e3)
        figures[f"cycle_{'ahead' if ahead else 'after'}_ms"] = statistics.median(taken[10:])
        eagle.close(slot)
        vars(eagle).pop("go_on", None)
    return figures


def _parts(model: RandomModel) -> dict[str, float]:
    """By how much a step of a tree is faster without the launches of one kind."""
    gpu = model.gpu
    figures: dict[str, float] = {}
    variants = without_one_kind(model)
    for part in ("sample", "verify", "commit", "silu_mul"):
        variants[part] = replace(variants["whole"], **{part: nothing})
    for name, length in LENGTHS.items():
        dense = length < model.plan.selection.dense_below if model.plan.selection is not None else True
        for nodes in (16, 64):
            model.step(tree(model, nodes, length - PAGE_TOKENS))
            for part, kernels in variants.items():
                if part == "selection" and dense:
                    continue
                steps = TreeSteps(
                    model.plan, model.buffers, gpu, kernels, decoder=model.decoder, drawn=model.drawn
                )
                with torch.inference_mode():
                    replay = gpu.capture(
                        partial(steps.run, steps.operators(nodes, dense=dense, sparse=not dense))
                    )
                ms = median_ms(gpu.torch_stream, replay, 20)
                key = f"verify{nodes}_{name}"
                figures[f"{key}_{part}_ms"] = ms if part == "whole" else figures[f"{key}_whole_ms"] - ms
    return figures


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", action="store_true", help="also measure where a step's time goes")


if __name__ == "__main__":
    sys.exit(run(__doc__, BOUNDS, measure, _add_options, weights="w4a16", tree_size=64, draft_levels=3))
