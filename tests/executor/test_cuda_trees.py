"""Trees of draft tokens on the CUDA executor: on the kernels' references everywhere, on the kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_models import ERROR, SMALL, WIDE, write_model
from executor_runner import Runner
from host_device import HostDevice
from test_trees import masks_of, path_to, random_tree, scattered, tree_batch

from edged.config import AttentionConfig, ModelConfig, SpeculationConfig
from edged.errors import InternalError
from edged.executor.base import OFF_PATH, SamplingRow
from edged.executor.cuda_executor import CudaExecutor
from edged.executor.host_sampler import HostOptions, HostSampler
from edged.memory.buffers import ModelPlan, step_buffers
from edged.memory.cuda_buffers import most_logit_rows, most_tree_tokens, tree_sizes
from edged.models.architecture import Architecture
from plugins_trt.sample.reference import sample

VOCABULARY = SMALL["vocab_size"]
SPARSE = AttentionConfig(mode="sparse", dense_below=80, init_blocks=0, top_k=2, window=64)
NEAR = 0.06
"""Logits this close may change places with the size of a step, in float16 and over their spread."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, config) for name, config in (("small", SMALL), ("wide", WIDE))}


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def open_device(request):
    """None: the first GPU."""
    return HostDevice if request.param == "references" else None


@pytest.fixture(scope="module")
def executors(folders, open_device):
    """Loads each executor once."""
    made = {}

    def get(model="small", *, sparse=False, **settings):
        key = (model, sparse, *settings.items())
        if key not in made:
            config = ModelConfig(
                name="m",
                path=folders[model],
                device="cuda",
                dtype="float16",
                context_length=320,
                max_sequences=4,
                prefill_chunk=260,
                attention=SPARSE if sparse else AttentionConfig(),
                speculation=SpeculationConfig(method="prompt_lookup", tree_size=64),
                **settings,
            )
            made[key] = CudaExecutor(config, open_device)
            made[key].load(lambda *_: None)
        return made[key]

    yield get
    for executor in made.values():
        executor.close()


def spread_of(logits):
    return float(logits.std())


def plain_logits(executor, prompt, answer):
    """Before each token of an answer, as decoding plainly gives them: ``[len(answer), V]``."""
    runner = Runner(executor)
    sequence = runner.sequence([*prompt, *answer], room=64)
    runner.prefill(replace_tokens(sequence, len(prompt) - 1), 64, "none") if len(prompt) > 1 else None
    sequence.tokens = [*prompt, *answer]
    return np.concatenate([runner.logits([(sequence, 1)]) for _ in answer])


def replace_tokens(sequence, count):
    sequence.tokens = sequence.tokens[:count]
    return sequence


def assert_greedy(executor, prompt, answer):
    """Every token is the plain step's largest logit, or as good as that."""
    logits = plain_logits(executor, prompt, answer)
    chosen = logits[np.arange(len(answer)), answer]
    assert (logits.max(1) - chosen).max() < NEAR * spread_of(logits)


@pytest.mark.parametrize(
    ("model", "sparse", "length"),
    [("small", False, 5), ("small", True, 76), ("wide", False, 60), ("wide", True, 250)],
)
def test_a_node_sees_what_decoding_its_path_would_show(executors, model, sparse, length):
    executor = executors(model, sparse=sparse)
    random = np.random.default_rng(length)
    prompt = random.integers(0, VOCABULARY, length).tolist()
    parents, tokens = random_tree(random, 10), random.integers(0, VOCABULARY, 10).tolist()
    runner, (sequence, plain) = scattered(executor, [prompt, prompt])
    logits = executor.logits(tree_batch([(sequence, tokens, parents)]))
    errors = []
    for node, mask in enumerate(masks_of(parents)):
        plain.tokens, plain.stored = [*prompt, *(tokens[each] for each in path_to(mask))], length
        while plain.stored < len(plain.tokens):
            expected = runner.logits([(plain, 1)])[0]
        errors.append(np.abs(logits[node] - expected).mean() / spread_of(expected))
    # (A block within rounding of the last one chosen may be swapped.)
    assert np.median(errors) < ERROR["float16"]
    assert np.sort(errors)[-2] < 5 * ERROR["float16"]


