import random

import pytest
import torch
from decode_cases import array, fill, gpu, make_case, random_parents

from plugins_trt.contract import LaunchError, SelectionRule
from plugins_trt.decode_selection.contract import (
    GROUP_LSE_TILES,
    GROUP_SCORE_TILES,
    TILES,
    DecodeSelection,
    tile_of,
    workspace_bytes,
)
from plugins_trt.decode_selection.launch import DecodeSelector
from plugins_trt.decode_selection.reference import block_scores, choose


def arguments(case, rule, poison=float("nan")):
    size = workspace_bytes(
        tokens=case.tokens, kv_heads=case.kv_heads, max_pages=case.tables.shape[1], lse=rule.lse
    )
    workspace = torch.full((size // 4,), poison, device=case.device)
    blocks = torch.full(
        (case.tokens, case.kv_heads, rule.total), 77777, dtype=torch.int32, device=case.device
    )
    counts = torch.full((case.tokens, case.kv_heads), 77777, dtype=torch.int32, device=case.device)
    arrived = torch.zeros(len(case.lengths), case.kv_heads, dtype=torch.int32, device=case.device)
    case.keep += [workspace, blocks, counts, arrived]
    return DecodeSelection(
        batch=case.batch,
        arena=case.arena,
        layer=0,
        q=array(case.q),
        blocks=array(blocks),
        counts=array(counts),
        workspace=array(workspace),
        arrived=array(arrived),
        rule=rule,
        node_fine=array(case.node_fine),
        node_coarse=array(case.node_coarse),
    ), (blocks, counts, arrived)


def run(case, rule, poison=float("nan"), *, groups=True):
    rig = gpu()
    selector = DecodeSelector(
        rig.kernels.operator("decode_selection"),
        dtype=str(case.dtype).removeprefix("torch."),
        head_dim=case.dim,
        multiprocessors=rig.kernels.multiprocessors,
        groups=groups,
    )
    args, (blocks, counts, arrived) = arguments(case, rule, poison)
    for _ in range(2):  # the second launch finds what the first left behind
        selector(args, rig.stream)
    rig.stream.synchronize()
    assert not arrived.any()
    return blocks.cpu(), counts.cpu()


def scores_of(case, rule, query):
    token, sequence, position, mask = query
    return block_scores(
        case.pages,
        case.q[token],
        case.tables[sequence],
        length=case.lengths[sequence],
        position=position,
        rule=rule,
        mask=mask,
        start=case.starts[sequence],
        node_fine=case.node_fine,
        node_coarse=case.node_coarse,
    )


def check(case, rule, tolerance=1e-4, *, groups=True):
    """Every list is ascending and holds the reference's blocks, but for those that rounding could swap."""
    blocks, counts = run(case, rule, groups=groups)
    for token, sequence, position, mask in case.queries():
        if position + 1 < rule.dense_below:
            assert not counts[token].any()
            assert (blocks[token] == -1).all()
            continue
        scores = scores_of(case, rule, (token, sequence, position, mask))
        expected = choose(scores, rule).cpu()
        scores = scores.cpu()
        for head in range(case.kv_heads):
            count = int(counts[token, head])
            own = position // 64
            assert count == min(rule.total, own + 1)
            listed = blocks[token, head, :count].tolist()
            assert listed == sorted(set(listed))
            assert listed[0] >= 0
            assert listed[-1] == own
            assert (blocks[token, head, count:] == -1).all()
            got = torch.zeros(own + 1, dtype=torch.bool)
            got[listed] = True
            wrong = (got != expected[head]).nonzero().flatten()
            if len(wrong):  # only blocks that score what the last one in scores
                close = scores[head, wrong]
                assert close.max() <= close.min() * (1 + tolerance), (token, head, wrong, close)
    assert (blocks[case.starts[-1] :] == -1).all()
    assert not counts[case.starts[-1] :].any()


SHORT = SelectionRule(init_blocks=1, window=128, top_k=6, dense_below=0)


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [(32, 2, 128, "bfloat16"), (16, 2, 64, "float16"), (9, 3, 64, "bfloat16"), (4, 4, 128, "float16")],
)
def test_one_token_of_any_length_selects_the_references_blocks(lse, heads, kv_heads, dim, dtype):
    rule = SelectionRule(init_blocks=1, window=128, top_k=6, dense_below=0, lse=lse)
    for length in [0, 1, 30, 31, 126, 127, *range(190, 270), *range(2048, 2113, 3), 9999]:
        case = make_case(
            [(length, 1)], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device="cuda", seed=length,
            max_pages=length // 64 + 1 + length % 40,
        )  # fmt: skip
        check(case, rule)


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
@pytest.mark.parametrize("length", [8190, 8191, 32767, 131071, 199999])
def test_the_published_rule_over_long_contexts(lse, length):
    check(make_case([(length, 1)], device="cuda", seed=length), SelectionRule(lse=lse))


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
@pytest.mark.parametrize("window", [0, 128])
def test_ragged_batches_see_the_compressed_keys_of_their_own_step(lse, window):
    rule = SelectionRule(init_blocks=0, window=window, top_k=5, dense_below=200, lse=lse)
    sequences = [(0, 3), (1000, 1), (0, 0), (5000, 40), (180, 15)]
    check(make_case(sequences, tokens=64, device="cuda"), rule)
    check(make_case([(700 + 61 * index, 1) for index in range(8)], tokens=8, device="cuda"), rule)


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("length", [0, 20, 100, 127, 1000, 5001])
@pytest.mark.parametrize("groups", [False, True])
def test_a_node_sees_the_compressed_keys_of_its_own_path(lse, window, length, groups):
    """By the kernels that every device has, and by those for warpgroups."""
    rule = SelectionRule(init_blocks=1, window=window, top_k=4, dense_below=0, lse=lse)
    rng = random.Random(length)
    for nodes, depth_first in ((64, 1.0), (64, 0.9), (17, 0.5), (1, 0.0)):
        parents = [random_parents(nodes, rng, depth_first)]
        check(make_case([(length, nodes)], parents=parents, device="cuda", seed=nodes), rule, groups=groups)
    parents = [random_parents(20, rng, 0.95), random_parents(30, rng, 0.95)]
    case = make_case([(length, 20), (300, 30)], parents=parents, tokens=64, device="cuda")
    check(case, rule, groups=groups)


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    "layout",
    [(32, 2, 128, "bfloat16"), (16, 2, 64, "float16"), (9, 3, 64, "bfloat16"), (4, 4, 128, "float16")],
)
def test_trees_of_any_layout_select_the_references_blocks(lse, groups, layout):
    heads, kv_heads, dim, dtype = layout
    rng = random.Random(dim)
    rule = SelectionRule(init_blocks=1, window=128, top_k=6, dense_below=0, lse=lse)
    for length, nodes in ((9999, 2), (12_345, 12), (66_000, 33)):
        case = make_case(
            [(length, nodes)], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device="cuda",
            parents=[random_parents(nodes, rng)], tokens=min(64, 2 * nodes), seed=nodes,
            max_pages=(length + nodes) // 64 + 1 + nodes,
        )  # fmt: skip
        check(case, rule, groups=groups)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 5, 17, 31, 48, 63])
