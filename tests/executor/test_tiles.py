"""Attention of many queries by oneDNN's products, held to fp64 and to transformers; and torch's kernel in its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executor_runner import Runner, load, reference_logits
from test_random_models import MODELS, save

from edged.executor import torch_tiles
from edged.executor.torch_products import OneDnnProduct
from edged.executor.torch_tiles import TILE_KEYS, TileAttention, causal_mask, merge

HAS_ONEDNN = OneDnnProduct.find() is not None
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no such operator")


def heads(*shape, seed=0, dtype=torch.float32):
    return (1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def expected(q, k, v, mask=0.0):
    """In fp64: outputs and log-sum-exps."""
    scores = q.double() @ k.double().transpose(2, 3) / q.shape[3] ** 0.5 + mask
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "group", "rows", "keys"),
    [(1, 2, 700, 512), (2, 3, 70, 700), (2, 1, 64, 64), (1, 1, 1, 1), (2, 4, 100, 1301)],
)
def test_queries_see_all_keys(dtype, batch, group, rows, keys):
    tiles = TileAttention(OneDnnProduct.find())
    q = heads(batch, group, rows, 24, dtype=dtype)
    shared = [heads(batch, 1, keys, 24, seed=seed, dtype=dtype).expand(-1, group, -1, -1) for seed in (1, 2)]
    own = [heads(batch, group, keys, 24, seed=seed, dtype=dtype) for seed in (3, 4)]
    for k, v in (shared, own):
        found, lse = tiles(q, k, v)
        out, sums = expected(q, k, v)
        assert found.shape == q.shape
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), out, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=2e-5)


@needs_onednn
@pytest.mark.parametrize("before", [0, 256, 512, 1024])
@pytest.mark.parametrize("rows", [256, 232, 1])
def test_new_keys_are_seen_causally(before, rows):
    tiles = TileAttention(OneDnnProduct.find())
    group, keys = 3, before + rows
    q = heads(2, group, rows, 16)
    k, v = (heads(2, 1, keys, 16, seed=seed).expand(-1, group, -1, -1) for seed in (1, 2))
    mask = torch.full((rows, keys), -torch.inf).triu(before + 1)
    found, lse = tiles(q, k, v, causal_mask(rows, group))
    out, sums = expected(q, k, v, mask)
    torch.testing.assert_close(found.double(), out, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=2e-5)


def test_parts_that_are_merged_are_the_whole():
    q, k, v = heads(1, 2, 5, 8), heads(1, 2, 40, 8, seed=1), heads(1, 2, 40, 8, seed=2)
    parts = [expected(q, k[:, :, some], v[:, :, some]) for some in (slice(0, 7), slice(7, 40))]
    for found, whole in zip(merge(*parts[0], *parts[1]), expected(q, k, v), strict=True):
        torch.testing.assert_close(found, whole)


@needs_onednn
@pytest.mark.parametrize("slower", ["tiles", "kernel"])
def test_what_is_faster_is_measured(slower, monkeypatch):
    now = 0.0

    def kernel(q, k, v):
        nonlocal now
        now += 2.0 if slower == "kernel" else 1.0
        return q, q[..., 0]

    def tiles(self, q, k, v):
        nonlocal now
        now += 2.0 if slower == "tiles" else 1.0
        return q, q[..., 0]

    monkeypatch.setattr(TileAttention, "__call__", tiles)
    monkeypatch.setattr(torch_tiles.time, "thread_time", lambda: now)
    found = TileAttention.where_faster(kernel, 2, 16, torch.float32)
    assert (found is None) == (slower == "tiles")
    assert TileAttention.where_faster(kernel, 2, 16, torch.float64) is None
    monkeypatch.setattr(OneDnnProduct, "find", lambda: None)
    assert TileAttention.where_faster(kernel, 2, 16, torch.float32) is None


@pytest.mark.parametrize("way", [pytest.param("tiles", marks=needs_onednn), "kernel"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_long_chunks_answer_as_transformers(way, name, tmp_path, monkeypatch):
    """Alone in a step with a history and without one, in several blocks, and beside another sequence."""
    runs = []
    run = TileAttention.__call__

    def counted(self, *arguments):
        runs.append(arguments[0].shape)
        return run(self, *arguments)

    monkeypatch.setattr(TileAttention, "__call__", counted)
    tiles = TileAttention(OneDnnProduct.find()) if way == "tiles" else None
    monkeypatch.setattr(TileAttention, "where_faster", lambda *_: tiles)
    model = save(MODELS[name], tmp_path).float()
    executor = load(tmp_path, dtype="float32", context_length=1024, max_sequences=3, prefill_chunk=620)
    runner = Runner(executor)
    ids = np.random.default_rng(3).integers(0, 211, 900).tolist()
    alone, first, second = runner.sequence(ids), runner.sequence(ids[:300]), runner.sequence(ids[200:500])
    found = [runner.prefill(alone, 600), runner.logits([(first, 300), (second, 300)], rows="all")]
    executor.close()
    expected = [reference_logits(model, part) for part in (ids, ids[:300], ids[200:500])]
    assert np.abs(found[0] - expected[0]).max() < 1e-4
    assert np.abs(found[1] - np.concatenate(expected[1:])).max() < 1e-4
    assert bool(runs) == (way == "tiles")
    assert max(TILE_KEYS) < len(ids), "there are several tiles"
