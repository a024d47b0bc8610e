"""`verify_tree` against its reference and against a walk down the tree, token by token."""

import random

import pytest
import torch
from decode_cases import array, gpu, masks_of, random_parents

from plugins_trt.contract import Batch
from plugins_trt.verify_tree.contract import VerifyTree
from plugins_trt.verify_tree.launch import TreeVerifier
from plugins_trt.verify_tree.reference import verify_tree


def random_tree(rng, nodes):
    """Parents, tokens and targets; few different tokens, so that siblings often have the same and many are right."""
    parents = random_parents(nodes, rng, rng.choice((0.2, 0.7, 1.0)))
    kinds = rng.choice((1, 2, 4))
    return parents, [rng.randrange(kinds) for _ in parents], [rng.randrange(kinds) for _ in parents]


def walk(parents, tokens, targets):
    """The path as plain decoding would go: from each node to its first child that is the token drawn."""
    path = [0]
    while True:
        children = [
            node
            for node, parent in enumerate(parents)
            if parent == path[-1] and tokens[node] == targets[path[-1]]
        ]
        if not children:
            return path
        path.append(children[0])


def test_the_reference_walks_down_the_tree():
    rng = random.Random(0)
    lengths = []
    for _ in range(300):
        parents, tokens, targets = random_tree(rng, rng.randint(1, 64))
        path = verify_tree(torch.tensor(tokens), torch.tensor(targets), masks_of(parents))
        assert path == walk(parents, tokens, targets)
        lengths.append(len(path))
    assert min(lengths) == 1
    assert max(lengths) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_every_path_is_the_references(seed):
    """Sequences of 0 to 64 nodes side by side, some known chains, some left alone; the outputs are poisoned."""
    rng, rig = random.Random(seed), gpu()
    sequences = rng.choice((1, 7, 64))
    trees = [
        random_tree(rng, rng.choice((1, 2, 31, 32, 33, 63, 64, rng.randint(1, 64)))) for _ in range(sequences)
    ]
    empty = [sequences > 1 and rng.random() < 0.1 for _ in trees]
    trees = [([], [], []) if none else tree for none, tree in zip(empty, trees, strict=True)]
    given = [rng.choice((0, 0, 0, -1, 1, len(parents))) for parents, _, _ in trees]
    starts, masks = [0], []
    for parents, _, _ in trees:
        masks += [mask - (1 << 64) if mask >> 63 else mask for mask in (masks_of(parents) if parents else [])]
        starts.append(len(masks))
    padding = min(rng.choice((0, 5)) + (not masks), 64 * sequences - len(masks))
    total = len(masks) + padding

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    words = torch.tensor(masks + [-1] * padding, dtype=torch.int64, device="cuda")
    token_ids, targets = (
        int32([each for tree in trees for each in tree[which]] + [0] * padding) for which in (1, 2)
    )
    tensors = (int32(starts), int32([5] * sequences), int32([[0]] * sequences), int32([0] * total))
    batch = Batch(*(array(each) for each in tensors), tree_masks=array(words))
    paths = torch.full((sequences, 64), -9, dtype=torch.int32, device="cuda")
    accepted = torch.full((sequences,), -9, dtype=torch.int32, device="cuda")
    held = int32(given)
    args = VerifyTree(
        batch=batch,
        token_ids=array(token_ids),
        targets=array(targets),
        paths=array(paths),
        accepted=array(accepted),
        given=array(held) if seed % 2 else None,
    )
    torch.cuda.synchronize()
    TreeVerifier(rig.kernels.operator("verify_tree"))(args, rig.stream)
    rig.stream.synchronize()
    for index, (parents, tokens, drawn) in enumerate(trees):
        known = given[index] if seed % 2 else 0
        if not parents or known < 0:
            expected = []
        elif known:
            expected = list(range(known))
        else:
            expected = walk(parents, tokens, drawn)
        assert int(accepted[index]) == len(expected)
        assert paths[index].tolist() == expected + [-9] * (64 - len(expected))
