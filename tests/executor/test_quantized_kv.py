"""Keys and values in eight bits on the CPU: close to exact ones, and the same however the prompt is cut or pages lie."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_models import write_model
from executor_runner import Runner, load
from test_sparse import ALL, CONFIG, FEW, LENGTH
from test_trees import alone, masks_of, path_to, random_tree, scattered, tree_batch

from edged.config import ModelConfig
from edged.errors import UnsupportedError
from edged.memory.buffers import ModelPlan
from edged.memory.model_rows import model_rows, page_bytes
from edged.models.architecture import Architecture
from plugins_trt.quantized.reference import dequantize, quantize

SETTINGS = {"dtype": "float32", "context_length": 1024, "max_sequences": 3, "prefill_chunk": 1024}
FORMATS = {"int8": "int8", "fp8": "float8_e4m3fn"}
TOKENS = np.random.default_rng(5).integers(0, 61, LENGTH).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "small", CONFIG)


def logits_of(executor, cut, *, pages=None):
    """Logits of every token of one prompt, ``[T, V]``, run in pieces of ``cut`` tokens."""
    runner = Runner(executor)
    prompt = runner.sequence(TOKENS, pages=pages)
    found = []
    while prompt.stored < LENGTH:
        count = min(cut, LENGTH - prompt.stored)
        found.append(executor.logits(runner.batch([(prompt, count)], rows="all")))
        prompt.stored += count
    return np.concatenate(found)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("attention", [None, FEW])
def test_nothing_depends_on_the_cut_or_on_where_pages_lie(folder, kv_dtype, attention):
    settings = {**SETTINGS, "kv_dtype": kv_dtype} | ({} if attention is None else {"attention": attention})
    whole = load(folder, **settings)
    expected = logits_of(whole, LENGTH)
    pools = {
        name: pool.clone()
        for name, pool in whole.buffers.items()
        if name.startswith(("kv", "fine", "coarse"))
    }
    assert pools["kv"].element_size() == 1
    for cut, apart in ((64, False), (100, True), (250, True)):
        other = load(folder, **settings)
        count = -(-LENGTH // 64)
        pages = np.random.default_rng(cut).permutation(other.limits.pages)[:count] if apart else None
        assert np.abs(logits_of(other, cut, pages=pages) - expected).max() < 2e-3 * np.abs(expected).max()
        if not apart:
            for name in ("kv", "kv_scales"):
                slots = slice(0, LENGTH)
                same = (other.buffers[name][:, :, slots] == pools[name][:, :, slots]).float().mean()
                assert float(same) > 0.999, name  # the linears before are cut, too: a few roundings differ


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_it_is_the_attention_of_exact_keys_and_values_that_were_rounded(folder, kv_dtype):
    """Rounding every key and value to the format, in an executor that stores them in fp32, gives the same logits."""
    quantized = logits_of(load(folder, **SETTINGS, kv_dtype=kv_dtype), 128)
    exact = load(folder, **SETTINGS)
    attention = exact._ops._attention
    append = attention._append

    def rounding(pool, new):
        new.copy_(dequantize(*quantize(new, FORMATS[kv_dtype])))
        append(pool, new)

    attention._append = rounding
    assert np.abs(logits_of(exact, 128) - quantized).max() < 1e-3 * np.abs(quantized).max()
    plain = logits_of(load(folder, **SETTINGS), 128)
    apart = np.linalg.norm(quantized - plain) / np.linalg.norm(plain)
    assert 1e-4 < apart < (0.05 if kv_dtype == "int8" else 0.2)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_sparse_equals_dense_when_every_block_is_chosen(folder, kv_dtype):
    dense = logits_of(load(folder, **SETTINGS, kv_dtype=kv_dtype), 256)
    sparse = logits_of(load(folder, **SETTINGS, kv_dtype=kv_dtype, attention=ALL), 256)
    assert np.abs(dense - sparse).max() < 1e-3 * np.abs(dense).max()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_compressed_keys_are_means_of_the_keys_as_they_are_stored(folder, kv_dtype):
    executor = load(folder, **SETTINGS, kv_dtype=kv_dtype, attention=FEW)
    logits_of(executor, 300)
    keys = dequantize(executor.buffers["kv"][:, :2, :LENGTH], executor.buffers["kv_scales"][:, :2, :LENGTH])
    for kernel, stride, name in ((32, 16, "fine"), (128, 64, "coarse")):
        means = keys.unfold(2, kernel, stride).mean(-1)  # [layers, kv_heads, n, D]
        last = torch.arange(means.shape[2]) * stride + kernel - 1
        stored = executor.buffers[name][:, last // 64, :, last % 64 // stride]  # [n, layers, kv_heads, D]
        assert torch.allclose(stored.permute(1, 2, 0, 3), means, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_pages_move_to_the_host_and_back_with_their_scales(folder, kv_dtype):
    executor = load(folder, **SETTINGS, kv_dtype=kv_dtype, attention=FEW)
    expected = logits_of(executor, 250)
    pages = np.arange(-(-LENGTH // 64), dtype=np.int32)
    saved = np.empty((len(pages), executor.page_bytes), np.uint8)
    executor.read_pages(pages, saved)
    runner = Runner(executor)
    again = np.random.default_rng(0).permutation(executor.limits.pages)[: len(pages)].astype(np.int32)
    for name, buffer in executor.buffers.items():
        if name.startswith(("kv", "fine", "coarse")):
            buffer.view(torch.uint8).fill_(0x7F)
    executor.write_pages(again, saved)
    prompt = runner.sequence(TOKENS, pages=again)
    prompt.stored = LENGTH - 10
    assert np.allclose(executor.logits(runner.batch([(prompt, 10)], rows="all")), expected[-10:], atol=2e-3)


def plan_of(folder, **settings):
    config = ModelConfig(name="m", path=folder, **{**SETTINGS, **settings})
    return ModelPlan.of(config, Architecture.of(config))


def test_the_ledger_counts_bytes_and_scales(folder):
    # 2 layers of 2 KV heads, 16 elements each; 5 compressed keys a page.
    rows = 2 * 2 * 2 * 64
    compressed = 2 * 2 * 5 * 16
    for kv_dtype, size in (
        ("fp32", 4 * 16),
        ("bf16", 2 * 16),
        ("fp16", 2 * 16),
        ("int8", 16 + 2),
        ("fp8", 16 + 2),
    ):
        plan = plan_of(folder, kv_dtype=kv_dtype)
        assert page_bytes(plan) == rows * size
        pages = model_rows(plan)[1]
        assert pages.bytes == plan.pages * rows * size
        assert ("with their scales" in pages.note) == (kv_dtype in FORMATS)
        element = {"fp32": 4, "bf16": 2, "fp16": 2}.get(
            kv_dtype, 4
        )  # compressed keys of quantized ones: dtype
        assert (
            page_bytes(plan_of(folder, kv_dtype=kv_dtype, attention=FEW))
            == rows * size + compressed * element
        )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "bf16"), ("float32", "fp16"), ("bfloat16", "fp32")]
)
def test_keys_and_values_may_have_another_type_than_weights(folder, dtype, kv_dtype):
    executor = load(folder, **{**SETTINGS, "dtype": dtype}, kv_dtype=kv_dtype)
    assert str(executor.buffers["kv"].dtype) == {
        "bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"
    }[kv_dtype]  # fmt: skip
    got, plain = logits_of(executor, 200), logits_of(load(folder, **{**SETTINGS, "dtype": dtype}), 200)
    assert np.linalg.norm(got - plain) / np.linalg.norm(plain) < 0.05


def test_what_a_gpu_does_not_store_is_refused_by_name(folder, tmp_path):
    plan = plan_of(folder, kv_dtype="int8")
    wide = replace(
        plan, device="cuda", dtype="bfloat16", architecture=replace(plan.architecture, head_dim=64, heads=8)
    )
    from edged.memory.cuda_limits import check_cuda_plan

    check_cuda_plan("m", wide)
    check_cuda_plan("m", replace(wide, kv_dtype="bfloat16"))
    with pytest.raises(
        UnsupportedError, match=r"model m: kv_dtype fp16 with dtype bfloat16 .* set kv_dtype to auto"
    ):
        check_cuda_plan("m", replace(wide, kv_dtype="float16"))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("attention", [None, FEW])
def test_accepted_nodes_of_a_tree_move_with_their_scales(folder, kv_dtype, attention):
    settings = {**SETTINGS, "kv_dtype": kv_dtype} | ({} if attention is None else {"attention": attention})
    executor = load(folder, **settings)
    random = np.random.default_rng(7)
    prompt = random.integers(0, 61, 351).tolist()
    parents = random_tree(random, 12)
    _, (sequence,) = scattered(executor, [prompt])
    first = int(alone(executor, prompt[:-1], prompt[-1:])[-1].argmax())
    masks = masks_of(parents)
    deepest = max(range(12), key=lambda node: masks[node].bit_count())
    path = path_to(masks[deepest])
    tokens = random.integers(0, 61, 12).tolist()
    tokens[0] = first
    for depth in range(1, len(path)):  # the deepest path is the greedy one
        known = [tokens[node] for node in path[:depth]]
        tokens[path[depth]] = int(alone(executor, prompt, known)[-1].argmax())
    logits = executor.logits(tree_batch([(sequence, tokens, parents)]))
    for node, mask in enumerate(masks):
        expected = alone(executor, prompt, [tokens[each] for each in path_to(mask)])[-1]
        assert np.abs(logits[node] - expected).max() < 2e-3 * np.abs(expected).max()
    executor.step(tree_batch([(sequence, tokens, parents)]))
    after = [*prompt, *(tokens[node] for node in path)]
    sequence.stored, sequence.tokens = len(after), [*after, 5]
    last = executor.logits(Runner(executor).batch([(sequence, 1)]))
    expected = alone(executor, after, [5])[-1]
    assert np.abs(last[0] - expected).max() < 2e-3 * np.abs(expected).max()
