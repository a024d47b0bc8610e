"""EAGLE drafts: the layer against its papers, trees against every path by itself, lossless answers, refusals at load."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from eagle_files import plain_forward, write_draft
from fixtures.small_models import CONFIG, model_files
from forced_drafts import forced
from requests_with_drafts import Job, answer_all

from edged.config import ModelConfig, SpeculationConfig
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops
from edged.errors import CheckpointError
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.memory.buffers import ModelPlan
from edged.memory.model_rows import model_rows
from edged.models.architecture import Architecture
from edged.speculation.eagle_draft import EagleDraft
from edged.speculation.expansion import CLASSES, PRIOR_RATES, grow

VOCABULARY = 257
MINICPM = {
    **CONFIG,
    "model_type": "minicpm",
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 32,
    "mup_denominator": 32,
}


def target(tmp_path, **changes):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for name, content in model_files(seed=3, **changes).items():
        (folder / name).write_bytes(content)
    return folder


def load(folder, draft, **settings):
    speculation = SpeculationConfig(
        "eagle", settings.pop("tree_size", 16), draft=draft, **settings.pop("speculation", {})
    )
    executor = TorchExecutor(
        ModelConfig(
            name="m",
            path=folder,
            dtype="float64",
            context_length=512,
            max_sequences=4,
            prefill_chunk=64,
            threads=1,
            speculation=speculation,
            **settings,
        )
    )
    executor.load(lambda *_: None)
    return executor


@pytest.fixture(scope="module", params=["llama", "minicpm"])
def case(request, tmp_path_factory):
    """An executor with a draft of one layout, the draft's tensors, and what the plain forward must know."""
    folder = tmp_path_factory.mktemp("eagle")
    minicpm = request.param == "minicpm"
    config = MINICPM if minicpm else {**CONFIG, "intermediate_size": 96}
    model = target(folder, **(config if minicpm else {}))
    made = write_draft(folder / "draft", config, minicpm=minicpm)
    executor = load(model, folder / "draft", speculation={"window": 64})
    known = {
        "minicpm": minicpm,
        "residual": 1.4 / 32**0.5 if minicpm else 1.0,
        "scale": 12.0 if minicpm else 1.0,
    }
    return executor, made, config, known


def run_prompt(executor, tokens, slot, cut=50):
    """Store a prompt, shown to a draft."""
    for first in range(0, len(tokens), cut):
        piece = tokens[first : first + cut]
        end = first + len(piece)
        executor.step(
            StepBatch(
                token_ids=np.array(piece, np.int32),
                positions=np.arange(first, end, dtype=np.int32),
                sequence_starts=np.array([0, len(piece)], np.int32),
                lengths=np.array([first], np.int32),
                page_tables=[np.arange(8, dtype=np.int32)],
                logit_rows=np.array([len(piece) - 1], np.int32),
                sampling=[SamplingRow()],
                draft_slots=[slot],
            )
        )


def hidden_states(executor, tokens):
    """The final norm's output after each token, from one step."""
    run_prompt(executor, tokens, None, cut=64)
    states = []
    for first in range(0, len(tokens), 64):
        piece = tokens[first : first + 64]
        executor.step(
            StepBatch(
                token_ids=np.array(piece, np.int32),
                positions=np.arange(first, first + len(piece), dtype=np.int32),
                sequence_starts=np.array([0, len(piece)], np.int32),
                lengths=np.array([first], np.int32),
                page_tables=[np.arange(8, dtype=np.int32)],
                logit_rows=np.array([0], np.int32),
                sampling=[SamplingRow()],
            )
        )
        states.append(executor._ops.hidden.clone())
    return torch.cat(states)


def plain_probabilities(executor, out, config):
    logits = out / (executor.plan.architecture.logit_divisor) @ executor._decoder.head.weight.double().T
    return logits.softmax(-1)


@pytest.mark.parametrize("length", [2, 30, 60, 200])
def test_a_tree_is_what_the_plain_layer_says_of_each_path(case, length):
    executor, made, config, known = case
    r = np.random.default_rng(length)
    tokens = r.integers(0, VOCABULARY, length + 1).tolist()  # the last one is the root
    model = executor.draft_model
    slot = model.open()
    run_prompt(executor, tokens[:-1], slot)
    tree = model.start(slot, tokens)
    states = hidden_states(executor, tokens[:-1])
    embedding = executor.buffers["embedding"]
    # Of a sequence longer than the window only the rows that were shown lately are there, each with what it saw then.
    shown = min(length, 64)
    first = length - shown

    def rows(path, outs):
        after = torch.tensor([*tokens[first + 1 :], *path])
        hidden = torch.cat([states[first:], *outs])
        shifted = {**known, "window": 128}  # 64, and what stands before them in their block
        # Positions begin at 0 there: rotary embeddings know differences alone.
        return plain_forward(made, config, embedding, after, hidden, **shifted)[-1:]

    root = rows([], [])
    ids, chances = tree.likeliest(-1, 3)
    expected = plain_probabilities(executor, root, config)[0].topk(3)
    assert ids == expected.indices.tolist()
    np.testing.assert_allclose(chances, expected.values, rtol=1e-4)
    tree.expand([0, 1], ids[:2], [-1, -1])
    children, _ = tree.likeliest(1, 2)
    tree.expand([2, 3, 4], [*tree.likeliest(0, 1)[0], *children], [0, 1, 1])
    one = rows([ids[1]], [root])
    two = rows([ids[1], children[1]], [root, one])
    expected = plain_probabilities(executor, two, config)[0].topk(5)
    got = tree.likeliest(4, 5)
    assert got[0] == expected.indices.tolist()
    np.testing.assert_allclose(got[1], expected.values, rtol=1e-4)
    model.close(slot)


