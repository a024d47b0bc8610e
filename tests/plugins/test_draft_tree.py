"""A draft's rows and the growth of its tree: the references held to the speculation's own growth, the kernels to them."""

import pytest
import torch
from decode_cases import TOLERANCE, array, error, gpu

from edged.speculation.expansion import CLASSES, grow
from plugins_trt.contract import LaunchError
from plugins_trt.draft_input.contract import DraftInput, window_blocks
from plugins_trt.draft_input.launch import DraftInputWriter
from plugins_trt.draft_input.reference import draft_rows, window
from plugins_trt.draft_take.contract import DraftTake
from plugins_trt.draft_take.launch import DraftTaker
from plugins_trt.draft_take.reference import taken_rows
from plugins_trt.draft_tree.contract import DraftGrow, DraftTop, parts_of, pool_size
from plugins_trt.draft_tree.launch import TreeGrower
from plugins_trt.draft_tree.reference import Growing, top
from plugins_trt.draft_tree.reference import grow as grow_level


class Chances:
    """A draft whose distribution after a path depends on the path alone."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary
        self.paths = {-1: ()}

    def expand(self, nodes, tokens, parents):
        for node, token, parent in zip(nodes, tokens, parents, strict=True):
            self.paths[node] = (*self.paths[parent], token)

    def logits(self, path):
        seed = hash(path) % 2**31
        return 2 * torch.randn(self.vocabulary, generator=torch.Generator().manual_seed(seed))

    def likeliest(self, node, count):
        found = self.logits(self.paths[node]).softmax(0).topk(count)
        return found.indices.tolist(), found.values.tolist()


@pytest.mark.parametrize(("width", "levels"), [(10, 3), (4, 6), (1, 2), (3, 1)])
def test_levels_grow_the_pool_that_the_speculation_grows(width, levels):
    draft = Chances(101)
    expected = grow(
        draft, depth=levels, width=width, rates=[(kind + 0.5) / CLASSES for kind in range(CLASSES)]
    )
    draft, tree = Chances(101), Growing(width)
    rows = draft.logits(())[None]
    for level in range(levels):
        grow_level(tree, rows.softmax(1))
        if level + 1 == levels:
            break
        for mask, node in zip(tree.masks[-width:], tree.nodes, strict=True):
            assert mask.bit_count() == level + 1
            assert mask.bit_length() - 1 == len(tree.masks) - width + tree.nodes.index(node)
        draft.expand(tree.nodes, [tree.tokens[n] for n in tree.nodes], [tree.parents[n] for n in tree.nodes])
        rows = torch.stack([draft.logits(draft.paths[node]) for node in tree.nodes])
    assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
    assert tree.joint == pytest.approx(expected.chances, rel=1e-5)
    assert len(tree.tokens) == pool_size(width, levels)


def test_a_window_is_whole_pages_that_hold_its_last_tokens():
    blocks, counts = window(torch.tensor([0, 63, 64, 130, 700]), 2, window_blocks(128))
    assert blocks[:, 1].tolist() == [[0, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2], [8, 9, 10]]
    assert counts[:, 0].tolist() == [1, 1, 2, 3, 3]


def test_arguments_are_refused_by_name():
    logits = torch.zeros(2, 3000)
    candidates, statistics = torch.zeros(2, 2, 10, dtype=torch.int64), torch.zeros(2, 2, 2)
    DraftTop(array(logits), array(candidates), array(statistics))
    with pytest.raises(LaunchError, match="candidates: shape"):
        DraftTop(array(logits), array(candidates[:, :1].contiguous()), array(statistics))
    with pytest.raises(LaunchError, match="candidates: 17 of each part"):
        DraftTop(array(logits), array(torch.zeros(2, 2, 17, dtype=torch.int64)), array(statistics))


def cuda_tree(width, levels, vocabulary):
    """Everything that the kernels write, poisoned."""
    pool, rows = pool_size(width, levels), levels * width

    def poisoned(*shape, dtype=torch.int32):
        return torch.full(shape, -7, dtype=dtype, device="cuda")

    return {
        "tokens": poisoned(pool),
        "parents": poisoned(pool),
        "chances": poisoned(pool, dtype=torch.float32),
        "joint": poisoned(width, dtype=torch.float32),
        "nodes": poisoned(width),
        "token_ids": poisoned(rows),
        "hidden_rows": poisoned(rows),
        "positions": poisoned(rows),
        "masks": poisoned(rows, dtype=torch.int64),
        "lengths": torch.tensor([40], dtype=torch.int32, device="cuda"),
        "root_row": torch.tensor([5], dtype=torch.int32, device="cuda"),
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "levels"), [(10, 3), (4, 6), (1, 2), (16, 5), (3, 1)])
@pytest.mark.parametrize("vocabulary", [257, 2048, 18362, 73448, 151936])
def test_the_kernels_grow_the_references_tree(width, levels, vocabulary):
    rig = gpu()
    grower = TreeGrower(rig.kernels.operator("draft_tree"))
    generator = torch.Generator("cuda").manual_seed(width * levels + vocabulary)
    order = torch.randperm(vocabulary, generator=generator, device="cuda")
    token_map = (order + 1000).int() if vocabulary == 18362 else None
    parts = parts_of(vocabulary)
    state, tree = cuda_tree(width, levels, vocabulary), Growing(width)
    for level in range(levels):
        rows = 1 if level == 0 else width
        logits = 3 * torch.randn(rows, vocabulary, generator=generator, device="cuda")
        if level == 1:
            logits[:, vocabulary // 2 :] = logits[:, :1]  # many equal ones
            logits[0, :5] = float("nan")
        candidates = torch.full((rows, parts, width), -1, dtype=torch.int64, device="cuda")
        statistics = torch.full((rows, parts, 2), float("nan"), device="cuda")
        args = DraftTop(array(logits), array(candidates), array(statistics))
        torch.cuda.synchronize()
        grower.top(args, rig.stream)
        known = {name: array(tensor) for name, tensor in state.items()}
        shape = {"level": level, "levels": levels, "first_row": 64}
        grower.grow(
            DraftGrow(
                candidates=array(candidates),
                statistics=array(statistics),
                token_map=None if token_map is None else array(token_map),
                **known,
                **shape,
            ),
            rig.stream,
        )
        rig.stream.synchronize()
        if vocabulary <= 2048:
            keys, expected = top(logits.cpu(), width)
            assert [[[each % 2**64 for each in part] for part in row] for row in candidates.tolist()] == keys
            torch.testing.assert_close(statistics.cpu(), expected, rtol=1e-4, atol=0)
        clean = logits.nan_to_num(nan=-torch.inf).double()
        first, above = len(tree.tokens), tree.nodes
        grow_level(tree, clean.softmax(1).cpu(), None if token_map is None else token_map.cpu())
        end = len(tree.tokens)
        # Equal logits have equal probabilities, and the smaller id comes first in both.
        assert state["tokens"][first:end].tolist() == tree.tokens[first:]
        assert state["parents"][first:end].tolist() == tree.parents[first:]
        torch.testing.assert_close(
            state["chances"][first:end].cpu(), torch.tensor(tree.chances[first:]), rtol=1e-4, atol=1e-9
        )
        if level + 1 == levels:
            break
        at = slice(level * width, (level + 1) * width)
        if state["nodes"].tolist() != tree.nodes:  # two that are nearly equal: go on with the kernel's choice
            assert level == 1
            mine = sorted(tree.joint[node] for node in state["nodes"].tolist())
            assert mine == pytest.approx(sorted(tree.joint[node] for node in tree.nodes), rel=1e-4)
            tree.nodes = state["nodes"].tolist()
            rows_above = [(node - first) // width for node in tree.nodes]
            before = tree.masks[: level * width]
            tree.masks = before + [
                before[(level - 1) * width + row] | 1 << level * width + place
                for place, row in enumerate(rows_above)
            ]
        assert state["masks"][at].tolist() == [
            mask - (1 << 64) if mask >> 63 else mask for mask in tree.masks[at]
        ]
        assert state["token_ids"][at].tolist() == [tree.tokens[node] for node in tree.nodes]
        assert state["positions"][at].tolist() == [40 + level] * width
        wanted = [
            5 if not above else 64 + (level - 1) * width + above.index(tree.parents[node])
            for node in tree.nodes
        ]
        assert state["hidden_rows"][at].tolist() == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("size", "norms"), [(64, True), (4096, True), (576, False)])
def test_rows_and_windows_are_the_references(dtype, size, norms):
    rig, kind = gpu(), getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(size)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    embedding, hidden = normal(300, size), 5 * normal(40, size)
    weights = [1 + 0.3 * normal(size) for _ in range(2)] if norms else [None, None]
    token_ids = torch.tensor([3, 299, -1, 0, 7, -1], dtype=torch.int32, device="cuda")
    hidden_rows = torch.tensor([39, 0, 10**6, 7, 7, 2], dtype=torch.int32, device="cuda")
    positions = torch.tensor([0, 63, 0, 1024, 1100, 0], dtype=torch.int32, device="cuda")
    total = window_blocks(1024)
    out = torch.full((6, 2 * size), float("nan"), device="cuda").to(kind)
    blocks = torch.full((6, 2, total), -9, dtype=torch.int32, device="cuda")
    counts = torch.full((6, 2), -9, dtype=torch.int32, device="cuda")
    arguments = DraftInput(
        array(embedding), array(token_ids), array(hidden), array(hidden_rows), array(positions),
        array(out), array(blocks), array(counts),
        embedding_norm=None if weights[0] is None else array(weights[0]),
        hidden_norm=None if weights[1] is None else array(weights[1]),
        scale=12.0,
    )  # fmt: skip
    torch.cuda.synchronize()
    DraftInputWriter(rig.kernels.operator("draft_input"), dtype=dtype)(arguments, rig.stream)
    rig.stream.synchronize()
    expected = draft_rows(
        embedding,
        token_ids,
        hidden,
        hidden_rows,
        embedding_norm=weights[0],
        hidden_norm=weights[1],
        scale=12.0,
    )
    assert error(out.float(), expected.float()) < TOLERANCE[dtype]
    assert not out[2].any()
    wanted = window(positions, 2, total)
    assert torch.equal(blocks, wanted[0])
    assert torch.equal(counts, wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("accepted", [0, 1, 5, 64])
def test_what_a_step_accepted_becomes_rows(accepted):
    rig = gpu()
    drawn = torch.randperm(200, device="cuda").int()[:64]
    path = torch.sort(torch.randperm(64, device="cuda")).values.int()
    outputs = {
        name: torch.full((size,), -7, dtype=torch.int32, device="cuda")
        for name, size in (
            *((each, 64) for each in ("token_ids", "hidden_rows", "positions")),
            ("starts", 2),
            *((each, 1) for each in ("tree_lengths", "root_row")),
        )
    }
    counts = [torch.tensor([each], dtype=torch.int32, device="cuda") for each in (accepted, 900)]
    inputs = dict(zip(("drawn", "path", "accepted", "lengths"), (drawn, path, *counts), strict=True))
    arrays = {name: array(each) for name, each in (inputs | outputs).items()}
    torch.cuda.synchronize()
    DraftTaker(rig.kernels.operator("draft_take"))(DraftTake(**arrays), rig.stream)
    rig.stream.synchronize()
    for name, expected in taken_rows(drawn, path, accepted, 900).items():
        assert outputs[name].tolist() == expected.tolist(), name
