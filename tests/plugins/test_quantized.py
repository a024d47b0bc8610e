"""Keys and values in eight bits: the format itself, and every kernel over such pages against its reference."""

import random
from dataclasses import replace

import pytest
import torch
from decode_cases import TOLERANCE, copy_of, error, gpu, make_case, random_parents
from quantized_cases import KV_DTYPES, assert_quantized_pages_agree, quantized_case
from test_append import check_cuts, reference_of
from test_append import run as run_append
from test_decode_attention import expected_output, random_choice
from test_decode_attention import run as run_attention

from plugins_trt.arena import Arena, page_bytes
from plugins_trt.commit.contract import Commit
from plugins_trt.commit.launch import Committer
from plugins_trt.commit.reference import commit
from plugins_trt.contract import LaunchError
from plugins_trt.quantized.reference import LARGEST, dequantize, quantize

# ---------------------------------------------------------------- the format


@pytest.mark.parametrize(("kv_dtype", "worst"), [("int8", 0.5 / 127), ("float8_e4m3fn", 16 / 448)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 3e4])
def test_a_row_comes_back_within_half_a_step_of_its_largest_element(kv_dtype, worst, size):
    x = size * torch.randn(300, 3, 64, generator=torch.Generator().manual_seed(1))
    stored, scales = quantize(x, kv_dtype)
    assert scales.dtype == torch.float16
    assert scales.shape == x.shape[:-1]
    apart = (dequantize(stored, scales) - x).abs() / x.abs().amax(-1, keepdim=True)
    assert float(apart.max()) < worst * 1.01
    assert float(apart.max()) > worst / 2  # as coarse as the format, not finer


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_scale_depends_on_its_own_row_alone(kv_dtype):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    stored, scales = quantize(x, kv_dtype)
    for row in range(5):
        alone, scale = quantize(x[row : row + 1], kv_dtype)
        assert torch.equal(alone[0], stored[row])
        assert torch.equal(scale[0], scales[row])
    moved, moved_scales = quantize(4 * x, kv_dtype)  # a power of two moves the scale and nothing else
    assert torch.equal(moved, stored)
    assert torch.equal(moved_scales, 4 * scales)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_zeros_of_huge_and_of_broken_numbers(kv_dtype):
    x = torch.zeros(5, 64)
    x[1] = 1e-30  # less than any scale holds
    x[2, 0], x[2, 1] = 3e38, -1.0
    x[3, 5] = float("nan")
    x[4, 5] = float("inf")
    stored, scales = quantize(x, kv_dtype)
    back = dequantize(stored, scales)
    assert not back[:2].any()
    assert float(back[2, 0]) == LARGEST[kv_dtype] * 65504
    assert back[2].isfinite().all()
    assert back[3:].isnan().all()


