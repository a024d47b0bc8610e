import math
import random

import pytest
import torch
from chunk_cases import H200, assert_same_choice, make_chunk
from decode_cases import array, gpu
from hypothesis import given
from hypothesis import strategies as st

from plugins_trt.chunk_selection.contract import ChunkSelection, SelectionPlan, workspace_bytes
from plugins_trt.chunk_selection.reference import chunk_selection, pack_bitmap, unpack_bitmap
from plugins_trt.contract import Batch, Bucket, LaunchError, SelectionRule
from plugins_trt.decode_selection import reference as decode_reference

RULE = SelectionRule(init_blocks=1, window=128, top_k=5, dense_below=0)
LAYOUTS = [(32, 2, 128), (16, 2, 64), (9, 3, 64), (10, 2, 128), (4, 4, 128)]


# ---------------------------------------------------------------- the reference


def scores_by_definition(case, sequence, token, *, head, lse):
    """Scores of one query's blocks, computed key by key."""
    position, group, scale = int(case.positions[token]), case.heads // case.kv_heads, 1 / math.sqrt(case.dim)
    table = case.tables[sequence].tolist()

    def fine(j):
        return case.pages.fine[table[(j + 1) // 4], head, (j + 1) % 4].double()

    def coarse(c):
        return case.pages.coarse[table[c + 1], head, 0].double()

    visible = [j for j in range(position // 16 + 1) if 16 * j + 31 <= position]
    wide = [c for c in range(position // 64 + 1) if 64 * c + 127 <= position]
    shared = dict.fromkeys(visible, 0.0)
    for h in range(head * group, (head + 1) * group):
        query = case.q[token, h].double()
        products = {j: float(query @ fine(j)) * scale for j in visible}
        other = (
            [float(query @ coarse(c)) * scale for c in wide]
            if lse == "approximate"
            else list(products.values())
        )
        if other:
            peak = max(other)
            total = sum(math.exp(x - peak) for x in other)
            for j in visible:
                shared[j] += math.exp(products[j] - peak) / total
    return [
        max((shared.get(j, 0.0) for j in range(4 * block - 1, 4 * block + 4)), default=0.0)
        for block in range(position // 64 + 1)
    ]


@pytest.mark.parametrize("lse", ["approximate", "exact"])
def test_the_reference_is_the_definition(lse):
    case = make_chunk([(700, 3), (0, 200), (95, 2)], heads=6, kv_heads=2, dim=64, dtype="float16")
    rule = SelectionRule(init_blocks=1, window=64, top_k=4, dense_below=150, lse=lse)
    chosen, scores = case.expected_selection(rule)
    starts = case.starts.tolist()
    for sequence in range(3):
        for token in range(starts[sequence], starts[sequence + 1], 7 if sequence == 1 else 1):
            position = int(case.positions[token])
            for head in range(case.kv_heads):
                want = torch.tensor(scores_by_definition(case, sequence, token, head=head, lse=lse))
                got = scores[head, token, : len(want)]
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-7)
                own = position // 64
                ranked = sorted(
                    range(own + 1),
                    key=lambda block: (
                        not (block < 1 or block > own - rule.local),
                        -float(got[block]),
                        block,
                    ),
                )
                best = set(ranked[: rule.total]) if position + 1 >= rule.dense_below else set()
                assert set(chosen[head, token].nonzero().flatten().tolist()) == best


@pytest.mark.parametrize("lse", ["approximate", "exact"])
def test_chunks_and_single_tokens_choose_alike(lse):
    """The two references of the same rule, one for chunks and one for decode steps, agree."""
    case = make_chunk([(1500, 9)], heads=8, kv_heads=2, dim=64)
    rule = SelectionRule(init_blocks=1, window=128, top_k=6, dense_below=1504, lse=lse)
    chosen, scores = case.expected_selection(rule)
    for token in range(case.used):
        position = int(case.positions[token])
        alone = decode_reference.block_scores(
            case.pages, case.q[token], case.tables[0], rule=rule, start=0, length=position, position=position,
            mask=None, node_fine=None, node_coarse=None,
        )  # fmt: skip
        assert torch.allclose(scores[:, token, : alone.shape[-1]], alone, rtol=1e-5)
        if position + 1 >= rule.dense_below:
            assert torch.equal(chosen[:, token, : alone.shape[-1]], decode_reference.choose(alone, rule))
        else:
            assert not chosen[:, token].any()


def test_ties_go_to_the_smaller_index():
    case = make_chunk([(64 * 20 - 1, 1)], heads=2, kv_heads=1, dim=64)
    case.q.zero_()  # every key weighs the same
    rule = SelectionRule(init_blocks=1, window=64, top_k=5, dense_below=0)
    chosen, _ = case.expected_selection(rule)
    assert chosen[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 18, 19]


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_a_bitmap_keeps_what_was_packed(blocks, seed):
    chosen = torch.rand(2, 3, blocks, generator=torch.Generator().manual_seed(seed)) < 0.3
    assert torch.equal(unpack_bitmap(pack_bitmap(chosen), blocks), chosen)


# ---------------------------------------------------------------- the contract


def test_arguments_are_refused_by_name():
    case = make_chunk([(200, 70)], tokens=128)
    args, chosen = case.selection(RULE)
    good = dict(vars(args))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            ChunkSelection(**{**good, **changes}).plan(H200)
        return str(caught.value)

    assert refused(q=array(case.q.float())).startswith("q: dtype float32")
    assert refused(q=array(case.q[:100])).startswith("q: shape (100,")
    assert refused(q=array(case.q[:, :17])).startswith("heads: 17")
    assert refused(q=array(case.q.transpose(1, 2).contiguous().transpose(1, 2))).startswith("q: strides")
    assert refused(chosen=array(chosen[:, :100])).startswith("chosen: shape")
    assert refused(workspace=array(torch.zeros(64))).startswith("workspace: 256 bytes")
    assert refused(scale=0.0).startswith("scale: 0.0")
    masks = array(torch.zeros(128, dtype=torch.int64))
    assert refused(batch=Batch(**{**vars(case.batch), "tree_masks": masks})).startswith("tree_masks: given")
    long = Batch(**{**vars(case.batch), "page_tables": array(torch.zeros(1, 8193, dtype=torch.int32))})
    words = array(torch.zeros(2, 128, 257, dtype=torch.int32))
    assert refused(batch=long, chosen=words).startswith("max_pages: 8193")


@given(
    tokens=st.sampled_from([65, 128, 256, 512, 1024, 2048]),
    sequences=st.integers(1, 64),
    kv_heads=st.sampled_from([1, 2, 8]),
    max_pages=st.integers(1, 8192),
    multiprocessors=st.sampled_from([16, 82, 132, 170]),
)
def test_a_plan_covers_every_page_and_its_memory_is_bounded(
    tokens, sequences, kv_heads, max_pages, multiprocessors
):
    bucket = Bucket(
        tokens=tokens, sequences=sequences, heads=16 * kv_heads, kv_heads=kv_heads, head_dim=128, max_pages=max_pages,
        multiprocessors=multiprocessors,
    )  # fmt: skip
    plan = SelectionPlan.of(bucket)
    assert plan.page_splits * plan.split_pages >= max_pages
    assert plan.split_pages % 16 == 0
    assert plan.splits * 2048 >= max_pages
    assert plan.score_stride >= max_pages
    assert plan.tiles * 16 >= tokens + 15 * sequences - 15
    assert plan.workspace_bytes <= kv_heads * tokens * (4 * (max_pages + 8) + 8 * 16 * 8) + 512


def test_the_memory_at_128k_is_that_of_the_block_scores():
    bucket = Bucket(
        tokens=2048, sequences=1, heads=32, kv_heads=2, head_dim=128, max_pages=2048, multiprocessors=H200
    )
    assert workspace_bytes(bucket) < 33 << 20


# ---------------------------------------------------------------- the kernels


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LAYOUTS)
@pytest.mark.parametrize("lse", ["approximate", "exact"])
def test_ragged_batches_choose_as_the_reference_does(dtype, heads, kv_heads, dim, lse):
    rig = gpu()
    rule = SelectionRule(init_blocks=1, window=128, top_k=6, dense_below=0, lse=lse)
    for sequences in (
        [(2900, 70), (700, 30)],
        [(900, 100), (0, 1), (63, 1), (2000, 17)],
        [(0, 120)],
        [(index * 531, index % 4) for index in range(10)],
    ):
        case = make_chunk(
            sequences, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=128, rig=rig
        )
        assert_same_choice(case, case.select(rig, rule), rule)


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
def test_every_length_modulo_a_page_chooses_as_the_reference_does(lse):
    rig, rng = gpu(), random.Random(1)
    for rest in range(64):
        rule = SelectionRule(
            init_blocks=rest % 2, window=64 * (rest % 4), top_k=3 + rest % 3, dense_below=0, lse=lse
        )
        sequences = [(rng.randrange(20) * 64 + rest, rng.choice([1, 17, 65, 100])), (rest, 3)]
        case = make_chunk(sequences, tokens=128, rig=rig, seed=rest)
        assert_same_choice(case, case.select(rig, rule), rule)


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
@pytest.mark.parametrize(
    ("sequences", "tokens", "max_pages"),
    [
        ([(131072 - 512, 512)], 512, 2048),
        ([(200_000 - 200, 200)], 256, 3500),
        ([(500_000, 100), (40_000, 20)], 128, 8192),
        ([(8000, 1000), (40000, 1), (100, 1), (8190, 57)], 2048, 1024),
    ],
)
def test_long_contexts_choose_as_the_reference_does(sequences, tokens, max_pages, lse):
    rig = gpu()
    rule = SelectionRule(lse=lse)
    case = make_chunk(sequences, tokens=tokens, max_pages=max_pages, rig=rig)
    assert_same_choice(case, case.select(rig, rule), rule)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("lse", ["approximate", "exact"])
def test_other_scales_choose_as_the_reference_does(scale, lse):
    rig = gpu()
    rule = SelectionRule(init_blocks=1, window=128, top_k=6, dense_below=0, lse=lse)
    case = make_chunk([(index * 531, 3) for index in range(30)], tokens=128, rig=rig)
    # Larger scores: their rounding is larger too.
    assert_same_choice(case, case.select(rig, rule, scale), rule, scale, max(5e-5, 2e-4 * scale))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "sequences",
    [
        [(500, 0), (1640, 64), (64, 0)],  # sequences that bring nothing
        [(index * 131, index % 4) for index in range(40)],  # more than a warp's lanes
        [(300, 0)],  # a bucket of padding
    ],
)
def test_odd_batches_choose_as_the_reference_does(sequences, dim):
    rig = gpu()
    rule = SelectionRule(init_blocks=1, window=128, top_k=6, dense_below=0)
    case = make_chunk(sequences, dim=dim, tokens=128, rig=rig)
    assert_same_choice(case, case.select(rig, rule), rule)


@pytest.mark.gpu
def test_the_papers_count_of_local_blocks_is_kept():
    rig = gpu()
    rule = SelectionRule(init_blocks=2, window=256, top_k=8, dense_below=0, local_blocks=4)
    case = make_chunk([(5000, 100)], tokens=128, rig=rig)
    assert_same_choice(case, case.select(rig, rule), rule)


@pytest.mark.gpu
def test_ties_go_to_the_smaller_index_on_the_device():
    rig = gpu()
    case = make_chunk([(64 * 400, 100)], tokens=128, rig=rig)
    case.q.zero_()
    rule = SelectionRule(init_blocks=1, window=64, top_k=40, dense_below=0)
    assert torch.equal(
        unpack_bitmap(case.select(rig, rule), case.max_pages)[:, : case.used],
        case.expected_selection(rule)[0][:, : case.used],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("lse", ["approximate", "exact"])
def test_nothing_depends_on_how_a_prompt_is_cut(lse):
    rig, length = gpu(), 4096
    rule = SelectionRule(init_blocks=1, window=256, top_k=12, dense_below=512, lse=lse)
    whole = make_chunk([(0, length)], rig=rig)
    expected = whole.select(rig, rule)
    assert_same_choice(whole, expected, rule)
    for size in (64, 512, 2048):
        for start in range(0, length, size):
            part = make_chunk([(start, size)], tokens=max(128, size), rig=rig)
            part.pages, part.tables = whole.pages, whole.tables
            part.q[:size] = whole.q[start : start + size]
            assert torch.equal(part.select(rig, rule)[:, :size], expected[:, start : start + size])


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 5, 17, 31, 40])
def test_a_planted_needle_is_always_chosen(offset):
    rig = gpu()
    case = make_chunk([(131072 - 128, 128)], tokens=128, rig=rig)
    rule = SelectionRule()
    rng = random.Random(offset)
    for trial in range(4):
        needle = rng.randrange(64, 131072 - 4096) // 64 * 64 + offset
        query = case.q[:, 16 * (trial % 2)].float().mean(0)
        query = (query / query.norm() * math.sqrt(case.dim)).bfloat16()
        case.q[:, 16 * (trial % 2) : 16 * (trial % 2) + 16] = query
        head, table = trial % 2, case.tables[0].long()
        where = torch.arange(needle, needle + 32, device="cuda")
        case.pages.keys[table[where // 64], head, where % 64] = query
        keys = case.pages.keys[table, head].flatten(0, 1)
        for kernel, stride, pool in ((32, 16, case.pages.fine), (128, 64, case.pages.coarse)):
            means = keys.float().unfold(0, kernel, stride).mean(-1).bfloat16()
            last = torch.arange(len(means), device="cuda") * stride + kernel - 1
            pool[table[last // 64], head, last % 64 // stride] = means
        chosen = unpack_bitmap(case.select(rig, rule), case.max_pages)[head]
        assert chosen[:, needle // 64].all() or chosen[:, (needle + 31) // 64].all()


@pytest.mark.gpu
def test_the_same_input_gives_the_same_bits():
    rig = gpu()
    case = make_chunk([(60000, 500)], tokens=512, rig=rig)
    first = case.select(rig, SelectionRule())
    for _ in range(3):
        assert torch.equal(first, case.select(rig, SelectionRule()))


@pytest.mark.gpu
def test_queries_inside_a_fused_projection_are_read_where_they_lie():
    rig = gpu()
    case = make_chunk([(3000, 100)], tokens=128, rig=rig)
    fused = torch.full((128, 36, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    fused[:, :32] = case.q
    args, chosen = case.selection(RULE, q=fused[:, :32])
    case.selector(rig)(args, rig.stream)
    rig.stream.synchronize()
    assert torch.equal(chosen, case.select(rig, RULE))


def test_the_reference_takes_ragged_batches_apart():
    both = make_chunk([(500, 40), (900, 24)], heads=4, kv_heads=2, dim=64)
    chosen, _ = both.expected_selection(RULE)
    for sequence, rows in ((0, slice(0, 40)), (1, slice(40, 64))):
        alone, _ = chunk_selection(
            both.q[rows],
            both.positions[rows],
            fine=both.pages.fine,
            coarse=both.pages.coarse,
            sequence_starts=torch.tensor([0, rows.stop - rows.start]),
            page_tables=both.tables[sequence : sequence + 1],
            rule=RULE,
        )
        assert torch.equal(alone, chosen[:, rows])