def test_slots_come_back_and_run_out(case):
    model = case[0].draft_model
    slots = [model.open() for _ in range(5)]
    assert sum(slot is None for slot in slots) == 1
    for slot in slots[:4]:
        model.close(slot)


def test_what_was_not_seen_is_not_drafted_from(case):
    executor = case[0]
    model = executor.draft_model
    slot = model.open()
    tokens = list(range(40))
    assert model.start(slot, tokens) is None
    run_prompt(executor, tokens[:20], slot)
    assert model.start(slot, tokens) is None  # as with forced tokens that are not stored yet
    assert model.start(slot, tokens[:21]) is not None
    model.close(slot)


def eagle_speculator(executor, size, width=4, depth=3):
    speculator = forced(
        partial(EagleDraft, model=executor.draft_model, width=width), size, depth=min(depth, size - 1)
    )
    speculator._acceptance = type(speculator._acceptance)(PRIOR_RATES)
    return speculator


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.soak), 12, pytest.param(64, marks=pytest.mark.soak)]
)
def test_answers_are_the_same_with_it(case, size):
    executor = case[0]
    r = np.random.default_rng(size)
    jobs = [
        Job(
            r.integers(0, VOCABULARY, int(r.integers(1, 150))).tolist(),
            Stops(int(r.integers(2, 40))),
            Sampling(
                temperature=float(r.choice([0.0, 0.7])),
                seed=index,
                frequency_penalty=float(r.choice([0.0, 0.5])),
            ),
        )
        for index in range(10)
    ]
    expected = answer_all(executor, jobs, together=1)
    for together in (1, 4):
        speculator = eagle_speculator(executor, size)
        told = answer_all(executor, jobs, speculator, together=together)
        assert [one.tokens for one in told] == [one.tokens for one in expected]
        assert speculator.drafted > 50
    assert len(executor.draft_model._free) == 4


def test_a_token_map_cuts_the_vocabulary(tmp_path):
    config = {**CONFIG, "intermediate_size": 96}
    write_draft(tmp_path / "draft", config)
    ids = [3, 200, 17, 90, 44]
    (tmp_path / "map.json").write_text(json.dumps(ids))
    model = target(tmp_path)
    whole = load(model, tmp_path / "draft")
    cut = load(model, tmp_path / "draft", speculation={"token_map": tmp_path / "map.json"})
    tokens = list(range(50))
    found = []
    for executor in (whole, cut):
        slot = executor.draft_model.open()
        run_prompt(executor, tokens[:-1], slot)
        found.append(executor.draft_model.start(slot, tokens).likeliest(-1, VOCABULARY))
    assert sorted(found[1][0]) == sorted(ids)
    among = [(token, p) for token, p in zip(*found[0], strict=True) if token in ids]
    assert [token for token, _ in among] == found[1][0]
    total = sum(p for _, p in among)
    np.testing.assert_allclose([p / total for _, p in among], found[1][1], rtol=1e-5)


class Table:
    """A draft model whose distributions are given: by the path's tokens."""

    def __init__(self, seed, vocabulary=6):
        self._seed, self._vocabulary = seed, vocabulary
        self._paths = {-1: ()}

    def distribution(self, path):
        r = np.random.default_rng([self._seed, *path])
        return r.dirichlet(np.full(self._vocabulary, 0.6))

    def expand(self, nodes, tokens, parents):
        for node, token, parent in zip(nodes, tokens, parents, strict=True):
            self._paths[node] = (*self._paths[parent], token)

    def likeliest(self, node, count):
        p = self.distribution(self._paths[node])
        order = np.argsort(-p)[:count]
        return order.tolist(), p[order].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_of_the_pool_are_those_of_the_whole_tree_where_it_is_wide_enough(seed):
    table, depth, vocabulary = Table(seed, 3), 3, 3
    pool = grow(table, depth=depth, width=9, rates=PRIOR_RATES)
    assert len(pool) == 3 + 9 + 27  # every path
    paths = {}
    for node in range(len(pool)):
        tokens = tuple(pool.tokens[each] for each in pool.path(node))
        joint = 1.0
        for place, token in enumerate(tokens):
            joint *= table.distribution(tokens[:place])[token]
        paths[tokens] = joint
        assert pool.chances[node] == pytest.approx(joint)
        assert pool.parents[node] < 0 or pool.chances[node] <= pool.chances[pool.parents[node]]
    assert len(paths) == sum(vocabulary**level for level in (1, 2, 3))


