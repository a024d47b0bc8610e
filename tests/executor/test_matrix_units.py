"""Chunks of bfloat16 as on CPUs with instructions for their products, tried on any CPU: torch multiplies them everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executor_runner import Runner, load
from test_random_models import MODELS, save

from edged.executor import torch_choice
from edged.executor.torch_choice import BY_ROWS, WIDENED
from edged.executor.torch_linear import CpuLinear
from edged.executor.torch_views import LinearViews, feature_major_view, input_view
from edged.models.operators import Linear

ROWS = 70


def prefer(monkeypatch, way):
    """Let every weight be measured, and this way be the fastest wherever it can be taken."""

    def seconds_of(products, *_):
        return {each: 1.0 + (each != way) for each in products}

    monkeypatch.setattr(torch_choice, "MEASURED_ELEMENTS", 0)
    monkeypatch.setattr(torch_choice, "seconds_of", seconds_of)


@pytest.fixture
def units(monkeypatch):
    prefer(monkeypatch, BY_ROWS)


@pytest.mark.parametrize("view_in", [input_view, feature_major_view])
@pytest.mark.parametrize("rows_at_once", [ROWS, 33, 1])
def test_gate_and_up_are_multiplied_activated_and_joined(units, view_in, rows_at_once):
    generator = torch.Generator().manual_seed(5)
    middle, inputs = 48, 40
    layer = Linear(
        "layers.0.gate_up", "gate_up", torch.randn(2 * middle, inputs, generator=generator).bfloat16()
    )
    tile = torch.full((rows_at_once * (2 * middle + inputs) // 2,), float("nan"))
    linear = CpuLinear([layer], {"weight_tile": tile})
    assert linear.wants_narrow
    x = view_in(torch.empty(ROWS * inputs), ROWS, inputs)
    x.copy_(torch.randn(ROWS, inputs, generator=generator).bfloat16())
    both = torch.full((ROWS, 2 * middle), float("nan"))
    activated = torch.full((ROWS, middle), float("nan"), dtype=torch.bfloat16)
    linear.gated(LinearViews.of(x, both), layer, activated)
    gate, up = (x.double() @ layer.weight.double().t()).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert (activated - expected).abs().max() / expected.abs().max() < 2e-2
    assert both.isnan().all(), "nobody reads it"


@pytest.mark.parametrize("name", ["llama", "untied, with biases", "qwen3"])
def test_a_model_answers_as_without_them(name, tmp_path, monkeypatch):
    """Chunks above and below the rows from which layouts change, and a last one that is short."""
    save(MODELS[name], tmp_path)
    ids = np.random.default_rng(2).integers(0, 211, 150).tolist()
    logits = {}
    for has in (False, True):
        prefer(monkeypatch, BY_ROWS if has else WIDENED)
        executor = load(tmp_path, dtype="bfloat16", context_length=512, max_sequences=2, prefill_chunk=128)
        runner = Runner(executor)
        logits[has] = [runner.prefill(runner.sequence(ids), chunk, rows="last") for chunk in (ROWS, 128, 40)]
        executor.close()
    for without, with_units in zip(*logits.values(), strict=True):
        assert not np.array_equal(without, with_units), "the units were not used"
        assert np.abs(without - with_units).mean() / without.std() < 0.04
