"""Chunks and whole steps over keys and values in eight bits, held to the references; and cuts and replays of them."""

import random
from dataclasses import replace

import pytest
import torch
from chunk_cases import make_chunk
from decode_cases import TOLERANCE, error, gpu, make_case
from quantized_cases import (
    KV_DTYPES,
    assert_quantized_pages_agree,
    quantized_case,
    quantized_pages,
)
from step_cases import GENEROUS, RULE, assert_rows_agree, check_cuts, check_replay, expected_of
from step_cases import run as run_step
from test_chunk_attention import RAGGED, random_blocks

from plugins_trt.chunk_selection.reference import pack_bitmap, unpack_bitmap
from plugins_trt.contract import SelectionRule

# ---------------------------------------------------------------- chunks


def quantized_chunk(sequences, kv_dtype, **options):
    case = make_chunk(sequences, rig=gpu(), **options)
    return replace(case, pages=quantized_pages(case.pages, kv_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "layout",
    [(32, 2, 128, "bfloat16"), (9, 3, 64, "bfloat16"), (16, 2, 64, "float16"), (4, 4, 128, "float16")],
)
@pytest.mark.parametrize("tokens", [128, 1024])
def test_dense_chunks_equal_the_reference(kv_dtype, layout, tokens):
    heads, kv_heads, dim, dtype = layout
    for sequences in RAGGED:
        case = quantized_chunk(
            sequences, kv_dtype, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=tokens
        )
        out = case.attend(gpu())
        assert error(out, case.expected_attention()) < TOLERANCE["bfloat16"] / 2
        assert not out[case.used :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "layout",
    [(32, 2, 128, "bfloat16"), (9, 3, 64, "bfloat16"), (16, 2, 64, "float16"), (10, 2, 128, "float16")],
)
@pytest.mark.parametrize("variant", ["wide_1", "narrow_1", "split_4"])
def test_sparse_chunks_equal_the_reference(kv_dtype, layout, variant):
    heads, kv_heads, dim, dtype = layout
    if variant == "narrow_1" and dim == 64:
        pytest.skip("the wide variant is as small there")
    for sequences in RAGGED:
        case = quantized_chunk(
            sequences, kv_dtype, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=128
        )
        for share in (0.0, 0.5):
            chosen = random_blocks(case, share)
            out = case.attend(gpu(), chosen=pack_bitmap(chosen), dense_below=0, variant=variant)
            expected = case.expected_attention(chosen=chosen, dense_below=0)
            assert error(out, expected) < TOLERANCE["bfloat16"] / 2
            assert not out[case.used :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_chunks_of_every_length_modulo_a_page_equal_the_reference(kv_dtype):
    rng = random.Random(2)
    for rest in range(64):
        sequences = [(rng.randrange(20) * 64 + rest, rng.choice([1, 17, 65, 100])), (rest, 3)]
        case = quantized_chunk(sequences, kv_dtype, tokens=128, seed=rest, max_pages=40)
        chosen = random_blocks(case, 0.4)
        for options in ({}, {"dense_below": 0}, {"dense_below": 600}):
            words = {"chosen": pack_bitmap(chosen)} if options else {}
            expected = case.expected_attention(**({"chosen": chosen} if options else {}), **options)
            assert error(case.attend(gpu(), **words, **options), expected) < TOLERANCE["bfloat16"] / 2, rest


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("length", "new", "tokens"), [(30720, 2048, 2048), (131072, 300, 512)])
def test_long_chunks_equal_the_reference_to_the_same_bits_each_time(kv_dtype, length, new, tokens):
    case = quantized_chunk([(length, new)], kv_dtype, tokens=tokens)
    dense = case.attend(gpu())
    assert error(dense, case.expected_attention()) < TOLERANCE["bfloat16"]
    chosen = case.select(gpu(), SelectionRule())
    sparse = case.attend(gpu(), chosen=chosen, dense_below=8192)
    expected = case.expected_attention(chosen=unpack_bitmap(chosen, case.max_pages), dense_below=8192)
    assert error(sparse, expected) < TOLERANCE["bfloat16"]
    assert torch.equal(dense, case.attend(gpu()))
    assert torch.equal(sparse, case.attend(gpu(), chosen=chosen, dense_below=8192))


# ---------------------------------------------------------------- whole steps


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layout", [(32, 2, 128, "bfloat16"), (16, 2, 64, "float16")])
@pytest.mark.parametrize("rule", [None, RULE, GENEROUS])
@pytest.mark.parametrize(
    "step",
    [([(2900, 1)], 1), ([(699, 1)], 1), ([(1023, 1), (690, 20), (100, 3)], 32), ([(600, 200)], 256)],
)
def test_a_step_equals_the_references(kv_dtype, layout, rule, step):
    heads, kv_heads, dim, dtype = layout
    sequences, tokens = step
    case = make_case(
        sequences,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        tokens=tokens,
        device="cuda",
        appended=False,
    )
    case = quantized_case(case, kv_dtype)
    pages, expected = expected_of(case, rule)
    out = run_step(case, rule)
    assert_quantized_pages_agree(case.pages, pages)
    assert_rows_agree(out.float(), expected, "bfloat16")
    assert not out[case.starts[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("rule", [None, SelectionRule(init_blocks=1, window=256, top_k=12, dense_below=700)])
def test_a_prompt_gives_the_same_however_it_is_cut(kv_dtype, rule):
    check_cuts(quantized_case(make_case([(0, 4196)], device="cuda", appended=False), kv_dtype), rule)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_graph_replayed_over_many_tokens_leaves_what_one_chunk_leaves(kv_dtype):
    whole = quantized_case(make_case([(0, 800)], device="cuda", appended=False), kv_dtype)
    check_replay(whole, SelectionRule(window=128, top_k=8, dense_below=512), first=200)
