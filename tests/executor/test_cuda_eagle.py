"""EAGLE drafts on the CUDA executor, held to the CPU's: on the kernels' references everywhere, on the kernels on a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cuda_models import SMALL, WIDE, write_model
from executor_runner import Runner
from fixtures.held_buffers import check_buffers
from host_device import HostDevice
from test_cuda_trees import assert_greedy
from test_trees import tree_batch

from edged.config import AttentionConfig, ModelConfig, SpeculationConfig
from edged.decoding.stops import Stops
from edged.errors import UnsupportedError
from edged.executor.base import GrownTree
from edged.executor.cuda_executor import CudaExecutor
from edged.executor.torch_executor import TorchExecutor
from edged.memory.buffers import draft_buffers, step_buffers, weight_buffers
from edged.speculation.eagle_draft import EagleDraft
from edged.speculation.expansion import PRIOR_RATES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "speculation"))
from eagle_files import write_draft
from forced_drafts import forced
from layout_files import in_four_bits, write
from requests_with_drafts import Job, answer_all

VOCABULARY = SMALL["vocab_size"]
WINDOW = 64
MODELS = {
    "small": (SMALL, False, None),
    "wide": ({**WIDE, "mup_denominator": 8}, True, list(range(5, 105))),
    "packed": ({**WIDE, "mup_denominator": 8, "hidden_size": 128, "intermediate_size": 192}, True, None),
}
FOUR_BITS = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
"""Each with the draft's layout, and what it drafts from."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, (config, minicpm, ids) in MODELS.items():
        write_model(root / name, config)
        made = write_draft(root / f"{name}-draft", config, minicpm=minicpm)
        if name == "packed":
            write(
                root / "packed-draft", config, in_four_bits(made, group=64)[0], quantization_config=FOUR_BITS
            )
        if ids is not None:
            (root / f"{name}-map.json").write_text(json.dumps(ids))
    return root


def config_of(folders, model, *, device, dtype, **speculation):
    ids = folders / f"{model}-map.json"
    how = {"window": WINDOW, "width": 4, "depth": 3, "tree_size": 16, **speculation}
    return ModelConfig(
        name="m",
        path=folders / model,
        device=device,
        dtype=dtype,
        context_length=320,
        max_sequences=4,
        prefill_chunk=120,
        threads=1,
        attention=AttentionConfig(),
        speculation=SpeculationConfig(
            "eagle",
            draft=folders / f"{model}-draft",
            token_map=ids if ids.exists() else None,
            **how,
        ),
    )


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def open_device(request):
    """None: the first GPU."""
    return HostDevice if request.param == "references" else None


@pytest.fixture(scope="module")
def executors(folders, open_device):
    """Loads each pair once: the GPU's in float16, the CPU's in float32."""
    made = {}

    def get(model):
        if model not in made:
            mine = CudaExecutor(config_of(folders, model, device="cuda", dtype="float16"), open_device)
            theirs = TorchExecutor(config_of(folders, model, device="cpu", dtype="float32"))
            for executor in (mine, theirs):
                executor.load(lambda *_: None)
            made[model] = mine, theirs
        return made[model]

    yield get
    for pair in made.values():
        for executor in pair:
            executor.close()


class Shown:
    """One sequence on one executor, whose draft is shown what is stored."""

    def __init__(self, executor, first_page=0):
        self.executor, self.slot = executor, executor.draft_model.open()
        self._runner = Runner(executor)
        self._pages = list(range(first_page, first_page + 5))
        self.sequence = self._runner.sequence([], pages=self._pages)

    def store(self, tokens, cut):
        self.sequence.tokens = tokens
        while self.sequence.stored < len(tokens):
            batch = self._runner.batch([(self.sequence, cut)])
            self.executor.step(replace(batch, draft_slots=[self.slot]))
            self.sequence.stored += len(batch.token_ids)

    def start(self, tokens):
        return self.executor.draft_model.start(self.slot, tokens)

    def close(self):
        self.executor.draft_model.close(self.slot)


