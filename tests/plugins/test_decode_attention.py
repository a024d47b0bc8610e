import random

import pytest
import torch
from decode_cases import TOLERANCE, array, error, gpu, make_case, random_parents

from plugins_trt.contract import Bucket, LaunchError
from plugins_trt.decode_attention.contract import AttentionPlan, DecodeAttention, workspace_bytes
from plugins_trt.decode_attention.launch import DecodeAttender
from plugins_trt.decode_attention.reference import attend

H200 = 132


def expected_output(case, *, chosen=None, dense_below=0):
    """The reference for every token, zeros for padding; `chosen(token, position)` gives its blocks or None."""
    out = torch.zeros(case.tokens, case.heads, case.dim, device=case.device)
    for token, sequence, position, mask in case.queries():
        blocks = None if chosen is None or position + 1 < dense_below else chosen[token]
        out[token] = attend(
            case.pages,
            case.q[token],
            case.tables[sequence],
            length=case.lengths[sequence],
            position=position,
            mask=mask,
            chosen=blocks,
        )
    return out


def arguments(
    case, *, blocks=None, counts=None, dense_below=0, poison=float("nan"), multiprocessors=H200, **forced
):
    plan = AttentionPlan.of(
        case.bucket(multiprocessors), sparse=blocks is not None, quantized=case.kv_dtype is not None
    )
    workspace = torch.full((plan.workspace_bytes // 4,), poison, device=case.device)
    out = torch.full_like(case.q, poison)
    case.keep += [workspace, out]
    return DecodeAttention(
        batch=case.batch,
        arena=case.arena,
        layer=0,
        q=array(case.q),
        out=array(out),
        workspace=array(workspace),
        blocks=None if blocks is None else array(blocks),
        counts=None if counts is None else array(counts),
        dense_below=dense_below,
        **forced,
    ), out


def run(case, shared_bytes=None, **options):
    rig = gpu()
    attender = DecodeAttender(
        rig.kernels.operator("decode_attention"),
        multiprocessors=rig.kernels.multiprocessors,
        shared_bytes=shared_bytes or rig.kernels.shared_bytes,
        dtype=str(case.dtype).removeprefix("torch."),
        head_dim=case.dim,
        kv_dtype=case.kv_dtype,
    )
    args, out = arguments(case, multiprocessors=rig.kernels.multiprocessors, **options)
    attender(args, rig.stream)
    rig.stream.synchronize()
    return out


def random_choice(case, rng, total=24, window=4, init=0):
    """Random blocks of each token and KV head, its own, the `window` before it and the `init` first among them."""
    blocks = torch.full((case.tokens, case.kv_heads, total), -1, dtype=torch.int32)
    counts = torch.zeros(case.tokens, case.kv_heads, dtype=torch.int32)
    chosen = {}
    for token, _, position, _ in case.queries():
        own = position // 64
        chosen[token] = torch.zeros(case.kv_heads, own + 1, dtype=torch.bool)
        for head in range(case.kv_heads):
            local = {*range(max(0, own - window), own + 1), *range(min(init, own + 1))}
            others = [block for block in range(own + 1) if block not in local]
            picked = sorted(local | set(rng.sample(others, min(len(others), total - len(local)))))
            blocks[token, head, : len(picked)] = torch.tensor(picked)
            counts[token, head] = len(picked)
            chosen[token][head, picked] = True
        chosen[token] = chosen[token].to(case.device)
    return blocks.to(case.device), counts.to(case.device), chosen


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 2, 128), (16, 2, 64), (9, 3, 64), (8, 8, 128), (24, 8, 64)]
)
def test_one_token_of_any_length_equals_the_reference(dtype, heads, kv_heads, dim):
    lengths = [0, 1, 2, *range(63, 129), *range(1000, 1064, 7), 8191, 20011]
    for length in lengths:
        case = make_case(
            [(length, 1)], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device="cuda", seed=length,
            max_pages=length // 64 + 1 + length % 3,
        )  # fmt: skip
        assert error(run(case), expected_output(case)) < TOLERANCE[dtype], length


@pytest.mark.gpu
@pytest.mark.parametrize("length", [131071, 199999])
def test_long_contexts_equal_the_reference(length):
    case = make_case([(length, 1)], device="cuda", seed=length)
    assert error(run(case), expected_output(case)) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [(32, 2, 128), (16, 2, 64), (9, 3, 64), (4, 4, 128)])
