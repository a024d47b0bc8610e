"""Trees of draft tokens on the CPU: each node is decoded as if its path were the sequence, and the accepted path stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from executor_runner import Runner, load
from random_weights import write_random
from test_sparse import CONFIG, FEW, SETTINGS

from edged.errors import InternalError
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.batch_check import check_batch
from plugins_trt.contract import Batch, DeviceArray, LaunchError
from plugins_trt.verify_tree.contract import VerifyTree
from plugins_trt.verify_tree.reference import parent_of

VOCABULARY = CONFIG["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("model"), CONFIG, deviation=2)


@pytest.fixture(scope="module", params=["dense", "sparse"])
def executor(request, folder):
    return load(folder, **SETTINGS, **({"attention": FEW} if request.param == "sparse" else {}))


@pytest.fixture(scope="module", params=["int8", "fp8"])
def quantized(request, folder):
    """Keys and values in eight bits, with scales that must move with them."""
    return load(folder, **SETTINGS, attention=FEW, kv_dtype=request.param)


def random_tree(random, nodes):
    """Parents of a tree, often with long paths."""
    return [-1] + [
        int(random.integers(0, node)) if random.random() < 0.4 else node - 1 for node in range(1, nodes)
    ]


def masks_of(parents):
    masks = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if node else 0) | 1 << node)
    return masks


def path_to(mask):
    return [node for node in range(64) if mask >> node & 1]


def tree_batch(trees, sampling=None):
    """A step of trees: (sequence, tokens, parents) each; no parents: a piece of the sequence's own tokens."""
    token_ids, positions, masks, starts, needed = [], [], [], [0], []
    for sequence, tokens, parents in trees:
        first = len(token_ids)
        token_ids += tokens
        if parents is None:
            positions += range(sequence.stored, sequence.stored + len(tokens))
            masks += [0] * len(tokens)
            needed.append(first + len(tokens) - 1)
        else:
            tree = masks_of(parents)
            positions += [sequence.stored + mask.bit_count() - 1 for mask in tree]
            masks += tree
            needed += range(first, first + len(tokens))
        starts.append(len(token_ids))
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        sequence_starts=np.array(starts, np.int32),
        lengths=np.array([sequence.stored for sequence, _, _ in trees], np.int32),
        page_tables=[sequence.table for sequence, _, _ in trees],
        logit_rows=np.array(needed, np.int32),
        sampling=tuple(SamplingRow() for _ in needed) if sampling is None else sampling,
        tree_masks=np.array(masks, np.uint64),
    )