def check_tree(grown, tree, width):
    """Every node of the pool is one of the likeliest tokens that the CPU's draft finds below its parent."""
    nodes, level = list(range(-1, 0)), 0
    first = 0
    while first < len(grown.tokens):
        end = first + width * len(nodes)
        for place, parent in enumerate(nodes):
            children = range(first + place * width, first + (place + 1) * width)
            assert [grown.parents[node] for node in children] == [parent] * width
            ids, chances = tree.likeliest(parent, 3 * width)
            known = dict(zip(ids, chances, strict=True))
            mine = [grown.chances[node] for node in children]
            for node, chance in zip(children, mine, strict=True):
                # (A token that is not among them is no more likely than the last of them.)
                assert chance == pytest.approx(known.get(grown.tokens[node], chances[-1]), rel=0.2, abs=0.01)
            assert mine == pytest.approx(chances[:width], rel=0.2, abs=0.01)
            assert mine == sorted(mine, reverse=True)
        nodes = sorted(
            {grown.parents[node] for node in range(end, min(end + width * width, len(grown.tokens)))}
        )
        if nodes:
            tree.expand(nodes, [grown.tokens[n] for n in nodes], [grown.parents[n] for n in nodes])
            joint = [joint_of(grown, node) for node in range(first, end)]
            least = min(joint_of(grown, node) for node in nodes)
            assert sum(each > 1.001 * least for each in joint) <= width  # the likeliest go on
        first, level = end, level + 1
    return level


def joint_of(grown, node):
    return 1.0 if node < 0 else grown.chances[node] * joint_of(grown, grown.parents[node])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("length", "cut"), [(2, 1), (30, 7), (63, 64), (200, 120)])
def test_a_tree_is_the_cpus(executors, model, length, cut):
    executor, reference = executors(model)
    tokens = np.random.default_rng(length).integers(0, VOCABULARY, length + 4).tolist()
    pair = [Shown(each, first_page=7) for each in (executor, reference)]
    for count in (length, length + 1, length + 3):  # rows behind the first ones
        trees = []
        for shown in pair:
            shown.store(tokens[:count], cut)
            trees.append(shown.start(tokens[: count + 1]))
        grown, tree = trees
        assert isinstance(grown, GrownTree)
        assert len(grown.tokens) == 4 + 2 * 16
        assert check_tree(grown, tree, 4) == 3
    for shown in pair:
        shown.close()


def test_rows_wait_in_the_ring_while_no_draft_is_wanted(executors):
    executor, reference = executors("small")
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 150).tolist()
    pair = [Shown(each) for each in (executor, reference)]
    trees = []
    for shown in pair:
        shown.store(tokens[:100], 60)
        shown.store(tokens[:140], 1)
        trees.append(shown.start(tokens[:141]))
    check_tree(*trees, 4)
    assert pair[0].start(tokens[:141]) is None  # nothing new tells of the root
    for shown in pair:
        shown.store(tokens[:142], 1)
        shown.store(tokens[:145], 3)
    check_tree(*(shown.start(tokens[:146]) for shown in pair), 4)
    for shown in pair:
        shown.close()


def test_what_was_not_seen_is_not_drafted_from(executors):
    executor = executors("small")[0]
    tokens = list(range(40))
    shown = Shown(executor)
    assert shown.start(tokens) is None
    shown.store(tokens[:20], 20)
    assert shown.start(tokens) is None  # as with forced tokens that are not stored yet
    assert shown.start(tokens[:21]) is not None
    shown.close()
    slots = [executor.draft_model.open() for _ in range(5)]
    assert sum(slot is None for slot in slots) == 1
    for slot in slots[:4]:
        executor.draft_model.close(slot)


def tree_of(shown, grown, right):
    """A step whose tree is the first level of a pool, the root's last child being ``right``."""
    sequence, width = shown.sequence, grown.width
    tokens = [sequence.tokens[-1], *grown.tokens[: width - 1], right]
    batch = tree_batch([(sequence, tokens, [-1, *[0] * width])])
    return replace(batch, draft_slots=[shown.slot])