def test_a_planted_needle_is_always_selected(offset):
    generator = torch.Generator("cuda").manual_seed(offset)
    rule = SelectionRule()
    for at in (64, 4096, 60_000, 127_000):
        case = make_case([(131071, 1)], device="cuda", seed=at)
        where = at + offset
        slots = torch.arange(131071, device="cuda")
        keys = case.pages.keys[case.tables[0][slots // 64].long(), :, slots % 64]
        values = torch.randn(keys.shape, generator=generator, device="cuda").to(keys.dtype)
        needle = case.q[0].view(2, 16, 128)[:, 3]  # one head's query, as in a retrieval head
        keys[where : where + 32] = needle
        fill(case.pages, case.tables[0], keys, values)
        blocks, _ = run(case, rule)
        for head in range(2):
            listed = set(blocks[0, head].tolist())
            assert {where // 64, (where + 31) // 64} & listed, (at, offset)
        check(case, rule)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.1, 4.0, 12.0])
@pytest.mark.parametrize("tokens", [1, 3])
def test_scores_close_together_or_far_apart_select_the_references_blocks(factor, tokens):
    """The best within a factor of two of the worst, up to a best block that outweighs all others."""
    for length in (5000, 131071 - tokens, 150_000):
        case = make_case([(length, tokens)], device="cuda", seed=length)
        case.q *= factor
        # Products are larger: so is their rounding.
        check(case, SelectionRule(dense_below=0), max(1e-4, 2e-4 * factor))


@pytest.mark.gpu
def test_equal_scores_go_to_the_smaller_index():
    case = make_case([(64 * 40, 1)], device="cuda")
    for pool in (case.pages.keys, case.pages.fine, case.pages.coarse):
        pool[:] = 0.5
    blocks, _ = run(case, SHORT)
    assert blocks[0].tolist() == [[0, 1, 2, 3, 4, 38, 39, 40]] * 2


@pytest.mark.gpu
def test_the_same_input_selects_the_same_blocks():
    case = make_case([(131071, 1)], device="cuda")
    first = run(case, SelectionRule())
    for poison in (1e30, 0.0):
        again = run(case, SelectionRule(), poison)
        assert torch.equal(first[0], again[0])


def test_the_reference_scores_by_the_definition():
    case = make_case([(300, 1)], heads=4, kv_heads=2, dim=64, dtype="float16")
    position, rule = 300, SelectionRule(window=0, top_k=2, dense_below=0, lse="exact")
    scores = scores_of(case, rule, (0, 0, position, None))
    keys = torch.stack(
        [
            case.pages.keys[int(case.tables[0, slot // 64]), :, slot % 64].float()
            for slot in range(position + 1)
        ]
    )
    for head in range(2):
        weights = 0
        means = [
            keys[16 * j : 16 * j + 32, head].mean(0).half().float() for j in range((position - 31) // 16 + 1)
        ]
        for query in case.q[0, 2 * head : 2 * head + 2].float():
            weights = weights + torch.softmax(torch.stack([query @ mean for mean in means]) / 8, 0)
        for block in range(5):
            seen = [weights[j] for j in range(4 * block - 1, 4 * block + 4) if 0 <= j < len(means)]
            assert float(scores[head, block]) == pytest.approx(float(max(seen)) if seen else 0.0, rel=1e-4)


def test_arguments_are_refused_by_name():
    case = make_case([(100, 1)])
    args, _ = arguments(case, SHORT)
    good = dict(vars(args))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            DecodeSelection(**{**good, **changes})
        return str(caught.value)

    assert refused(q=array(case.q.float())).startswith("q: dtype")
    assert refused(blocks=array(torch.zeros(1, 2, 9, dtype=torch.int32))).startswith("blocks: shape")
    assert refused(counts=array(torch.zeros(1, 2, dtype=torch.int64))).startswith("counts: dtype")
    assert refused(arrived=array(torch.zeros(3, 2, dtype=torch.int32))).startswith("arrived: shape")
    assert refused(workspace=array(torch.zeros(64))).startswith("workspace: 256 bytes")
    tree = make_case([(100, 1)], parents=[[-1]])
    assert refused(batch=tree.batch, node_fine=None).startswith("node_fine: missing")
    with pytest.raises(LaunchError, match=r"^max_pages: 9000"):
        workspace_bytes(tokens=1, kv_heads=2, max_pages=9000)
    with pytest.raises(LaunchError, match=r"^top_k: 1 leaves 33 blocks"):
        SelectionRule(top_k=1)
    with pytest.raises(LaunchError, match=r"^window: 100"):
        SelectionRule(window=100)
    with pytest.raises(LaunchError, match=r"^lse: 'fast'"):
        SelectionRule(lse="fast")


@pytest.mark.parametrize("tokens", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("parts", [1, 9, 33, 128])
@pytest.mark.parametrize("multiprocessors", [8, 16, 132, 188])
@pytest.mark.parametrize("tiles", [TILES, GROUP_LSE_TILES, GROUP_SCORE_TILES])
def test_tiles_are_as_small_as_lets_all_blocks_run_at_once(tokens, parts, multiprocessors, tiles):
    def blocks(tile):
        return parts * 2 * -(-tokens // tile)

    tile = tile_of(tokens=tokens, parts=parts, kv_heads=2, at_once=multiprocessors, tiles=tiles)
    assert tile in tiles
    assert tile == tiles[0] or blocks(tile // 2) > multiprocessors
    assert blocks(tile) <= multiprocessors or tile >= min(tokens, tiles[-1])