@pytest.mark.parametrize(
    ("sequences", "tokens"),
    [
        ([(5, 3), (700, 1), (0, 0), (64, 12)], 16),
        ([(4000, 64)], 64),
        ([(63, 2)], 2),
        ([(index * 37, 1) for index in range(30)], 32),
        ([(1000, 20), (31, 33)], 64),
    ],
)
def test_ragged_batches_equal_the_reference_and_padding_is_zero(dtype, layout, sequences, tokens):
    heads, kv_heads, dim = layout
    case = make_case(
        sequences,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        tokens=tokens,
        device="cuda",
        seed=tokens,
    )
    out = run(case)
    assert error(out, expected_output(case)) < TOLERANCE[dtype]
    assert not out[case.starts[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 33, 64])
@pytest.mark.parametrize("length", [0, 1, 60, 64, 100, 4095])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 2, 128), (12, 4, 64)])
def test_trees_equal_the_reference(nodes, length, heads, kv_heads, dim):
    rng = random.Random(nodes * 1000 + length)
    parents = [random_parents(nodes, rng, rng.choice([0.0, 0.5, 0.9, 1.0])), random_parents(1, rng)]
    tokens = 1 << (nodes).bit_length() if nodes < 64 else 64
    sequences = [(length, nodes)]
    if nodes < 64:
        sequences.append((length + 3, 1))
    case = make_case(
        sequences, heads=heads, kv_heads=kv_heads, dim=dim, parents=parents[: len(sequences)],
        tokens=tokens, device="cuda", seed=nodes,
    )  # fmt: skip
    assert error(run(case), expected_output(case)) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [(32, 2, 128), (16, 2, 64), (9, 3, 64)])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("window", [0, 2])
def test_sparse_queries_attend_to_their_blocks_alone(dtype, layout, tree, window):
    heads, kv_heads, dim = layout
    rng = random.Random(7)
    sequences = [(6000, 1), (150, 1), (3000, 5), (4095, 33)]
    parents = [random_parents(new, rng, 0.8) for _, new in sequences] if tree else None
    case = make_case(
        sequences,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        parents=parents,
        tokens=64,
        device="cuda",
    )
    blocks, counts, chosen = random_choice(case, rng, window=window)
    for dense_below in (0, 3003, 4100):  # all sparse, a sequence that crosses, most dense
        out = run(case, blocks=blocks, counts=counts, dense_below=dense_below)
        expected = expected_output(case, chosen=chosen, dense_below=dense_below)
        assert error(out, expected) < TOLERANCE[dtype], dense_below
    known = run(case, blocks=blocks, counts=counts, all_sparse=True)
    assert torch.equal(known, run(case, blocks=blocks, counts=counts))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [(32, 2, 128), (16, 2, 64), (9, 3, 64)])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("blocks_of", [(24, 8, 1), (24, 1, 0), (24, 21, 2), (12, 7, 0)])
