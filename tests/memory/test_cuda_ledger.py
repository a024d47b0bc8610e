"""The budget of models on a GPU: computed without one, from the list that the executor allocates."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from edged.errors import LedgerError
from edged.memory.buffers import ModelPlan, step_buffers, weight_buffers
from edged.memory.cuda_buffers import (
    WIDE_TILE,
    StepLayout,
    attention_workspace,
    bucket_sizes,
    graphs,
    packed_workspace,
    tree_sizes,
)
from edged.memory.cuda_ledger import CUDA_CONTEXT, CUDA_RUNTIME, graph_bytes
from edged.memory.ledger import make_ledger
from edged.memory.model_rows import DEVICE, HOST, model_bytes, model_rows
from edged.models.architecture import Architecture
from plugins_trt.contract import SelectionRule
from plugins_trt.w4a16_linear.contract import LinearPlan

BENCH = Path(__file__).resolve().parents[2] / "bench"
MINICPM4 = runpy.run_path(str(BENCH / "_shapes.py"))["MINICPM4_8B"]
GIB = 2**30
PLAN = ModelPlan(
    Architecture.from_config(MINICPM4),
    dtype="bfloat16",
    context_length=131072,
    max_sequences=1,
    prefill_chunk=2048,
    device="cuda",
    selection=SelectionRule(),
)


def test_rows_are_the_bytes_of_the_buffers_and_all_lie_on_the_device():
    for plan in (PLAN, replace(PLAN, selection=None), replace(PLAN, max_sequences=7, dtype="float16")):
        rows = model_rows(plan)
        held = sum(spec.nbytes for spec in (*weight_buffers(plan), *step_buffers(plan)))
        assert sum(row.bytes for row in rows) == held + graph_bytes(plan)
        assert {row.place for row in rows} == {DEVICE}


def test_the_arithmetic_of_minicpm4():
    rows = {row.name: row.bytes for row in model_rows(PLAN)}
    assert rows["weights"] == 2 * 8_185_253_888
    assert rows["KV pages"] == 131072 * 32 * 1024
    # A fine key for 16 tokens, a coarse one for 64.
    assert rows["compressed keys"] == rows["KV pages"] // 2 // 16 + rows["KV pages"] // 2 // 64
    assert "compressed keys" not in {row.name for row in model_rows(replace(PLAN, selection=None))}


def test_a_bucket_of_trees_is_captured_for_dense_steps_for_sparse_ones_and_for_both():
    trees = replace(PLAN, tree_size=16)
    assert len(tree_sizes(trees)) == 4
    assert graphs(trees) - graphs(PLAN) == 3 * 4
    without = replace(trees, selection=None)
    assert graphs(without) - graphs(replace(PLAN, selection=None)) == 4


def test_4_bit_weights_and_what_their_products_need():
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    packed = replace(
        PLAN, architecture=Architecture.from_config({**MINICPM4, "quantization_config": quantization})
    )
    rows = {row.name: row for row in model_rows(packed)}
    dense = {row.name: row for row in model_rows(PLAN)}
    linears = 32 * (4608 * 4096 + 4096 * 4096 + 3 * 4096 * 16384)
    norms = 65 * 4096
    # Half a byte, and a word for the scale and the zero point of 128; embedding and head as they are.
    assert rows["weights"].bytes == linears // 2 + linears // 128 * 4 + 2 * (2 * 73448 * 4096 + norms)
    note = f"{linears:,} parameters in 4 bits with their scales, {2 * 73448 * 4096 + norms:,} in bfloat16"
    assert rows["weights"].note == note
    headed = {**MINICPM4, "quantization_config": {**quantization, "lm_head": True}}
    with_head = {
        row.name: row for row in model_rows(replace(PLAN, architecture=Architecture.from_config(headed)))
    }
    assert with_head["weights"] == rows["weights"]  # the head is widened
    scratch = rows["activations and scratch"].bytes - dense["activations and scratch"].bytes
    wide, workspace = 2 * WIDE_TILE, packed_workspace(packed)
    assert scratch == wide + workspace
    for multiprocessors in (8, 16, 46, 132, 188):
        for rows in (1, 16, 33, 64):
            for outputs, inputs in ((4608, 4096), (4096, 4096), (32768, 4096), (4096, 16384)):
                cut = LinearPlan.of(
                    rows=rows, outputs=outputs, inputs=inputs, multiprocessors=multiprocessors
                )
                assert cut.workspace_bytes <= workspace
    # Steps of few tokens widen nothing.
    few = replace(packed, prefill_chunk=127)
    assert "packed_wide" not in {spec.name for spec in step_buffers(few)}


def test_scratch_is_enough_for_every_smaller_device():
    planned = {spec.name: spec for spec in step_buffers(PLAN)}["attention_workspace"].nbytes
    for multiprocessors in (8, 16, 46, 132, 188):
        for tokens in bucket_sizes(PLAN):
            assert attention_workspace(PLAN, tokens, multiprocessors) <= planned


def test_the_parts_of_a_steps_data_do_not_overlap():
    layout = StepLayout.of(replace(PLAN, max_sequences=5))
    places = list(vars(layout).values())
    assert places == sorted(places)
    assert all(place % 4 == 0 for place in places)
    assert layout.words - layout.tables >= 5 * 2048


def test_a_gpu_with_its_own_memory_is_a_second_limit():
    ledger = make_ledger({"m": PLAN}, budget=100 * GIB, host=GIB, device_memory=24 * GIB)
    assert ledger.fits
    assert ledger.device_total == model_bytes(PLAN) + CUDA_CONTEXT
    assert ledger.total == ledger.device_total + CUDA_RUNTIME + GIB
    assert {row.name for row in ledger.rows if row.place == HOST} == {"engine process", "daemon process"}

    short = make_ledger({"m": PLAN}, budget=100 * GIB, host=GIB, device_memory=19 * GIB)
    assert not short.fits
    with pytest.raises(LedgerError, match=r"needed on the GPU, which has 19\.00 GiB") as caught:
        short.check()
    context = int(caught.value.message.split("context_length of at most ")[1].split()[0])
    fitting = replace(PLAN, context_length=context)
    assert make_ledger({"m": fitting}, budget=100 * GIB, host=GIB, device_memory=19 * GIB).fits


def test_one_memory_for_both_is_one_limit():
    """On a Jetson the device's rows come out of the same budget."""
    ledger = make_ledger({"m": PLAN}, budget=100 * GIB, host=GIB)
    assert make_ledger({"m": PLAN}, budget=ledger.total, host=GIB).fits
    assert not make_ledger({"m": PLAN}, budget=ledger.total - 1, host=GIB).fits