def test_an_arena_has_scales_where_its_keys_are_quantized_and_only_there():
    pointers = {"keys": 1 << 20, "values": 2 << 20, "fine": 3 << 20, "coarse": 4 << 20}
    sizes = {"layers": 3, "pages": 10, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    scales = {"key_scales": 5 << 20, "value_scales": 6 << 20}
    arena = Arena.contiguous(**sizes, **pointers, **scales, kv_dtype="int8")
    keys = (1 << 20) + 2 * (10 * 2 * 64 * 128)
    assert arena.pack(2)[:3] == (keys, 2 * 64 * 128, 64 * 128)
    assert arena.pack(2)[6:9] == ((3 << 20) + 2 * (10 * 2 * 4 * 128) * 2, 2 * 4 * 128, 4 * 128)
    assert arena.pack_all(2)[12:15] == ((5 << 20) + 2 * (10 * 2 * 64) * 2, 2 * 64, 64)
    assert arena.pack_keys_values(2) == (*arena.pack_all(2)[:6], *arena.pack_all(2)[12:])
    for changes, message in (
        ({"kv_dtype": "int4", **scales}, "^kv_dtype: int4"),
        ({"kv_dtype": "int8"}, "^key_scales and value_scales: kv_dtype int8 has both"),
        (scales, "^key_scales and value_scales: kv_dtype None has none"),
        ({"kv_dtype": "int8", **scales, "value_scales": 8}, "^value_scales: pointer 0x8"),
    ):
        with pytest.raises(LaunchError, match=message):
            Arena.contiguous(**{**sizes, **pointers, **changes})
    # A token of 32 layers and 2 heads of 128: half the bytes, and 2 bytes for each key and each value.
    assert page_bytes(32, 2, 128, "bfloat16", "int8") == 64 * 32 * 2 * 2 * (128 + 2) + 5 * 32 * 2 * 128 * 2


# ---------------------------------------------------------------- append and commit


def test_the_references_of_append_and_commit_agree():
    for kv_dtype in KV_DTYPES:
        chain = make_case([(50, 30)], heads=4, dim=64, appended=False)
        tree = make_case([(50, 30)], parents=[list(range(-1, 29))], heads=4, dim=64, appended=False)
        chain, tree = (quantized_case(case, kv_dtype) for case in (chain, tree))
        pages, _ = reference_of(tree)
        commit(pages, lengths=[50], page_tables=tree.tables, paths=[list(range(30))])
        expected, _ = reference_of(chain)
        for name, pool in vars(expected).items():
            got = getattr(pages, name)
            assert torch.equal(got.isnan(), pool.isnan())
            assert error(got.nan_to_num(), pool.nan_to_num()) < 4e-3, name


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "layout",
    [(32, 2, 128, "bfloat16"), (16, 2, 64, "float16"), (9, 3, 64, "bfloat16"), (8, 8, 128, "float16")],
)
def test_a_ragged_step_is_appended_as_the_reference_does(kv_dtype, norm, layout):
    heads, kv_heads, dim, dtype = layout
    for sequences, tokens in (
        [[(0, 300), (1000, 1), (0, 0), (15, 16), (127, 2), (130, 126)], 512],
        [[(127, 1), (1023, 1)], 4],
    ):
        case = make_case(
            sequences, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=tokens, device="cuda",
            appended=False,
        )  # fmt: skip
        case = quantized_case(case, kv_dtype)
        norms = None
        if norm:
            norms = [1 + 0.3 * torch.randn(dim, device="cuda").to(case.dtype) for _ in range(2)]
        pages, result = reference_of(case, norms)
        out = run_append(case, norms=norms, fused=norm)
        assert error(out, result.q) < 2e-3
        assert not out[case.starts[-1] :].any()
        assert_quantized_pages_agree(case.pages, pages)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_every_size_are_rounded_as_the_reference_does(kv_dtype):
    case = make_case([(0, 512)], device="cuda", appended=False)
    sizes = 10.0 ** torch.linspace(-9, 9, 512, device="cuda")
    case.v.mul_(sizes[:, None, None].to(case.dtype))
    case.v[100], case.v[101, 0, 3], case.v[102, 1, 5] = 0.0, float("inf"), float("nan")
    case = quantized_case(case, kv_dtype)
    pages, _ = reference_of(case)
    run_append(case)
    broken = pages.value_scales.isnan()
    assert torch.equal(case.pages.value_scales.isnan(), broken)
    assert torch.equal(case.pages.value_scales[~broken], pages.value_scales[~broken])
    assert torch.equal(case.pages.values[~broken], pages.values[~broken])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_depends_on_how_a_prompt_is_cut(kv_dtype, dim):
    whole = make_case([(0, 777)], kv_heads=2, dim=dim, device="cuda", appended=False)
    rng = random.Random(0)
    random_sizes = [rng.randrange(1, 90) for _ in range(50)]
    check_cuts(quantized_case(whole, kv_dtype), ([64], [1], [7, 100, 33, 1, 1, 1, 255], random_sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("length", [0, 31, 100, 127, 1000])
def test_an_accepted_path_leaves_what_decoding_it_token_by_token_leaves(kv_dtype, length):
    rng, rig, nodes = random.Random(length), gpu(), 64
    case = make_case(
        [(length, nodes)], parents=[random_parents(nodes, rng, 0.9)], device="cuda", appended=False
    )
    case = quantized_case(case, kv_dtype)
    before = copy_of(case.pages)
    run_append(case)
    deepest = max(range(nodes), key=lambda node: case.positions[node])
    path = [node for node in range(nodes) if case.masks[deepest] >> node & 1]
    args = Commit(
        batch=case.batch,
        arena=case.arena,
        paths=case.int32([path + [0] * (64 - len(path))]),
        accepted=case.int32([len(path)]),
    )
    Committer(rig.kernels.operator("commit"), dtype="bfloat16", head_dim=128, kv_dtype=kv_dtype)(
        args, rig.stream
    )
    rig.stream.synchronize()
    for depth, node in enumerate(path):
        part = make_case([(length + depth, 1)], device="cuda", appended=False)
        rows = {name: getattr(case, name)[node : node + 1] for name in ("q", "k", "v")}
        run_append(replace(part, pages=before, tables=case.tables, **rows))
    end = length + len(path)
    pools = {"keys": 1, "values": 1, "key_scales": 1, "value_scales": 1, "fine": 16, "coarse": 64}
    for name, rows in pools.items():
        slots = torch.arange(end // rows, device="cuda") * rows + rows - 1
        where = case.tables[0][slots // 64].long()
        mine, theirs = (getattr(pages, name)[where, :, slots % 64 // rows] for pages in (case.pages, before))
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), name


# ---------------------------------------------------------------- decode


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 2, 128), (16, 2, 64), (9, 3, 64), (8, 8, 128)])
def test_one_token_of_any_length_equals_the_reference(kv_dtype, dtype, heads, kv_heads, dim):
    for length in [0, 1, 2, *range(63, 129, 5), *range(1000, 1064, 7), 8191, 20011]:
        case = make_case(
            [(length, 1)], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device="cuda", seed=length,
            max_pages=length // 64 + 1 + length % 3,
        )  # fmt: skip
        case = quantized_case(case, kv_dtype)
        assert error(run_attention(case), expected_output(case)) < TOLERANCE["bfloat16"] / 2, length


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_long_context_equals_the_reference_to_the_same_bits_each_time(kv_dtype):
    case = quantized_case(make_case([(131071, 1)], device="cuda"), kv_dtype)
    first = run_attention(case)
    assert error(first, expected_output(case)) < TOLERANCE["bfloat16"]
    for poison in (1e30, float("nan"), 0.0):
        assert torch.equal(first, run_attention(case, poison=poison))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10])