def test_the_next_tree_is_grown_behind_the_step_and_is_the_same(executors):
    """Whether the host goes on from what was accepted or from something else."""
    executor = executors("small")[0]
    prompt = np.random.default_rng(6).integers(0, VOCABULARY, 50).tolist()
    (truth,) = Runner(executor).generate([Runner(executor).sequence(prompt, room=8)], 8)
    shown = Shown(executor, first_page=9)
    shown.store(prompt, 64)
    shown.sequence.tokens = [*prompt, truth[0]]
    grown = shown.start(shown.sequence.tokens)
    drawn = executor.step(tree_of(shown, grown, truth[1]))
    accepted = [int(drawn[0])]
    assert accepted == truth[1:2]
    place = [*grown.tokens[:3], truth[1]].index(truth[1])
    accepted.append(int(drawn[1 + place]))
    assert shown.slot.ahead
    assert shown.slot.accepted == accepted
    replays = count_replays(executor.draft_model)
    ahead = shown.start([*shown.sequence.tokens, *accepted])
    assert replays == []  # it was there
    shown.sequence.tokens += accepted
    shown.sequence.stored += 2

    # The same tree by the usual way: from hidden states that were put away.
    other = Shown(executor, first_page=2)
    other.store(shown.sequence.tokens[:-1], 64)
    expected = other.start(shown.sequence.tokens)
    assert replays == [64]
    assert ahead.tokens == expected.tokens
    assert ahead.chances == pytest.approx(expected.chances, rel=0.05, abs=2e-3)

    # One token without a tree; then the host takes another one than was drawn, as a form might.
    drawn = executor.step(replace(Runner(executor).batch([(shown.sequence, 1)]), draft_slots=[shown.slot]))
    assert shown.slot.ahead
    forced = (int(drawn[0]) + 1) % VOCABULARY
    mine = shown.start([*shown.sequence.tokens, forced])
    assert replays == [64, 1]
    executor.draft_model.put_all_away()
    other.store(shown.sequence.tokens, 1)
    assert mine.tokens == other.start([*shown.sequence.tokens, forced]).tokens
    for each in (shown, other):
        each.close()


def count_replays(model):
    """The runs that the host asks for, by their rows; 64 for one that grows nothing."""
    replays = []

    def counted(rows, run):
        def replay():
            replays.append(rows)
            run()

        return replay

    model._grow = {rows: counted(rows, run) for rows, run in model._grow.items()}
    model._take = counted(64, model._take)
    return replays


@pytest.mark.parametrize("together", [1, 4])
def test_answers_are_the_plain_ones(executors, together):
    executor = executors("wide")[0]
    random = np.random.default_rng(3)
    jobs = [
        Job(
            random.integers(0, VOCABULARY, int(random.integers(1, 100))).tolist(),
            Stops(8),
        )
        for _ in range(4)
    ]
    plain = answer_all(executor, jobs, together=together)
    make_draft = partial(EagleDraft, model=executor.draft_model, width=4)
    speculator = forced(make_draft, 16, depth=3)
    speculator._acceptance = type(speculator._acceptance)(PRIOR_RATES)
    told = answer_all(executor, jobs, speculator, together=together)
    assert speculator.drafted > 30
    for job, one, other in zip(jobs, told, plain, strict=True):
        if one.tokens != other.tokens:  # a near tie went the other way
            assert_greedy(executor, job.prompt, one.tokens)
    for slot in [executor.draft_model.open() for _ in range(4)]:
        assert slot is not None
        executor.draft_model.close(slot)


def test_buffers_are_those_of_the_plan(executors):
    for model in MODELS:
        executor = executors(model)[0]
        specs = (
            *weight_buffers(executor.plan),
            *step_buffers(executor.plan),
            *draft_buffers(executor.plan),
        )
        check_buffers(executor.buffers, specs)


def test_what_the_kernels_do_not_do_is_refused(folders):
    def refused(**changes):
        with pytest.raises(UnsupportedError) as caught:
            CudaExecutor(config_of(folders, "wide", device="cuda", dtype="float16", **changes), HostDevice)
        return caught.value.message

    assert "depth 12 and width 10 run 110 nodes" in refused(tree_size=64, depth=12, width=10)
    assert "set depth to at most 7" in refused(tree_size=64, depth=12, width=10)
