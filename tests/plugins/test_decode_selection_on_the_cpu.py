"""Block selection's kernels of trees, compiled for a CPU and held to the reference: the arithmetic and the meetings, not the GPU."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import test_decode_selection
from decode_cases import make_case, random_parents
from on_the_cpu import PLUGINS, Kernels
from test_decode_selection import arguments

from plugins_trt.contract import KERNEL_DTYPES, SelectionRule, ceil_div
from plugins_trt.decode_selection.contract import GROUP_LSE_TILES, GROUP_SCORE_TILES
from plugins_trt.decode_selection.launch import CHOOSE_FORMAT, LSE_FORMAT, pack_select

KINDS = {
    "alike": lambda rng, count: rng.normal(1, 0.05, count) ** 2,
    "few values": lambda rng, count: rng.integers(1, 5, count) / 4,
    "equal": lambda _, count: np.full(count, 0.5),
    "far apart": lambda rng, count: np.exp(-rng.random(count) * 60),
    "a few that count": lambda rng, count: np.where(rng.random(count) < 0.02, rng.random(count), 1e-30),
    "nothing": lambda _, count: np.zeros(count),
    "beyond all numbers": lambda rng, count: np.where(rng.random(count) < 0.05, np.inf, rng.random(count)),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = PLUGINS / "decode_selection"
    sources = [folder / f"{name}.cu" for name in ("lse_groups", "scores_groups", "choose")]
    return Kernels(sources, tmp_path_factory.mktemp("on_the_cpu"))


def select(kernels, case, rule, poison, tiles):
    """What `DecodeSelector` enqueues for a tree on a device with warpgroups."""
    args, (blocks, counts, _) = arguments(case, rule, poison)
    plan, batch, kv_heads = args.plan, args.batch, args.arena.kv_heads
    layout = f"{KERNEL_DTYPES[args.arena.dtype]}_d{case.dim}"
    packed = (*batch.pack(), *args.arena.pack(args.layer))
    lazy = len(case.positions) % 2 == 1
    for name, parts, tile, threads in (
        ("lse_groups", plan.group_lse_parts, tiles[0], 32 * tiles[0]),
        ("scores_groups", plan.score_parts, tiles[1], 512),
    ):
        values = (*packed, *pack_select(args, plan.group_lse_parts, tile))
        grid = (parts * ceil_div(batch.tokens, tile), kv_heads)
        kernels.run(f"{name}_{layout}", LSE_FORMAT, values, grid, lazy=lazy, threads=threads)
    values = (*batch.pack(), *pack_select(args, plan.group_lse_parts, 1))
    kernels.run("choose_blocks", CHOOSE_FORMAT, values, (batch.tokens, kv_heads), lazy=lazy, threads=512)
    return blocks, counts


@pytest.mark.parametrize("lse", ["approximate", "exact"])
@pytest.mark.parametrize(
    "made",
    [
        ((0, 17), (4, 8), (9, 3, 64, "bfloat16")),
        ((127, 5), (8, 16), (16, 2, 64, "float16")),
        ((600, 21), (16, 32), (2, 2, 128, "float16")),
        ((5001, 12), (16, 16), (32, 2, 128, "bfloat16")),
        ((18_000, 3), (4, 8), (16, 1, 128, "bfloat16")),
    ],
)
def test_a_tree_selects_the_references_blocks(kernels, monkeypatch, lse, made):
    tree, tiles, (heads, kv_heads, dim, dtype) = made
    assert tiles[0] in GROUP_LSE_TILES
    assert tiles[1] in GROUP_SCORE_TILES
    length, nodes = tree
    parents = [random_parents(nodes, random.Random(length), 0.9)]
    case = make_case(
        [tree], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, parents=parents, seed=nodes,
        tokens=min(64, nodes + 2),
    )  # fmt: skip

    def run(case, rule, poison=float("nan"), **_):
        return select(kernels, case, rule, poison, tiles)

    monkeypatch.setattr(test_decode_selection, "run", run)
    rule = SelectionRule(init_blocks=1, window=64, top_k=3, dense_below=0, lse=lse)
    test_decode_selection.check(case, rule)


@dataclass
class Row:
    """What the choice of one query's blocks reads, drawn at random."""

    own: int
    rule: tuple[int, int, int]  # first blocks, last ones, all that win
    length: int
    tree: bool
    scores: np.ndarray  # float32 [blocks, rounded up], not a number where nothing is stored
    scored: int
    first_slots: np.ndarray  # float32 [parts]
    slots: list[int]  # of the keys that the path completes
    nodes: np.ndarray  # float32 [4, 2]

    @classmethod
    def random(cls, rng, kind, *, tree):
        own = int(rng.choice([100, 500, 2047, 2048, 3000, 8191]))
        init, local, more = (int(rng.choice(choices)) for choices in ([0, 1, 2], [1, 2, 33], [0, 1, 5, 62]))
        length = own * 64 + int(rng.integers(0, 64))
        scored = ceil_div(length if tree else length + 1, 64)
        scores = np.full((own // 64 + 1) * 64, np.nan, np.float32)
        scores[:scored] = KINDS[kind](rng, scored)
        first_slots = rng.random(len(scores) // 64) * np.median(scores[:scored]) * 1.5
        near = np.arange(4 * own - 12, 4 * own + 4)
        slots = np.sort(rng.choice(near, rng.integers(0, 5) * tree, replace=False)).astype(np.int32)
        nodes = np.full((4, 2), 7, np.float32)  # behind the last of them nothing is read
        nodes[len(slots) :, 0].view(np.int32)[:1] = -1
        nodes[: len(slots), 0] = slots.view(np.float32)
        nodes[: len(slots), 1] = rng.random(len(slots)) * 2
        rule = init, local, init + local + more
        return cls(
            own, rule, length, tree, scores, scored, first_slots.astype(np.float32), slots.tolist(), nodes
        )

    def best(self):
        """The blocks that win, by a sort, as the kernel is to list them."""
        init, local, total = self.rule
        ranks = np.zeros(self.own + 1)
        known = min(self.scored, self.own + 1)
        ranks[:known] = np.minimum(self.scores[:known].astype(float), 1e200)
        for part, score in enumerate(self.first_slots):
            if 0 < 64 * part < self.scored:  # the slot behind a part's last block is the next part's first
                ranks[64 * part - 1] = max(ranks[64 * part - 1], min(float(score), 1e200))
        for slot, score in zip(self.slots, self.nodes[:, 1], strict=False):
            for block in {slot // 4, (slot - 1) // 4}:
                ranks[block] = max(ranks[block], score)
        ranks[:init] = ranks[max(0, self.own + 1 - local) :] = np.inf
        return np.sort(np.argsort(-ranks, kind="stable")[:total])

    def choose(self, kernels):
        """The kernel's list and count."""
        found, counts = np.full(self.rule[2], 7777, np.int32), np.full(1, 77, np.int32)
        starts, lengths = np.array([0, 1], np.int32), np.array([self.length], np.int32)
        mask = np.ones(1, np.uint64)
        batch = (*(each.ctypes.data for each in (starts, lengths, lengths, lengths, mask)), 1, 1, 1, 0)
        read = (each.ctypes.data for each in (self.scores, self.first_slots, self.nodes))
        written = found.ctypes.data, counts.ctypes.data
        select = (0, 0, 0, 0, *read, 0, *written, 1.0, 16, 1, 2, *self.rule, 0, 0, len(self.scores), 1, 0)
        if not self.tree:
            batch = (*batch[:4], 0, *batch[5:])
        kernels.run("choose_blocks", CHOOSE_FORMAT, (*batch, *select), (1, 1), lazy=False, threads=512)
        return found, int(counts[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_blocks_are_listed_whatever_the_scores_are(kernels, kind):
    rng = np.random.default_rng(list(KINDS).index(kind))
    for turn in range(16):
        row = Row.random(rng, kind, tree=turn % 2 == 0)
        found, count = row.choose(kernels)
        assert found.tolist() == row.best().tolist(), (row.own, row.rule, row.length, row.tree)
        assert count == row.rule[2]