def test_devices_of_less_shared_memory_have_kernels_of_their_own(kv_dtype, shared_bytes):
    for sequences in ([(20011, 1)], [(700, 1), (64, 1), (3000, 9)]):
        case = quantized_case(make_case(sequences, device="cuda"), kv_dtype)
        out = run_attention(case, shared_bytes=shared_bytes)
        assert error(out, expected_output(case)) < TOLERANCE["bfloat16"] / 2


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layout", [(32, 2, 128, "bfloat16"), (9, 3, 64, "float16"), (4, 4, 128, "bfloat16")])
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
def test_ragged_batches_equal_the_reference_and_padding_is_zero(kv_dtype, layout, sequences, tokens):
    heads, kv_heads, dim, dtype = layout
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
    case = quantized_case(case, kv_dtype)
    out = run_attention(case)
    assert error(out, expected_output(case)) < TOLERANCE["bfloat16"] / 2
    assert not out[case.starts[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("nodes", [1, 5, 33, 64])
@pytest.mark.parametrize("length", [0, 60, 100, 4095])
@pytest.mark.parametrize("layout", [(32, 2, 128), (12, 4, 64)])
def test_trees_equal_the_reference(kv_dtype, nodes, length, layout):
    heads, kv_heads, dim = layout
    rng = random.Random(nodes * 1000 + length)
    parents = [random_parents(nodes, rng, rng.choice([0.0, 0.5, 0.9, 1.0])), random_parents(1, rng)]
    tokens = 1 << (nodes).bit_length() if nodes < 64 else 64
    sequences = [(length, nodes), (length + 3, 1)][: 1 if nodes == 64 else 2]
    case = make_case(
        sequences, heads=heads, kv_heads=kv_heads, dim=dim, parents=parents[: len(sequences)],
        tokens=tokens, device="cuda", seed=nodes,
    )  # fmt: skip
    case = quantized_case(case, kv_dtype)
    assert error(run_attention(case), expected_output(case)) < TOLERANCE["bfloat16"] / 2


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layout", [(32, 2, 128, "bfloat16"), (16, 2, 64, "float16"), (9, 3, 64, "bfloat16")])
@pytest.mark.parametrize("tree", [False, True])
def test_sparse_queries_attend_to_their_blocks_alone(kv_dtype, layout, tree):
    heads, kv_heads, dim, dtype = layout
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
    case = quantized_case(case, kv_dtype)
    blocks, counts, chosen = random_choice(case, rng, window=2)
    for dense_below in (0, 3003, 4100):  # all sparse, a sequence that crosses, most dense
        out = run_attention(case, blocks=blocks, counts=counts, dense_below=dense_below)
        expected = expected_output(case, chosen=chosen, dense_below=dense_below)
        assert error(out, expected) < TOLERANCE["bfloat16"] / 2, dense_below