def test_the_pool_has_k_and_k_squared_nodes_a_level():
    for width, depth in ((1, 4), (3, 1), (3, 4), (5, 3)):
        pool = grow(Table(1, 8), depth=depth, width=width, rates=PRIOR_RATES)
        assert len(pool) == width + width**2 * (depth - 1)


def test_no_child_is_likelier_than_its_parent_by_rounding():
    class Sure(Table):
        def likeliest(self, node, count):
            r = np.random.default_rng([self._seed, *self._paths[node]])
            return list(range(count)), np.sort(r.uniform(0.5, 1.0, count))[::-1].tolist()

    for seed in range(200):
        pool = grow(Sure(seed), depth=4, width=3, rates=[0.98] * CLASSES)
        assert all(
            parent < 0 or pool.chances[node] <= pool.chances[parent]
            for node, parent in enumerate(pool.parents)
        )


def test_rates_temper_what_a_draft_believes():
    sure = grow(Table(2), depth=2, width=2, rates=PRIOR_RATES)
    doubted = grow(Table(2), depth=2, width=2, rates=[rate / 2 for rate in PRIOR_RATES])
    assert [pair[0] / 2 for pair in zip(sure.chances[:2], strict=True)] == pytest.approx(doubted.chances[:2])
    trusted = grow(Table(2), depth=2, width=2, rates=[0.98] * CLASSES)
    assert all(0 < chance <= 1 for chance in trusted.chances)


# (what changes, what the refusal says)
REFUSALS = [
    ({"changes": {"hidden_size": 96}}, "hidden_size gives 96 and the target has 64"),
    ({"changes": {"vocab_size": 300}}, "vocab_size gives 300 and the target has 257"),
    ({"changes": {"num_hidden_layers": 2}}, "num_hidden_layers gives 2 and a draft has 1"),
    ({"tensors": {"fc.weight": None}}, "fc.weight is missing"),
    (
        {"tensors": {"fc.weight": np.zeros((64, 64), np.float32)}},
        r"fc.weight is \[64, 64\] instead of \[64, 128\]",
    ),
    ({"tensors": {"d2t": np.zeros(5, np.float32)}}, "d2t has no place in an EAGLE draft"),
    ({"tensors": {"input_norm1.weight": np.ones(64, np.float32)}}, "come together"),
    (
        {"tensors": {"fc.weight": np.full((64, 128), np.nan, np.float32)}},
        r"tensor 'fc.weight' holds NaN or infinity",
    ),
]


@pytest.mark.parametrize(("how", "message"), REFUSALS, ids=[message[:30] for _, message in REFUSALS])
def test_a_draft_of_another_model_is_refused_at_load(tmp_path, how, message):
    write_draft(tmp_path / "draft", {**CONFIG, "intermediate_size": 96}, **how)
    with pytest.raises(CheckpointError, match=message):
        load(target(tmp_path), tmp_path / "draft")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2, 2]", "token id 2 is in it more than once"),
        ("[1, 257]", "token id 257 is outside the vocabulary: ids go from 0 to 256"),
        ("[-1]", "token id -1 is outside"),
        ("[]", "list of whole numbers"),
        ("[1.5]", "list of whole numbers"),
        ("{", "JSON list of token ids"),
        ("[[1]]", "list of whole numbers"),
    ],
)
def test_a_token_map_that_is_none_is_refused_at_load(tmp_path, content, message):
    write_draft(tmp_path / "draft", {**CONFIG, "intermediate_size": 96})
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load(target(tmp_path), tmp_path / "draft", speculation={"token_map": tmp_path / "map.json"})


def test_a_draft_with_another_tokenizer_is_refused(tmp_path):
    model = target(tmp_path)
    write_draft(tmp_path / "draft", {**CONFIG, "intermediate_size": 96})
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(tokenizer))
    load(model, tmp_path / "draft").close()
    words = list(tokenizer["model"]["vocab"])
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[words[5]], vocabulary[words[6]] = vocabulary[words[6]], vocabulary[words[5]]
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="the draft is of another model"):
        load(model, tmp_path / "draft")


def test_the_ledger_counts_the_draft(tmp_path):
    model = target(tmp_path)
    write_draft(tmp_path / "draft", {**CONFIG, "intermediate_size": 96})
    config = ModelConfig(
        name="m",
        path=model,
        context_length=512,
        speculation=SpeculationConfig("eagle", draft=tmp_path / "draft"),
    )
    rows = {row.name: row for row in model_rows(ModelPlan.of(config, Architecture.of(config)))}
    assert rows["draft model"].bytes > 4 * 64 * 128
    assert "draft" in rows["draft model"].note