def grow(random, truth, place, nodes, right):
    """A tree of which a part of the nodes hold what comes."""
    parents = random_tree(random, nodes)
    depths = [mask.bit_count() - 1 for mask in masks_of(parents)]
    tokens = []
    for node in range(nodes):
        at = place + depths[node]
        known = node == 0 or (right and at < len(truth) and random.random() < 0.8)
        tokens.append(truth[at] if known else int(random.integers(0, VOCABULARY)))
    return tokens, parents


def answer_with_trees(executor, prompts, truths, nodes, *, count, sampling=None):
    """Decodes with trees that hold a part of what comes; the answers and how many drafts were right."""
    random = np.random.default_rng(nodes)
    _, sequences = scattered(executor, prompts, room=count)
    answers, accepted = [[truth[0]] for truth in truths], 0
    while min(map(len, answers)) < count:
        trees = []
        for index, (answer, truth, sequence) in enumerate(zip(answers, truths, sequences, strict=True)):
            known = truth if answer == truth[: len(answer)] else [*answer, *truth[len(answer) :]]
            tokens, parents = grow(random, known, len(answer) - 1, nodes, right=index != 1)
            trees.append((sequence, tokens, parents))
        rows = None
        if sampling is not None:
            rows = tuple(
                sampling(index, sequence.stored + mask.bit_count())
                for index, (sequence, _, parents) in enumerate(trees)
                for mask in masks_of(parents)
            )
        drawn = executor.step(tree_batch(trees, rows))
        for index, (sequence, tokens, parents) in enumerate(trees):
            own, path = drawn[index * nodes : (index + 1) * nodes], [0]
            for node in range(1, nodes):
                if parents[node] == path[-1] and tokens[node] == own[path[-1]]:
                    path.append(node)
            answers[index] += [int(own[node]) for node in path]
            sequence.stored += len(path)
            accepted += len(path) - 1
    return [answer[:count] for answer in answers], accepted, sequences


def plain_answers(executor, prompts, count):
    return [Runner(executor).generate([Runner(executor).sequence(p, room=count)], count)[0] for p in prompts]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("together", "nodes"), [(1, 1), (1, 7), (1, 64), (4, 16)])
def test_answers_with_trees_are_the_plain_ones(executors, sparse, together, nodes):
    executor, count = executors(sparse=sparse), 12
    random = np.random.default_rng(nodes)
    prompts = [random.integers(0, VOCABULARY, n).tolist() for n in (200, 40, 150, 60)[:together]]
    truths = plain_answers(executor, prompts, count)
    answers, accepted, sequences = answer_with_trees(executor, prompts, truths, nodes, count=count)
    assert accepted > 0 or nodes == 1
    same = sum(answer == truth for answer, truth in zip(answers, truths, strict=True))
    if same < together:  # a near tie went the other way
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_greedy(executor, prompt, answer)
    for sequence, prompt, answer in zip(sequences, prompts, answers, strict=True):
        check_pages(executor, sequence, [*prompt, *answer], sequences)