def scattered(executor, prompts, room=64):
    """Sequences on pages in no order, their prompts stored."""
    runner = Runner(executor)
    order = np.random.default_rng(3).permutation(executor.limits.pages).tolist()
    sequences = []
    for prompt in prompts:
        count = -(-(len(prompt) + room + 64) // 64)
        sequences.append(runner.sequence(prompt, pages=order[:count]))
        order = order[count:]
        runner.logits([(sequences[-1], len(prompt))], "none")
    return runner, sequences


def alone(executor, prompt, path):
    """Logits after each token of a path that is decoded token by token behind a prompt."""
    runner = Runner(executor)
    sequence = runner.sequence([*prompt, *path], room=64)
    runner.logits([(sequence, len(prompt))], "none")
    return np.concatenate([runner.logits([(sequence, 1)]) for _ in path])


def check_compressed_keys(executor, sequence):
    """They are the means of the stored keys."""
    if "fine" not in executor.buffers:
        return
    table, stored = torch.from_numpy(sequence.table).long(), sequence.stored
    slots = (table[:, None] * 64 + torch.arange(64)).flatten()[:stored]
    keys = executor.buffers["kv"][:, :2, slots]  # [layers, kv_heads, n, D]
    for name, kernel, stride in (("fine", 32, 16), ("coarse", 128, 64)):
        means = keys.unfold(2, kernel, stride).mean(-1) if stored >= kernel else keys[:, :, :0]
        pool = executor.buffers[name][:, table].permute(0, 2, 1, 3, 4).flatten(2, 3)
        torch.testing.assert_close(pool[:, :, 1 : 1 + means.shape[2]], means, rtol=0, atol=1e-12)


# 293: crosses dense_below within the tree; 315, 351, 383: nodes complete compressed keys, fine and coarse.
@pytest.mark.parametrize("length", [5, 293, 351, 383])
def test_a_node_sees_what_decoding_its_path_would_show(executor, length):
    random = np.random.default_rng(length)
    prompt = random.integers(0, VOCABULARY, length).tolist()
    parents = random_tree(random, 10)
    tokens = random.integers(0, VOCABULARY, 10).tolist()
    _, (sequence,) = scattered(executor, [prompt])
    logits = executor.logits(tree_batch([(sequence, tokens, parents)]))
    for node, mask in enumerate(masks_of(parents)):
        expected = alone(executor, prompt, [tokens[each] for each in path_to(mask)])[-1]
        np.testing.assert_allclose(logits[node], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("nodes", [1, 7, 64])
def test_the_accepted_path_stays_and_nothing_else(executor, nodes):
    """Trees that hold the true continuation somewhere, verified again and again, give the greedy answer."""
    random = np.random.default_rng(nodes)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (290, 40)]
    count = 24
    expected = [
        Runner(executor).generate([Runner(executor).sequence(p, room=count)], count)[0] for p in prompts
    ]
    _, sequences = scattered(executor, prompts, room=count)
    answers = [[expected[0][0]], [expected[1][0]]]
    accepted = 0
    while min(map(len, answers)) < count:
        trees = []
        for answer, truth, sequence in zip(answers, expected, sequences, strict=True):
            parents = random_tree(random, nodes)
            right = random.integers(0, 4) > 0
            tokens = [answer[-1]]
            for node in range(1, nodes):
                depth = masks_of(parents)[node].bit_count() - 1
                place = len(answer) - 1 + depth
                known = right and place < count and random.random() < 0.7
                tokens.append(truth[place] if known else int(random.integers(0, VOCABULARY)))
            trees.append((sequence, tokens, parents))
        batch = tree_batch(trees)
        drawn = executor.step(batch)
        for index, (sequence, tokens, parents) in enumerate(trees):
            own = drawn[index * nodes : (index + 1) * nodes]
            path = [0]
            for node in range(1, nodes):
                if parents[node] == path[-1] and tokens[node] == own[path[-1]]:
                    path.append(node)
            answers[index] += [int(own[node]) for node in path]
            sequence.stored += len(path)
            accepted += len(path) - 1
    assert [answer[:count] for answer in answers] == expected
    assert accepted > 0 or nodes == 1
    for sequence in sequences:
        check_compressed_keys(executor, sequence)


def test_keys_in_eight_bits_move_with_their_scales(quantized):
    random = np.random.default_rng(4)
    prompt = random.integers(0, VOCABULARY, 290).tolist()
    runner, count = Runner(quantized), 20
    (truth,) = runner.generate([runner.sequence(prompt)], count)
    _, (sequence,) = scattered(quantized, [prompt])
    answer, accepted = [truth[0]], 0
    while len(answer) < count:
        depth = min(5, count - len(answer))
        spine = truth[len(answer) : len(answer) + depth]
        # A wrong sibling before each right node, so that everything accepted has to move.
        tokens, parents, at = [answer[-1]], [-1], 0
        for token in spine:
            tokens += [(token + 1) % VOCABULARY, token]
            parents += [at, at]
            at = len(tokens) - 1
        drawn = quantized.step(tree_batch([(sequence, tokens, parents)]))
        path = [0]
        for node in range(1, len(tokens)):
            if parents[node] == path[-1] and tokens[node] == drawn[path[-1]]:
                path.append(node)
        answer += [int(drawn[node]) for node in path]
        sequence.stored += len(path)
        accepted += len(path) - 1
    assert answer[:count] == truth
    assert accepted >= count // 2


def test_trees_share_a_step_with_prompts_and_decoding(executor):
    random = np.random.default_rng(9)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (330, 100, 20)]
    runner, sequences = scattered(executor, prompts)
    parents = [-1, 0, 0, 1, 1, 2]
    tokens = random.integers(0, VOCABULARY, 6).tolist()
    piece = random.integers(0, VOCABULARY, 30).tolist()
    chain = random.integers(0, VOCABULARY, 5).tolist()
    trees = [
        (sequences[0], tokens, parents),
        (sequences[1], piece, None),
        (sequences[2], chain, [-1, 0, 1, 2, 3]),
    ]
    logits = executor.logits(tree_batch(trees))
    for node, mask in enumerate(masks_of(parents)):
        expected = alone(executor, prompts[0], [tokens[each] for each in path_to(mask)])[-1]
        np.testing.assert_allclose(logits[node], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits[6], alone(executor, prompts[1], piece)[-1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits[7:], alone(executor, prompts[2], chain), rtol=0, atol=1e-5)
    assert runner is not None


def test_a_path_is_drawn_with_the_numbers_of_its_positions(executor):
    random = np.random.default_rng(2)
    prompt = random.integers(0, VOCABULARY, 50).tolist()
    _, (sequence,) = scattered(executor, [prompt])
    first = 7

    def row(position):
        return SamplingRow(temperature=0.9, top_p=0.95, seed=5, position=position)

    truth, stored = [first], sequence.stored
    for depth in range(6):
        batch = tree_batch([(sequence, [truth[-1]], None)], sampling=(row(stored + depth + 1),))
        truth.append(int(executor.step(batch)[0]))
        sequence.stored += 1
    sequence.stored = stored
    wrong = (truth[1] + 1) % VOCABULARY
    tokens, parents = [first, wrong, truth[1], truth[2], wrong], [-1, 0, 0, 2, 3]
    batch = tree_batch(
        [(sequence, tokens, parents)],
        sampling=tuple(row(stored + mask.bit_count()) for mask in masks_of(parents)),
    )
    drawn = executor.step(batch)
    assert [drawn[0], drawn[2], drawn[3]] == truth[1:4]
    assert drawn[1] == -2  # off the path: not drawn
    sequence.stored += 3
    batch = tree_batch([(sequence, [truth[3]], None)], sampling=(row(stored + 4),))
    assert executor.step(batch)[0] == truth[4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tree_masks": np.array([1, 3, 5], np.uint64)}, "3 words for 4 tokens"),
        ({"tree_masks": np.array([1, 3, 4, 11], np.uint64)}, "node 2 of sequence 0 has the mask 0x4"),
        ({"tree_masks": np.array([1, 3, 6, 11], np.uint64)}, "node 2 of sequence 0 has the mask 0x6"),
        ({"tree_masks": np.array([2, 3, 5, 11], np.uint64)}, "below one root"),
        ({"positions": np.array([20, 21, 22, 22], np.int32)}, "node 2 of sequence 0 is not at its depth"),
        ({"logit_rows": np.array([0, 1, 3], np.int32)}, "node 2 of sequence 0 is no needed row"),
    ],
)
def test_a_tree_that_is_none_is_refused(executor, change, message):
    _, (sequence,) = scattered(executor, [list(range(20))])
    batch = tree_batch([(sequence, [1, 2, 3, 4], [-1, 0, 0, 1])])
    check_batch(batch, executor.limits)
    with pytest.raises(InternalError, match=message):
        check_batch(replace(batch, **change), executor.limits)


