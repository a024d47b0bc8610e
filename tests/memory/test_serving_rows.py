"""What serving many clients adds to the ledger: suspended sequences, steps of fewer tokens, models that share a room."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edged.config import Config, MemoryConfig, ModelConfig
from edged.errors import ConfigError, LedgerError
from edged.memory.buffers import ModelPlan
from edged.memory.ledger import EVICTABLE_MODELS, compute_ledger, make_ledger, plan_residency
from edged.memory.model_rows import SUSPENDED, model_bytes, model_rows, page_bytes
from edged.models.architecture import Architecture

SMALL = {
    "model_type": "llama",
    "hidden_size": 48,
    "head_dim": 16,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
PLAN = ModelPlan(
    Architecture.from_config(SMALL), dtype="float32", context_length=512, max_sequences=4, prefill_chunk=128
)
MIB = 2**20


def rows_of(plan):
    return {row.name: row for row in model_rows(plan)}


def test_host_memory_is_a_row_of_whole_pages():
    page = page_bytes(PLAN)
    assert page == 2 * 2 * 16 * 64 * 4
    plan = replace(PLAN, host_kv=5 * page + page // 2)
    assert rows_of(plan)[SUSPENDED].bytes == 5 * page
    assert model_bytes(plan) == model_bytes(PLAN) + 5 * page
    assert SUSPENDED not in rows_of(PLAN)
    with pytest.raises(ConfigError, match=r"host_kv is 1\.00 KiB and a page takes"):
        model_rows(replace(PLAN, host_kv=1024))


@pytest.mark.parametrize(("given", "tokens"), [(None, 132), (100, 100), (1000, 132), (2, 4)])
def test_a_step_has_no_more_tokens_than_it_may(given, tokens):
    assert replace(PLAN, max_step_tokens=given).step_tokens == tokens


def test_evictable_models_share_what_is_left_and_the_largest_must_fit():
    size = model_bytes(PLAN)
    plans = dict.fromkeys("abc", PLAN)
    plain = make_ledger({"a": PLAN}, budget=10**12, host=MIB)
    for left, room in ((3 * size, 2 * size), (int(1.5 * size), int(1.5 * size)), (size // 2, size)):
        ledger = make_ledger(plans, budget=plain.total + left, host=MIB, evictable="bc")
        found = {row.name: row.bytes for row in ledger.rows}
        assert found[EVICTABLE_MODELS] == room
        assert ledger.total == plain.total + room
        assert ledger.fits == (room <= left)
    with pytest.raises(LedgerError, match="would fit with"):
        ledger.check()


def test_a_configuration_says_what_is_loaded_at_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    models = tuple(
        ModelConfig(name=name, path=tmp_path, context_length=512, residency=kind)
        for name, kind in (("a", "reserved"), ("b", "evictable"), ("c", "evictable"))
    )
    whole = compute_ledger(Config(models, memory=MemoryConfig(budget=10**12)))
    residency = plan_residency(Config(models), whole)
    assert residency.loaded == ("a", "b", "c")
    size = residency.size("b")
    tight = Config(models, memory=MemoryConfig(budget=whole.total - size))
    assert plan_residency(tight, compute_ledger(tight)).loaded == ("a", "b")