def check_pages(executor, sequence, tokens, sequences):
    """What is stored is what decoding token by token stores, but for the rounding of larger products."""
    stored = min(sequence.stored, len(tokens))
    runner = Runner(executor)
    taken = {page for each in sequences for page in each.table.tolist()}
    free = [page for page in range(executor.limits.pages) if page not in taken]
    plain = runner.sequence(tokens[:stored], pages=free[: -(-stored // 64)])
    runner.prefill(plain, 64, "none")
    for name, rows, least in (("keys", 1, 0), ("values", 1, 0), ("fine", 16, 31), ("coarse", 64, 127)):
        pool = executor.buffers.get(name)
        if pool is None or stored < rows:
            continue
        last = torch.arange(rows - 1, stored, rows)
        last = last[last >= least]
        if not len(last):
            continue
        mine, theirs = (
            pool.cpu()[:, torch.from_numpy(each.table).long()[last // 64], :, last % 64 // rows].float()
            for each in (sequence, plain)
        )
        assert (mine - theirs).abs().mean() < 0.02 * theirs.abs().mean()
        assert ((mine - theirs).abs() < 0.25).all(), name


def test_keys_in_eight_bits_move_with_their_scales(executors):
    executor, count = executors("wide", sparse=True, kv_dtype="int8"), 12
    prompts = [np.random.default_rng(4).integers(0, VOCABULARY, 250).tolist()]
    truths = plain_answers(executor, prompts, count)
    answers, accepted, _ = answer_with_trees(executor, prompts, truths, 8, count=count)
    assert accepted > 0
    if answers != truths:
        assert_greedy(executor, prompts[0], answers[0])


def test_seeded_answers_are_those_of_their_positions(executors):
    """Each token is what plain decoding draws from its logits with the number of its position."""
    executor, count = executors(), 12
    random = np.random.default_rng(8)
    prompts = [random.integers(0, VOCABULARY, n).tolist() for n in (50, 33)]
    temperatures = (0.9, 0.4)

    def row(index, position):
        # Few tokens, so that hardly any change their ranks with the rounding.
        how = {"temperature": temperatures[index], "top_k": 4, "top_p": 0.9}
        return SamplingRow(**how, seed=5 + index, position=position)

    truths = []
    for index, prompt in enumerate(prompts):
        runner = Runner(executor)
        sequence = runner.sequence(prompt, room=count)
        runner.logits([(sequence, len(prompt) - 1)], "none")
        for _ in range(count):
            batch = replace(runner.batch([(sequence, 1)]), sampling=(row(index, sequence.stored + 1),))
            sequence.tokens.append(int(executor.step(batch)[0]))
            sequence.stored += 1
        truths.append(sequence.tokens[-count:])
    answers, accepted, _ = answer_with_trees(executor, prompts, truths, 12, count=count, sampling=row)
    assert accepted > 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        logits = torch.from_numpy(plain_logits(executor, prompt, answer))
        rows = [row(index, len(prompt) + place) for place in range(count)]
        drawn = sample(
            logits,
            temperatures=[each.temperature for each in rows],
            top_ks=[each.top_k for each in rows],
            top_ps=[each.top_p for each in rows],
            seeds=[each.seed for each in rows],
            positions=[each.position for each in rows],
        ).tolist()
        # At a border between two tokens another rounding may draw the other one.
        assert sum(mine != other for mine, other in zip(answer, drawn, strict=True)) <= 1


class Recorder(HostSampler):
    """Counts what it is asked to draw."""

    asked = 0

    def draw(self, logits, row):
        self.asked += 1
        return super().draw(logits, row)


def test_the_host_draws_along_the_path_alone_and_its_path_is_kept(executors):
    executor = executors()
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 70).tolist()
    bias = HostOptions(logit_bias=((200, -50.0),))
    (truth,) = plain_answers(executor, [prompt], 6)
    assert 200 not in truth
    _, (sequence, other) = scattered(executor, [prompt, prompt])
    wrong = (truth[1] + 1) % VOCABULARY
    tokens, parents = [truth[0], wrong, truth[1], wrong, truth[2]], [-1, 0, 0, 1, 2]
    host = Recorder(bias, prompt)
    rows = (*(SamplingRow(host=host) for _ in tokens), *(SamplingRow() for _ in tokens))
    drawn = executor.step(tree_batch([(sequence, tokens, parents), (other, tokens, parents)], rows))
    assert [drawn[0], drawn[2], drawn[4]] == truth[1:4] == [drawn[5], drawn[7], drawn[9]]
    assert [drawn[1], drawn[3]] == [OFF_PATH, OFF_PATH]
    assert host.asked == 3
    for each in (sequence, other):
        each.stored += 3
        check_pages(executor, each, [*prompt, *truth[:3]], (sequence, other))
        logits = executor.logits(tree_batch([(each, [truth[3]], None)]))
        assert int(logits.argmax()) == truth[4]


def test_a_piece_and_a_stream_share_a_step_with_a_tree(executors):
    executor = executors(sparse=True)
    random = np.random.default_rng(9)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (220, 100, 20)]
    piece = random.integers(0, VOCABULARY, 30).tolist()
    (truth,) = plain_answers(executor, prompts[:1], 4)
    _, sequences = scattered(executor, prompts)
    trees = [
        (sequences[0], [truth[0], 1, truth[1]], [-1, 0, 0]),
        (sequences[1], piece, None),
        (sequences[2], [7], None),
    ]
    batch = tree_batch(trees)
    for run in (executor.logits, executor.step):  # the first accepts nothing of the tree
        found = run(batch)
    assert [found[0], found[2]] == truth[1:3]
    for sequence, tokens in zip(sequences, ([*truth[:2]], piece, [7]), strict=True):
        sequence.stored += len(tokens)
    for sequence, prompt, tokens in zip(sequences, prompts, (truth[:2], piece, [7]), strict=True):
        check_pages(executor, sequence, [*prompt, *tokens], sequences)


def test_a_tree_without_dense_nodes_replays_the_graph_that_launches_nothing_for_them(executors, monkeypatch):
    executor = executors(sparse=True)  # from position 79 on
    used = []

    def noting(bucket, name):
        def replay():
            used.append(name)
            getattr(bucket, name)()

        return replay

    names = ("replay", "replay_dense", "replay_sparse")
    noted = [
        replace(bucket, **{name: noting(bucket, name) for name in names})
        for bucket in executor._trees.buckets
    ]
    monkeypatch.setattr(executor._trees, "buckets", tuple(noted))
    random = np.random.default_rng(6)
    parents = [-1, 0, 1, 2]
    for lengths, expected in (
        ([75], "replay_dense"),
        ([76], "replay"),
        ([78], "replay"),
        ([79], "replay_sparse"),
        ([79, 200], "replay_sparse"),
        ([79, 5], "replay"),
    ):
        prompts = [random.integers(0, VOCABULARY, length).tolist() for length in lengths]
        _, sequences = scattered(executor, prompts)
        used.clear()
        logits = executor.logits(tree_batch([(each, [1, 2, 3, 4], parents) for each in sequences]))
        assert used == [expected]
        assert np.isfinite(logits).all()


def test_more_nodes_than_a_step_takes_are_refused(executors):
    executor = executors()
    assert executor.limits.tree_tokens == 64
    _, sequences = scattered(executor, [[1, 2], [3, 4]])
    chain = list(range(-1, 39))
    with pytest.raises(InternalError, match="at most 64 tokens, this one has 80"):
        executor.step(tree_batch([(each, [5] * 40, chain) for each in sequences]))


def test_the_plan_has_room_for_trees_where_there_are_any():
    plain = ModelPlan(Architecture.from_config(SMALL), "float16", 512, 2, 64, device="cuda")
    trees = replace(plain, tree_size=12)
    assert tree_sizes(plain) == ()
    assert most_tree_tokens(plain) == 2
    assert tree_sizes(trees) == (2, 4, 8, 16, 32)
    assert most_tree_tokens(trees) == most_logit_rows(trees) == 32
    assert tree_sizes(replace(trees, prefill_chunk=2)) == (2, 4)
    assert most_tree_tokens(replace(trees, prefill_chunk=1)) == 3
    assert tree_sizes(replace(trees, max_sequences=30)) == (2, 4, 8, 16, 32, 64)
    names = {spec.name for spec in step_buffers(trees)} - {spec.name for spec in step_buffers(plain)}
    assert names == {"paths"}