def test_blocks_that_all_queries_share_are_attended_to_once(dtype, layout, tree, blocks_of):
    """Of trees and chains long and short, whose blocks are many, or few: those share nothing."""
    heads, kv_heads, dim = layout
    total, window, init = blocks_of
    rng = random.Random(total)
    for sequences in ([(24 * 64, 64)], [(2000 + window, 17), (4090, 8), (3000, 7), (900, 30)], [(6111, 16)]):
        parents = [random_parents(new, rng, 0.8) for _, new in sequences] if tree else None
        tokens = 64 if len(sequences) > 1 else sequences[0][1]
        case = make_case(
            sequences,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            dtype=dtype,
            parents=parents,
            tokens=tokens,
            device="cuda",
        )
        blocks, counts, chosen = random_choice(case, rng, total, window, init)
        for dense_below in (0, 2006):
            forced = {"init_blocks": init, "local_blocks": window + 1, "dense_below": dense_below}
            out = run(case, blocks=blocks, counts=counts, **forced)
            expected = expected_output(case, chosen=chosen, dense_below=dense_below)
            assert error(out, expected) < TOLERANCE[dtype], (sequences, dense_below)
            assert not out[case.starts[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [8, 64])
def test_shared_blocks_at_every_length_modulo_a_page_equal_the_reference(nodes):
    rng = random.Random(nodes)
    for rest in range(64):
        parents = [random_parents(nodes, rng, rng.choice([0.5, 1.0]))]
        case = make_case([(1600 + rest, nodes)], parents=parents, device="cuda", seed=rest)
        blocks, counts, chosen = random_choice(case, rng, 20, 9, 1)
        out = run(case, blocks=blocks, counts=counts, init_blocks=1, local_blocks=10)
        assert error(out, expected_output(case, chosen=chosen)) < TOLERANCE["bfloat16"], rest


@pytest.mark.gpu
def test_the_same_input_gives_the_same_bits():
    rng = random.Random(3)
    for parents, sequences in ((None, [(70000, 1)]), ([random_parents(48, rng)], [(9000, 48)])):
        case = make_case(sequences, parents=parents, device="cuda")
        first = run(case)
        for poison in (1e30, float("nan"), 0.0):
            assert torch.equal(first, run(case, poison=poison))
    blocks, counts, _ = random_choice(case, rng, 40, 20, 1)
    options = {"blocks": blocks, "counts": counts, "init_blocks": 1, "local_blocks": 21}
    first = run(case, **options)
    for poison in (1e30, float("nan"), 0.0):
        assert torch.equal(first, run(case, poison=poison, **options))


def test_arguments_are_refused_by_name():
    case = make_case([(100, 1), (5, 2)])
    args, _ = arguments(case)
    good = dict(vars(args))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            DecodeAttention(**{**good, **changes}).plan(H200)
        return str(caught.value)

    assert refused(q=array(case.q.float())).startswith("q: dtype float32")
    assert refused(q=array(case.q[:, :, :64])).startswith("q: shape")
    assert refused(q=array(case.q[:, :17])).startswith("heads: 17")
    assert refused(out=array(case.q.transpose(0, 1))).startswith("out: shape")
    assert refused(out=array(case.q.transpose(1, 2).contiguous().transpose(1, 2))).startswith("out: strides")
    assert refused(workspace=array(torch.zeros(64))).startswith("workspace: 256 bytes")
    assert refused(blocks=array(torch.zeros(3, 2, 4, dtype=torch.int32))).startswith("counts: missing")
    assert refused(scale=-1.0).startswith("scale: -1.0")
    lists = {
        "blocks": array(torch.zeros(3, 2, 4, dtype=torch.int32)),
        "counts": array(torch.zeros(3, 2, dtype=torch.int32)),
    }
    assert refused(**lists, init_blocks=2, local_blocks=3).startswith("local_blocks: 3")
    assert refused(init_blocks=-1).startswith("init_blocks: -1")
    assert refused(all_sparse=True).startswith("all_sparse: True")


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
def test_a_bucket_fills_the_device_and_its_scratch_stays_small(tokens, sparse):
    """Beside sparse queries there are few dense ones, and few blocks for them."""
    bucket = Bucket(
        tokens=tokens, sequences=1, heads=32, kv_heads=2, head_dim=128, max_pages=2048, multiprocessors=H200
    )
    plan = AttentionPlan.of(bucket, sparse=sparse)
    wide = plan.wide_parts * 2 * -(-tokens * 16 // 128)
    if sparse or tokens == 1:
        assert 120 <= plan.narrow_parts * 2 * tokens <= 2 * H200
        assert wide <= H200 or tokens > 32
    else:
        assert 200 <= wide <= 2 * H200
    assert plan.workspace_bytes <= workspace_bytes(bucket) < 20 << 20


@pytest.mark.parametrize("max_pages", [1, 3, 2048])
@pytest.mark.parametrize("tokens", [32, 48, 64])
def test_more_thread_blocks_for_many_tokens_take_no_more_scratch(tokens, max_pages):
    bucket = Bucket(
        tokens=tokens,
        sequences=1,
        heads=32,
        kv_heads=2,
        head_dim=128,
        max_pages=max_pages,
        multiprocessors=H200,
    )
    plan = AttentionPlan.of(bucket, sparse=True)
    many = plan.of_many(bucket, 3)
    assert many.parts <= plan.parts
    assert 1 <= many.narrow_parts <= max_pages
    assert many.narrow_parts * 2 * tokens <= 3 * H200
    if max_pages == 2048:
        assert many.narrow_parts * 2 * tokens > 2 * H200
