import math
import random

import pytest
import torch
from chunk_cases import H200, make_chunk
from decode_cases import TOLERANCE, array, error, gpu

from plugins_trt.chunk_attention.contract import ChunkAttention, DensePlan
from plugins_trt.chunk_attention.launch import DenseChunkAttention, SparseChunkAttention
from plugins_trt.chunk_selection.reference import pack_bitmap, unpack_bitmap
from plugins_trt.contract import Bucket, LaunchError, SelectionRule

LAYOUTS = [(32, 2, 128), (16, 2, 64), (9, 3, 64), (10, 2, 128), (24, 2, 64), (4, 4, 128)]
RAGGED = [
    [(2900, 70), (700, 30)],
    [(900, 100), (0, 1), (63, 1), (2000, 17)],
    [(0, 128)],
]
ODD = [
    [(500, 0), (640, 64), (64, 0)],  # sequences that bring nothing
    [(index * 31, index % 4) for index in range(40)],  # more than a warp's lanes
    [(300, 0)],  # a bucket of padding
]
VARIANTS = ["wide_1", "middle_1", "narrow_1", "split_4"]


# ---------------------------------------------------------------- the reference


def test_the_reference_is_the_definition():
    case = make_chunk([(100, 3), (0, 70)], heads=4, kv_heads=2, dim=64, dtype="float16", tokens=80)
    chosen = torch.rand(2, 80, case.max_pages) < 0.6
    chosen |= torch.arange(case.max_pages) == (case.positions.clamp(max=200) // 64)[:, None]
    out = case.expected_attention(chosen=chosen, dense_below=60)
    for sequence in range(2):
        for token in range(int(case.starts[sequence]), int(case.starts[sequence + 1]), 5):
            position = int(case.positions[token])
            for head in range(4):
                seen = [
                    t for t in range(position + 1)
                    if position + 1 < 60 or chosen[head // 2, token, t // 64]
                ]  # fmt: skip
                where = (
                    case.tables[sequence, [t // 64 for t in seen]].long(),
                    head // 2,
                    [t % 64 for t in seen],
                )
                weights = (case.pages.keys[where].double() @ case.q[token, head].double() / 8).softmax(0)
                want = weights @ case.pages.values[where].double()
                assert torch.allclose(out[token, head].double(), want, atol=1e-5)
    assert not out[case.used :].any()


# ---------------------------------------------------------------- the contract


def test_arguments_are_refused_by_name():
    case = make_chunk([(2000, 70)], tokens=128)
    args, _ = case.attention()
    good = dict(vars(args))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            ChunkAttention(**{**good, **changes}).dense_plan(H200)
        return str(caught.value)

    assert refused(q=array(case.q.float())).startswith("q: dtype float32")
    assert refused(out=array(case.q[:, :16])).startswith("out: shape")
    assert refused(out=array(case.q[:64])).startswith("out: shape")
    assert refused(dense_below=-1).startswith("dense_below: -1")
    assert refused(dense_below=1 << 31).startswith("dense_below: 2147483648")
    assert refused(chosen=array(torch.zeros(2, 128, 9, dtype=torch.int32))).startswith("chosen: shape")
    assert refused(chosen=array(torch.zeros(2, 128, 2))).startswith("chosen: dtype")
    assert refused(workspace=None).startswith("workspace: missing")
    assert refused(workspace=array(torch.zeros(4))).startswith("workspace: 16 bytes")
    assert refused(scale=math.nan).startswith("scale: nan")


@pytest.mark.parametrize("tokens", [128, 256, 512, 1024, 2048])
def test_a_bucket_fills_the_device_and_its_memory_is_bounded(tokens):
    bucket = Bucket(
        tokens=tokens, sequences=1, heads=32, kv_heads=2, head_dim=128, max_pages=2048, multiprocessors=H200
    )
    plan = DensePlan.of(bucket)
    blocks = tokens // 8 * 2 * plan.splits
    assert blocks >= 200
    assert plan.workspace_bytes <= 36 << 20
    assert (plan.splits == 1) == (plan.workspace_bytes == 0)


# ---------------------------------------------------------------- dense


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LAYOUTS)
@pytest.mark.parametrize("tokens", [128, 1024])
def test_dense_ragged_batches_equal_the_reference(dtype, heads, kv_heads, dim, tokens):
    rig = gpu()
    for sequences in RAGGED:
        case = make_chunk(
            sequences, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=tokens, rig=rig
        )
        out = case.attend(rig)
        assert error(out, case.expected_attention()) < TOLERANCE[dtype]
        assert not out[case.used :].any()


@pytest.mark.gpu
def test_dense_chunks_of_every_length_modulo_a_page_equal_the_reference():
    rig, rng = gpu(), random.Random(2)
    for rest in range(64):
        sequences = [(rng.randrange(20) * 64 + rest, rng.choice([1, 17, 65, 100])), (rest, 3)]
        case = make_chunk(sequences, tokens=128, rig=rig, seed=rest, max_pages=40)
        assert error(case.attend(rig), case.expected_attention()) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "new", "tokens"), [(30720, 2048, 2048), (131072, 300, 512), (199_900, 100, 128)]
)
def test_dense_chunks_of_long_contexts_equal_the_reference(length, new, tokens):
    rig = gpu()
    case = make_chunk([(length, new)], tokens=tokens, rig=rig)
    assert error(case.attend(rig), case.expected_attention()) < TOLERANCE["bfloat16"]


# ---------------------------------------------------------------- sparse


def random_blocks(case, share, seed=0):
    """Random blocks of each query, its own among them."""
    generator = torch.Generator(case.device).manual_seed(seed)
    shape = (case.kv_heads, case.tokens, case.max_pages)
    chosen = torch.rand(shape, generator=generator, device=case.device) < share
    blocks = torch.arange(case.max_pages, device=case.device)
    own = (case.positions.clamp(max=case.max_pages * 64 - 1) // 64)[:, None]
    return (chosen | (blocks == own)) & (blocks <= own)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LAYOUTS)
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_sparse_queries_attend_to_their_blocks_alone(dtype, heads, kv_heads, dim, variant):
    rig = gpu()
    if variant == "middle_1" and dim == 64:
        pytest.skip("the wide variant is as small there")
    for sequences in RAGGED:
        case = make_chunk(
            sequences, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=128, rig=rig
        )
        for share in (0.0, 0.5):
            chosen = random_blocks(case, share)
            out = case.attend(rig, chosen=pack_bitmap(chosen), dense_below=0, variant=variant)
            expected = case.expected_attention(chosen=chosen, dense_below=0)
            assert error(out, expected) < TOLERANCE[dtype]
            assert not out[case.used :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", ODD)
@pytest.mark.parametrize("tokens", [128, 2048])
def test_odd_batches_equal_the_reference(sequences, tokens):
    rig = gpu()
    case = make_chunk(sequences, tokens=tokens, rig=rig)
    chosen = random_blocks(case, 0.3)
    for kind, options in (({}, {}), ({"chosen": chosen}, {"dense_below": 500})):
        words = {"chosen": pack_bitmap(chosen)} if kind else {}
        out = case.attend(rig, **words, **options)
        assert error(out, case.expected_attention(**kind, **options)) < TOLERANCE["bfloat16"]
        assert not out[case.used :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_length_modulo_a_page_equals_the_reference(variant):
    rig, rng = gpu(), random.Random(3)
    for rest in range(64):
        sequences = [(rng.randrange(20) * 64 + rest, rng.choice([1, 17, 65, 100])), (rest, 3)]
        case = make_chunk(sequences, tokens=128, rig=rig, seed=rest, max_pages=40)
        chosen = random_blocks(case, 0.4)
        out = case.attend(rig, chosen=pack_bitmap(chosen), dense_below=0, variant=variant)
        expected = case.expected_attention(chosen=chosen, dense_below=0)
        assert error(out, expected) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_sparse_equals_dense_when_every_block_is_chosen(variant):
    rig = gpu()
    case = make_chunk([(5000, 300), (64, 3)], tokens=512, rig=rig)
    everything = torch.full((2, 512, (case.max_pages + 31) // 32), -1, dtype=torch.int32, device="cuda")
    sparse = case.attend(rig, chosen=everything, dense_below=0, variant=variant)
    assert error(sparse, case.attend(rig)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_that_crosses_dense_below_equals_the_reference(variant):
    rig = gpu()
    rule = SelectionRule(init_blocks=1, window=128, top_k=4, dense_below=1000)
    for sequences in ([(700, 600)], [(990, 20), (0, 50), (5000, 1)]):
        case = make_chunk(sequences, tokens=1024, rig=rig)
        words = case.select(rig, rule)
        out = case.attend(rig, chosen=words, dense_below=1000, variant=variant)
        chosen = unpack_bitmap(words, case.max_pages)
        expected = case.expected_attention(chosen=chosen, dense_below=1000)
        assert error(out, expected) < TOLERANCE["bfloat16"]
        assert not out[case.used :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_other_scales_equal_the_reference(scale):
    rig = gpu()
    case = make_chunk([(1900, 70), (64, 20)], tokens=128, rig=rig)
    chosen = random_blocks(case, 0.4)
    out = case.attend(rig, chosen=pack_bitmap(chosen), dense_below=80, scale=scale)
    expected = case.expected_attention(chosen=chosen, dense_below=80, scale=scale)
    assert error(out, expected) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
def test_each_kind_leaves_the_others_rows_alone():
    rig = gpu()
    case = make_chunk([(700, 600)], tokens=1024, rig=rig)
    chosen = pack_bitmap(random_blocks(case, 0.3))
    dense = case.positions[: case.used] + 1 < 1000
    for kind, own in ((DenseChunkAttention, dense), (SparseChunkAttention, ~dense)):
        args, out = case.attention(chosen=chosen, dense_below=1000)
        case.attender(kind, rig)(args, rig.stream)
        rig.stream.synchronize()
        assert not out[: case.used][own].isnan().any()
        assert out[: case.used][~own].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [131072, 200_000])
def test_long_contexts_equal_the_reference(length):
    rig = gpu()
    rule = SelectionRule()
    case = make_chunk([(length - 1024, 1024)], tokens=1024, rig=rig)
    words = case.select(rig, rule)
    out = case.attend(rig, chosen=words, dense_below=rule.dense_below)
    chosen = unpack_bitmap(words, case.max_pages)
    expected = case.expected_attention(chosen=chosen, dense_below=rule.dense_below)
    assert error(out, expected) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_input_gives_the_same_bits(variant):
    rig = gpu()
    case = make_chunk([(20000, 200)], tokens=256, rig=rig)
    chosen = pack_bitmap(random_blocks(case, 0.2))
    first = case.attend(rig, chosen=chosen, dense_below=20100, variant=variant)
    for _ in range(3):
        assert torch.equal(first, case.attend(rig, chosen=chosen, dense_below=20100, variant=variant))


@pytest.mark.gpu
def test_a_captured_bucket_follows_the_lengths_and_tables_on_the_device():
    rig = gpu()
    rule = SelectionRule(init_blocks=1, window=128, top_k=4, dense_below=600)
    case = make_chunk([(3500, 100)], tokens=128, rig=rig, max_pages=64)
    selection, words = case.selection(rule)
    attention, out = case.attention(chosen=words, dense_below=600)
    selector = case.selector(rig)
    sparse, dense = (case.attender(kind, rig) for kind in (SparseChunkAttention, DenseChunkAttention))

    def step():
        selector(selection, rig.stream)
        sparse(attention, rig.stream)
        dense(attention, rig.stream)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(rig.stream.handle)):
        step()
    for sequences in ([(1500, 100)], [(550, 90)], [(0, 128)], [(3000, 1)]):
        other = make_chunk(sequences, tokens=128, rig=rig, max_pages=64, seed=9)
        for mine, theirs in ((case.starts, other.starts), (case.lengths, other.lengths)):
            mine.copy_(theirs)
        case.positions.copy_(other.positions)
        case.q.copy_(other.q)
        case.tables.copy_(other.tables)
        for name in ("keys", "values", "fine", "coarse"):
            source = getattr(other.pages, name)
            getattr(case.pages, name)[: len(source)] = source
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = other.expected_attention(chosen=unpack_bitmap(words, 64), dense_below=600)
        assert error(out, expected) < TOLERANCE["bfloat16"]
