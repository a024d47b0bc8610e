from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fixtures.held_buffers import check_buffers
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.config import Config, MemoryConfig, ModelConfig
from edged.errors import CheckpointError, LedgerError
from edged.memory import ledger as ledger_module
from edged.memory.available import available_memory
from edged.memory.buffers import (
    ACTIVATIONS,
    KV_PAGES,
    LOGITS,
    WEIGHTS,
    ModelPlan,
    step_buffers,
    weight_buffers,
)
from edged.memory.fitting import largest_context_length, largest_max_sequences
from edged.memory.ledger import compute_ledger, make_ledger, plan_memory
from edged.memory.model_rows import attention_scratch, model_bytes, model_rows, sampling_scratch
from edged.models.architecture import Architecture

if TYPE_CHECKING:
    from pathlib import Path

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMALL = {**SMOLLM2, "hidden_size": 48, "head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1}
SMALL |= {"intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
PLAN = ModelPlan(
    Architecture.from_config(SMOLLM2),
    dtype="float32",
    context_length=4096,
    max_sequences=2,
    prefill_chunk=512,
)
MIB = 2**20


def write_model(folder: Path, config=SMALL) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    from edged.models.weights import weight_specs

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    sources = [s for spec in weight_specs(Architecture.from_config(config)) for s in spec.sources]
    save_file({s.name: np.ones(s.shape, np.float32) for s in sources}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_the_bytes_that_the_executor_allocates(tmp_path, dtype):
    from edged.executor.torch_executor import TorchExecutor

    settings = {"dtype": dtype, "context_length": 200, "max_sequences": 3, "prefill_chunk": 32}
    executor = TorchExecutor(ModelConfig(name="m", path=write_model(tmp_path / "m"), threads=1, **settings))
    executor.load(lambda what, done, total: None)
    rows = {row.name: row.bytes for row in model_rows(executor.plan)}
    specs = (*weight_buffers(executor.plan), *step_buffers(executor.plan))
    check_buffers(executor.buffers, specs)
    held = dict.fromkeys((WEIGHTS, KV_PAGES, ACTIVATIONS, LOGITS), 0)
    for spec in specs:
        held[spec.row] += spec.nbytes
    held[ACTIVATIONS] += attention_scratch(executor.plan)
    held[LOGITS] += sampling_scratch(executor.plan)
    assert rows == held


def test_the_arithmetic_of_the_demo_model():
    rows = {row.name: row.bytes for row in model_rows(PLAN)}
    assert rows[WEIGHTS] == 134_515_008 * 4
    assert rows[KV_PAGES] == 2 * 4096 * 2 * 30 * 3 * 64 * 4
    half = {row.name: row.bytes for row in model_rows(replace(PLAN, dtype="bfloat16"))}
    assert half[KV_PAGES] * 2 == rows[KV_PAGES]


def test_a_context_is_rounded_up_to_whole_pages():
    pages = {length: replace(PLAN, context_length=length).pages for length in (64, 65, 128, 4096)}
    assert pages == {64: 2, 65: 4, 128: 4, 4096: 128}


@settings(deadline=None)
@given(
    length=st.integers(64, 20_000),
    sequences=st.integers(1, 16),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    room=st.integers(0, 4 * 2**30),
)
def test_the_offers_fit_and_one_more_would_not(length, sequences, dtype, room):
    plan = replace(
        PLAN, context_length=length, max_sequences=sequences, dtype=dtype, prefill_chunk=min(512, length)
    )
    context = largest_context_length(plan, room)
    if context is None:
        assert model_bytes(replace(plan, context_length=64, prefill_chunk=64)) > room
    else:
        chunk = min(plan.prefill_chunk, context)
        assert model_bytes(replace(plan, context_length=context, prefill_chunk=chunk)) <= room
        more = context + 1
        if context < length:
            assert (
                model_bytes(replace(plan, context_length=more, prefill_chunk=min(plan.prefill_chunk, more)))
                > room
            )
    count = largest_max_sequences(plan, room)
    if count is None:
        assert model_bytes(replace(plan, max_sequences=1)) > room
    else:
        assert model_bytes(replace(plan, max_sequences=count)) <= room
        assert count == sequences or model_bytes(replace(plan, max_sequences=count + 1)) > room


def test_the_refusal_says_what_is_missing_and_what_would_fit():
    ledger = make_ledger({"m": PLAN}, budget=1100 * MIB, host=100 * MIB)
    assert not ledger.fits
    with pytest.raises(LedgerError) as caught:
        ledger.check()
    context = largest_context_length(PLAN, 1100 * MIB - (ledger.total - model_bytes(PLAN)))
    assert f"context_length of at most {context}" in caught.value.message
    assert "max_sequences of at most 1" in caught.value.message
    assert "more than the budget of 1.07 GiB (memory.budget)" in caught.value.message
    assert make_ledger({"m": replace(PLAN, context_length=context)}, budget=1100 * MIB, host=100 * MIB).fits


def test_where_fewer_sequences_alone_would_not_fit_one_with_a_shorter_context_is_offered():
    ledger = make_ledger({"m": PLAN}, budget=950 * MIB, host=100 * MIB)
    offer = re.search(r"max_sequences of 1 and context_length of at most (\d+)", ledger.advice)
    assert offer is not None, ledger.advice
    offered = replace(PLAN, max_sequences=1, context_length=int(offer[1]))
    assert make_ledger({"m": offered}, budget=950 * MIB, host=100 * MIB).fits
    longer = replace(offered, context_length=offered.context_length + 64)
    assert not make_ledger({"m": longer}, budget=950 * MIB, host=100 * MIB).fits


def test_a_budget_that_nothing_fits_says_how_much_would():
    ledger = make_ledger({"m": PLAN}, budget=600 * MIB, host=100 * MIB)
    assert "no context_length and max_sequences would fit: raise memory.budget by at least" in ledger.advice
    assert "set dtype to bfloat16" not in ledger.advice
    assert "set dtype to bfloat16" in make_ledger({"m": PLAN}, budget=700 * MIB, host=100 * MIB).advice


def test_two_models_have_rows_and_offers_of_their_own():
    plans = {"a": PLAN, "b": replace(PLAN, dtype="bfloat16", max_sequences=8)}
    ledger = make_ledger(plans, budget=3 * 2**30, host=100 * MIB)
    assert {row.name for row in ledger.rows} >= {
        "a: weights",
        "b: weights",
        "engine process",
        "daemon process",
    }
    assert (
        ledger.total
        == sum(model_bytes(plan) for plan in plans.values()) + ledger_module.TORCH_RUNTIME + 100 * MIB
    )
    short = make_ledger(plans, budget=ledger.total - 200 * MIB, host=100 * MIB)
    assert "model a would fit with context_length" in short.advice
    assert "model b would fit with context_length" in short.advice


def test_a_configuration_is_planned_without_its_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = Config(
        models=(ModelConfig(name="m", path=tmp_path),), memory=MemoryConfig(budget=2**31, host=100 * MIB)
    )
    ledger = plan_memory(config)
    assert ledger.fits
    assert ledger.budget == 2**31
    with pytest.raises(LedgerError):
        plan_memory(replace(config, memory=MemoryConfig(budget=2**29, host=100 * MIB)))
    assert not compute_ledger(replace(config, memory=MemoryConfig(budget=2**29, host=100 * MIB))).fits
    with pytest.raises(CheckpointError, match=r"config\.json: this file is missing"):
        plan_memory(replace(config, models=(ModelConfig(name="m", path=tmp_path / "none"),)))


def test_the_budget_is_a_share_of_what_is_available_when_none_is_given(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = Config(models=(ModelConfig(name="m", path=tmp_path),))
    monkeypatch.setattr(ledger_module, "available_memory", lambda: 10 * 2**30)
    assert compute_ledger(config).budget == 8 * 2**30
    monkeypatch.setattr(ledger_module, "available_memory", lambda: None)
    with pytest.raises(LedgerError, match=r"set memory\.budget"):
        compute_ledger(config)


def test_available_memory_is_the_smaller_of_machine_and_control_groups(tmp_path):
    assert available_memory(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_memory(tmp_path) == 5000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/user/robot\n")
    group = tmp_path / "sys/fs/cgroup/user"
    (group / "robot").mkdir(parents=True)
    (group / "robot/memory.max").write_text("max\n")
    (group / "robot/memory.current").write_text("10\n")
    assert available_memory(tmp_path) == 5000 * 1024
    (group / "memory.max").write_text("4096000\n")
    (group / "memory.current").write_text("96000\n")
    assert available_memory(tmp_path) == 4_000_000
    (group / "memory.current").write_text("5000000\n")
    assert available_memory(tmp_path) == 0


def test_4_bit_weights_count_as_what_they_are():
    """packed integers, a float16 scale and a zero point a group; norms and tables as wide as the plan says."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
    config = {**SMOLLM2, "quantization_config": quantization}
    plan = replace(PLAN, architecture=Architecture.from_config(config), dtype="bfloat16")
    linears = 30 * ((576 + 2 * 192) * 576 + 576 * 576 + 3 * 1536 * 576)
    orders = 30 * 4 * (3 * 576 + 576 + 2 * 576 + 1536)
    row = next(row for row in model_rows(plan) if row.name == WEIGHTS)
    assert row.bytes == linears // 2 + 3 * linears // 64 + orders + 2 * 49152 * 576 + 61 * 576 * 4
    assert (
        row.note
        == f"{linears:,} parameters in 4 bits with their scales, {49152 * 576 + 61 * 576:,} in bfloat16"
    )