def test_the_parent_is_the_highest_ancestor():
    parents = random_tree(np.random.default_rng(0), 64)
    assert [parent_of(mask) for mask in masks_of(parents)] == parents


def array(dtype, *shape):
    return DeviceArray(256, dtype, shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"batch": {"tree_masks": None}}, "tree_masks: missing"),
        ({"token_ids": array("int32", 5)}, "token_ids: shape"),
        ({"targets": array("int64", 4)}, "targets: dtype"),
        ({"paths": array("int32", 2, 32)}, "paths: shape"),
        ({"accepted": array("int32", 1)}, "accepted: shape"),
        ({"given": array("int64", 2)}, "given: dtype"),
    ],
)
def test_the_operator_names_what_it_does_not_take(change, message):
    change = dict(change)
    batch = {
        "sequence_starts": array("int32", 3),
        "lengths": array("int32", 2),
        "page_tables": array("int32", 2, 4),
        "positions": array("int32", 4),
        "tree_masks": array("uint64", 4),
        **change.pop("batch", {}),
    }
    arguments = {
        "batch": Batch(**batch),
        "token_ids": array("int32", 4),
        "targets": array("int32", 4),
        "paths": array("int32", 2, 64),
        "accepted": array("int32", 2),
        **change,
    }
    if message is None:
        VerifyTree(**arguments)
        return
    with pytest.raises(LaunchError, match=message):
        VerifyTree(**arguments)
